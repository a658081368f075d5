"""``stream``: a sharded model's weights, group after group, to whoever runs inference.

A pass gathers the next group while the consumer has the one before: two are in memory at a time, and no
third copy. Before each gather the ranks tell each other whether they go on, so that a consumer that stops or
raises on one rank ends the pass on all of them::

    consumer              next    [ uses bucket 0 ........ ]  next    [ uses bucket 1 ........ ]
    rank       go? gather 0 wait    go? gather 1 ...............wait    go? gather 2 ...........
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ragged_fsdp.agreement import done_alike
from ragged_fsdp.dbuffer.checks import device_of
from ragged_fsdp.fsdp.runtime.module import reshard_all
from ragged_fsdp.topology import subgroup
from ragged_fsdp.weights.adapters import Adapters
from ragged_fsdp.weights.buckets import Bucket, Record
from ragged_fsdp.weights.changes import Changes
from ragged_fsdp.weights.coded_source import CodedSource, coded_where_held
from ragged_fsdp.weights.codes import coded, encoded_bucket, encoded_records
from ragged_fsdp.weights.names import Naming, default_naming
from ragged_fsdp.weights.passes import Pass
from ragged_fsdp.weights.sources import GroupSource, LooseSource, ModelTensor, member_of, sources_of
from ragged_fsdp.weights.targets import Target, holders_of, named_tensors, targets_of

__all__ = ["Stream", "stream"]

_GO, _WHOLE, _STOP = 0, 1, 2
"""What ranks tell each other of a bucket; the largest counts. Where the last pass of one rank did not come to
its end, all of them send whole buckets."""


def stream(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    names: Naming | Mapping[str, str] | None = None,
    codes: str | Callable[[str, tuple[int, ...]], bool] | None = None,
    delta: bool = False,
    snapshot: bool = False,
    to: int | None = None,
) -> Stream:
    """The weights of ``model`` as a :class:`Stream`, to be iterated on all of its ranks in step.

    Args:
        dtype: of floating-point tensors; default is that of the parameters. 8-bit ones are sent as they are.
        names: the names outside, and the parts of tensors there, as for :func:`load`.
        codes: ``"fp8"`` sends linear layers as float8 codes and a scale per 128 x 128 block; a function of
            the outside name and the shape says which tensors.
        delta: whether later passes send only blocks that have changed since the pass before.
        snapshot: copy this rank's shards now, and gather from the copies over process groups of their own:
            training may go on before and during the pass, in another thread too.
        to: the one rank that gets the weights; the others send theirs, hold no bucket, and see empty ones.

    Raises:
        ValueError: on every rank, if an argument is not usable, a parameter has no memory yet, or the ranks
            do not stream the same.
    """
    reshard_all(model)
    groups, device = _groups_of(targets_of(model))
    made = done_alike(
        "stream",
        lambda: Stream(model, dtype, names, codes, delta, snapshot, to),
        lambda made: made.description,
        groups,
        device,
    )
    made.open(groups, device)
    return made


class Stream:
    """The weights of a model; each iteration is a pass over all of them. Made by :func:`stream`."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        names: Naming | Mapping[str, str] | None,
        codes: str | Callable[[str, tuple[int, ...]], bool] | None,
        delta: bool,
        snapshot: bool,
        to: int | None,
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"stream: dtype must be a floating-point dtype or None, got {dtype!r}.")
        if codes is not None and delta:
            raise ValueError("stream: codes and delta cannot be had together")
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if to is not None and (isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < ranks):
            raise ValueError(f"stream: to must be a rank of the {ranks} there are, or None, got {to!r}.")
        if to is not None and delta:
            raise ValueError(
                "stream: to and delta cannot be had together: changes are exchanged by all ranks"
            )
        self._to = to
        self._model = model
        adapters = Adapters(model)
        naming = default_naming(adapters.base, names)
        self._naming: Naming = lambda name, tensor: naming(adapters.plain(name) or name, tensor)
        self._is_coded = coded(codes)
        targets = targets_of(model)
        holders = holders_of(targets)
        if to is not None and holders and to not in holders:  # nobody would send to it
            raise ValueError(f"stream: to must be a rank of the model, one of {holders}, or None, got {to}.")
        without = [target.name for target in targets if target.tensor.is_meta]
        if without:
            raise ValueError(f"stream: {without[0]!r} is on the meta device and has no weights")
        members = [
            ModelTensor(target, ())
            if (sent := adapters.sent(target)) is None
            else member_of(sent, self._naming, adapters.of.get(id(target.tensor), ()))
            for target in targets
        ]
        self._sources = sources_of(model, members, dtype, one_dtype=delta)
        if self._is_coded is not None:
            self._sources = [coded_where_held(source, self._is_coded) for source in self._sources]
        self.delta = delta
        """Whether passes after the first have changes."""
        self._changes = Changes() if delta else None
        self._whole = True
        """Whether the pass under way sends whole tensors, and no changes."""
        self._shards: dict[int, Tensor] | None = {} if snapshot else None
        for source in self._sources:
            split = [m.target for m in source.members if isinstance(m.target.tensor, DTensor)]
            if snapshot and isinstance(source, LooseSource) and split:
                raise ValueError(
                    f"stream: snapshot=True, but {split[0].name!r} is gathered over process groups of the "
                    "model (tensor or expert parallelism, tiles, an explicit Shard, dtypes of several sizes)"
                )
            if delta and isinstance(source, GroupSource) and source.copied:
                member, at = source.members[source.copied[0][0]], source.copied[0][1]
                raise ValueError(
                    f"stream: delta=True, but {member.parts[at].stored!r} is no run of the model's "
                    f"{member.target.name!r}, whose blocks are compared"
                )
        self._records = [record for source in self._sources for record in self._of(source)]
        counts = Counter(record.name for record in self._records)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"stream: names= gives two tensors the name {twice[0]!r}")
        lines = [f"{r.name} {r.shape} {r.dtype}" for r in self._records]
        self.description = "\n".join([*lines, f"delta {delta} snapshot {snapshot} to {to}"])
        self._running = False

    def open(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        """Take the snapshot, if there is to be one, and the process groups to gather over."""
        self._groups = groups
        used = [s.process_group for s in self._sources if isinstance(s, GroupSource)]
        own = {
            group: _twin(group, device) if self._shards is not None else group
            for group in dict.fromkeys([*groups, *used])
        }
        for source in self._sources:
            if self._to is not None and isinstance(source, GroupSource):
                ranks = dist.get_process_group_ranks(source.process_group)
                source.receiver = ranks.index(self._to) if self._to in ranks else -1
        self._flag_groups = [own[group] for group in groups if group.size() > 1]
        self._own = own
        self._device = device
        self._side = None
        if device.type != "cpu":
            self._side = torch.get_device_module(device).Stream(device=device)
        if self._shards is not None:
            self._copy()

    def refresh(self) -> None:
        """With ``snapshot``: copy the shards again, on all ranks at the end of a later step.

        All of them raise while one has a pass under way, which would go on with the weights of another step.
        """
        if self._shards is None:
            raise ValueError("refresh: the stream was made without snapshot=True")

        def found() -> dict[LooseSource, list[Tensor]]:
            self._refuse_pass()
            return self._found()

        self._take(done_alike("refresh", found, lambda _: "", self._groups, self._device))
        self._copy()

    def _copy(self) -> None:
        """Take the snapshot."""
        self._shards = {
            index: source.fill(source.empty_shard(), self._own[source.process_group])
            for index, source in enumerate(self._sources)
            if isinstance(source, GroupSource)
        }
        for source in self._sources:
            if isinstance(source, LooseSource):
                source.tensors = [tensor.detach().clone() for tensor in source.tensors]
        if self._side is not None:  # a pass may run on a stream that knows nothing of this one
            self._side.wait_stream(torch.get_device_module(self._device).current_stream(self._device))

    def metadata(self) -> list[Record]:
        """Names, dtypes and shapes, in the order of a pass; nothing is gathered. Offsets are 0 here."""
        return list(self._records)

    def parameter_names(self) -> set[str]:
        """The names, of those in :meth:`metadata`, of what is a parameter and no buffer."""
        members = (member for source in self._sources for member in source.members)
        trained = (member for member in members if isinstance(member.target.tensor, nn.Parameter))
        return {part.stored for member in trained for part in member.parts}

    @property
    def device(self) -> torch.device:
        """Where buckets lie on this rank."""
        return self._device

    @property
    def to(self) -> int | None:
        """The one rank that gets the weights; None if all do."""
        return self._to

    @property
    def gathers(self) -> int:
        """How many gathers a pass has."""
        return len(self._sources)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest bucket that is gathered; a pass holds two of them at most."""
        return max((source.nbytes for source in self._sources), default=0)

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """A pass as ``(name, tensor)``, for any ``load_weights``."""
        if self._changes is not None:
            raise ValueError(
                "tensors: with delta=True a pass has changes of tensors; iterate over the stream"
            )
        with iter(self) as buckets:
            for bucket in buckets:
                yield from bucket.tensors()

    def __iter__(self) -> Pass:
        """A pass: buckets, or with ``delta`` from the second pass on changes of them."""
        self.begin()
        return Pass(self)

    def begin(self) -> None:
        """Let no other pass begin until this one has :meth:`ended`."""
        self._refuse_pass()
        self._whole = self._changes is None or not self._changes.complete
        self._running = True

    def _refuse_pass(self) -> None:
        if self._running:
            raise RuntimeError("the stream is being iterated; another pass, or a refresh, must wait")

    def look(self) -> None:
        """Without a snapshot, before the first gather of a pass: take over what the model holds now.

        What one rank refuses then ends the pass on all.
        """
        if self._shards is None:
            self._take(self._found())

    def _found(self) -> dict[LooseSource, list[Tensor]]:
        """What lies in the place of each tensor now: a forward assigns buffers, a state dict any."""
        loose = [source for source in self._sources if isinstance(source, LooseSource)]
        if any(isinstance(tensor, DTensor) for source in loose for tensor in source.tensors):
            reshard_all(self._model)  # gathered parameters have the names of sharded ones
        held = named_tensors(self._model) if loose else {}
        return {source: source.found(held) for source in loose}

    def _take(self, found: dict[LooseSource, list[Tensor]]) -> None:
        for source in self._sources:
            if isinstance(source, LooseSource):
                source.tensors = found[source]
            elif source.group.stale:
                source.group.reset_sharded_params()

    def ended(self, *, complete: bool) -> None:
        """A pass is over; of one that was not complete the receiver has some: the next sends everything."""
        self._running = False
        if self._side is not None:  # the weights may change from here on
            torch.get_device_module(self._device).current_stream(self._device).wait_stream(self._side)
        if self._changes is not None:
            self._changes.complete = complete

    def agree(self, *, going_on: bool) -> bool:
        """Whether all ranks go on with a pass: one small all-reduce per process group."""
        going = _WHOLE if self._whole else _GO
        told = _tell(self._flag_groups, going if going_on else _STOP, self._device)
        self._whole = self._whole or told == _WHOLE
        return told != _STOP

    def in_shards(self, index: int) -> GroupSource | None:
        """The source of a bucket that is the ranks' shards, one behind the other; None of any other."""
        source = self._sources[index]
        if not isinstance(source, GroupSource) or source.copied or self._is_coded is not None:
            return None
        return source

    def group(self, used: dist.ProcessGroup) -> dist.ProcessGroup:
        """The process group over which the stream gathers what the model gathers over ``used``."""
        return self._own[used]

    def write_shard(self, index: int, slot: Tensor, written: Any) -> None:
        """Write this rank's part of a bucket :meth:`in_shards`, beside the current stream; then an event."""
        source = self.in_shards(index)
        assert source is not None
        shard = slot[: source.shard_bytes].view(source.dtype)
        with self._beside():
            if self._shards is not None:
                shard.copy_(self._shards[index], non_blocking=True)
            else:
                source.fill(shard, self._own[source.process_group])
            if written is not None:
                written.record()

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        """The stream that gathers run on, behind what the current one has been given."""
        if self._side is None:
            return contextlib.nullcontext()
        module = torch.get_device_module(self._device)
        self._side.wait_stream(module.current_stream(self._device))
        return module.stream(self._side)

    def prepare(self, index: int) -> Callable[[], Callable[[], list[Any]]]:
        """Take the memory of a source's gather; returns what starts it, which returns what finishes it."""
        source = self._sources[index]
        if isinstance(source, LooseSource):
            return lambda: partial(list, [self._encoded(source, self._loose(source))])
        group = self._own[source.process_group]
        shard = self._shards[index] if self._shards is not None else None
        changes = self._changes
        live = source.empty_shard() if changes is not None and shard is None else None
        memory = source.allocate() if self._whole else None

        def start() -> Callable[[], list[Any]]:  # here, since ranks that merge adapters meet in it
            sent = source.fill(live, group) if live is not None else shard
            if changes is not None and sent is not None:
                if not self._whole:
                    return partial(list, [changes.since(index, source, sent, group)])
                changes.keep(index, sent)
            flat = memory if memory is not None else source.allocate()
            gathered = source.gather(flat, sent, self._side, group)
            return lambda: [self._encoded(source, b) for b in source.buckets(gathered.wait(), self._naming)]

        return start

    def _loose(self, source: LooseSource) -> Bucket:
        bucket = source.bucket(self._naming)
        if self._to is not None and dist.is_initialized() and dist.get_rank() != self._to:
            return Bucket(source.label, bucket.data[:0], ())
        return bucket

    def _encoded(self, source: GroupSource | LooseSource, bucket: Bucket) -> Bucket:
        if self._is_coded is None or isinstance(source, CodedSource):
            return bucket
        return encoded_bucket(bucket, self._is_coded)

    def _of(self, source: GroupSource | LooseSource) -> list[Record]:
        """The records of a source, without its values."""
        if isinstance(source, CodedSource):
            return [Record(record.name, record.dtype, record.shape, 0) for record in source.records]
        records = []
        for place, member in enumerate(source.members):
            kind = source.sent[place] if isinstance(source, GroupSource) else source.sent(member)
            records += [Record(part.stored, kind, part.shape, 0) for part in member.parts]
        if isinstance(source, GroupSource) and source.copied:
            behind = {source.members[place].parts[index].stored for place, index in source.copied}
            records.sort(key=lambda record: record.name in behind)
        if self._is_coded is None:
            return records
        return [made for record in records for made in encoded_records(record, self._is_coded)]


def _tell(groups: Sequence[dist.ProcessGroup], flag: int, device: torch.device) -> int:
    """The largest flag of all ranks: one small all-reduce per process group."""
    if not groups:
        return flag
    told = torch.tensor([flag], dtype=torch.int32, device=device)
    for group in groups:
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    return int(told.item())


def _groups_of(targets: Sequence[Target]) -> tuple[list[dist.ProcessGroup], torch.device]:
    """The process groups of the model, in the order of its tensors, and the device of this rank."""
    groups: dict[dist.ProcessGroup, None] = {}
    device = torch.device("cpu")
    for target in targets:
        if isinstance(target.tensor, DTensor):
            mesh = target.tensor.device_mesh
            device = device_of(mesh)
            for dim in range(mesh.ndim):
                groups.setdefault(mesh.get_group(dim))
    return list(groups), device


_TWINS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _twin(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A process group of the same ranks, for collectives beside those of training; made once."""
    if group not in _TWINS:
        _TWINS[group] = subgroup(group, range(group.size()), device)
    return _TWINS[group]
