"""A transport of tiles: what was gathered in the order of tiles is untiled into the parameters.

Shards are runs of tiles, so the gathered buffer is in the order of tiles too, while computation wants rows::

    main weights   tiles|tiles|tiles        a shard per rank, cast into its slot, one all-gather
    gathered       tiles, from the gather until the layer
    parameters     rows, in the compute dtype

Untiling is one pass over the gathered bytes, which the zero-copy transport does not have; where codes travel
(``codes.py``) the pass that decodes them does it. It runs on the compute stream, just before the layer, and
the gathered tiles go when it is done. One rank alone casts and untiles its shard in one pass.
"""

from __future__ import annotations

import torch

from ragged_fsdp.dbuffer import DBuffer
from ragged_fsdp.fsdp.gather.transport import InPlace
from ragged_fsdp.fsdp.parts.members import Members
from ragged_fsdp.tiling import kind_views

__all__ = ["Tiled", "untile_group"]


def untile_group(stored: DBuffer, weight: DBuffer) -> None:
    """Write the tensors of ``stored``, which are in the order of their tiles, to ``weight`` in rows."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for spec, start, shape, flat in zip(
        stored.layout.specs, stored.layout.offsets, weight.shapes, stored.tensors
    ):
        # through the whole buffer: autograd would see a write to a parameter's own view
        whole = weight.flat.narrow(0, start, spec.numel).view(shape)
        assert spec.tile is not None
        for tiles, rows in kind_views(flat.view(-1), whole, spec.tile, wide=True):
            targets.append(rows)
            sources.append(tiles)
    if targets:
        torch._foreach_copy_(targets, sources)


class Tiled(InPlace):
    """Gathers tiles and untiles them into the buffer that the parameters view; see the module's docstring."""

    gathers_weight = False

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.layout = members.plan.layout.recut(members.plan.layout.ranks)
        self._tiles: DBuffer = None  # type: ignore[assignment]  # from ``prepare`` on
        """The gathered tiles in the compute dtype; memory from the allocation until they are untiled."""

    def prepare(self) -> None:
        """Make both buffers, without memory; raise if some parameters were cast and others not."""
        members, dtypes = self.members, self.members.gathered_dtypes
        if len({param.dtype for param in members.params}) > 1:
            kinds = sorted({str(param.dtype) for param in members.params})
            raise RuntimeError(
                f"{members.label}: parameters in the order of tiles must keep one dtype, got {kinds} after a "
                "cast; cast the whole module."
            )
        if self.weight is not None and self.weight.dtypes == dtypes:
            return
        super().prepare()
        self._tiles = self.make_buffer(members.plan.layout, dtype=dtypes[0])

    @property
    def _is_alone(self) -> bool:
        """Whether the shard is all there is, and lies on the device: nothing is gathered."""
        return self.members.mesh.shard_size == 1 and not self.members.offload

    def allocate(self) -> None:
        """Take the memory of the gathered tiles; that of the parameters when they are untiled."""
        members, comm, tiles = self.members, self.members.settings.gather_comm, self._tiles
        if self._is_alone:
            return
        if comm.allocates and members.mesh.shard_size > 1:
            self.stage(tiles)
            return
        with comm.memory(members.device):
            tiles.materialize()
        self._staged = tiles

    def begin(self, async_op: bool) -> None:
        """Cast the shard into its slot of the gathered tiles and gather."""
        if not self._is_alone:
            super().begin(async_op)

    def finish(self) -> None:
        """Wait for the tiles and write them to the parameters, on the compute stream."""
        super().allocate()
        if self._is_alone:
            untile_group(self.members.main.buffer, self.weight)  # type: ignore
        super().finish()

    def _unstage(self, weight: DBuffer, staged: DBuffer) -> None:
        untile_group(staged, weight)
        if staged is self._tiles:
            staged.release()
