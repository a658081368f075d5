"""Several buffers for one group, where a single one is wasteful.

Blocks of very different size force the shard of a common buffer up to a multiple of their LCM. Apart,
each buffer needs only its own. The price is one more collective per buffer, so a split must pay:
it is taken only if it saves more than ``threshold`` of the group's elements per extra buffer.
"""

from collections.abc import Sequence
from itertools import combinations

from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.planner.group import plan_group

__all__ = ["SPLIT_THRESHOLD", "plan_buffers"]

SPLIT_THRESHOLD = 0.01
_MOST_BLOCKS = 12


def plan_buffers(
    specs: Sequence[TensorSpec],
    ranks: int,
    *,
    max_buffers: int = 1,
    threshold: float = SPLIT_THRESHOLD,
    unit: int = 128,
    align: int = 1,
) -> tuple[GroupLayout, ...]:
    """Layouts of at most ``max_buffers`` buffers that together hold ``specs``, each in the given order.

    Tensors are split by block size: neighbours in size stay together, element-wise tensors go where they
    cost least. A buffer is added only if the padding falls by more than ``threshold`` of all elements.
    """
    if not isinstance(max_buffers, int) or isinstance(max_buffers, bool) or max_buffers < 1:
        raise ValueError(f"plan_buffers: max_buffers must be an int of at least 1, got {max_buffers!r}.")
    if not isinstance(threshold, int | float) or not 0 <= threshold < 1:
        raise ValueError(f"plan_buffers: threshold must be in [0, 1), got {threshold!r}.")
    best: tuple[GroupLayout, ...] = (plan_group(specs, ranks, unit=unit, align=align),)
    numel = best[0].tensor_numel
    for buffers in range(2, max_buffers + 1):
        found = _best_split(specs, ranks, buffers, unit, align)
        if found is None:
            break
        extra = len(found) - len(best)
        if _padding(best) - _padding(found) > threshold * numel * extra:
            best = found
    return best


def _padding(layouts: Sequence[GroupLayout]) -> int:
    return sum(layout.padding_numel for layout in layouts)


def _best_split(
    specs: Sequence[TensorSpec], ranks: int, buffers: int, unit: int, align: int
) -> tuple[GroupLayout, ...] | None:
    """The split into exactly ``buffers`` with the least padding; None if there are too few block sizes."""
    blocks = sorted({spec.block_numel for spec in specs if spec.block_numel > 1 and spec.numel})
    if not 2 <= buffers <= len(blocks):
        return None
    blocks = _merged(specs, blocks)
    best: tuple[GroupLayout, ...] | None = None
    for cuts in combinations(range(1, len(blocks)), buffers - 1):
        edges = [0, *(blocks[cut] for cut in cuts), max(spec.block_numel for spec in specs) + 1]
        for home in range(buffers):
            parts: list[list[TensorSpec]] = [[] for _ in range(buffers)]
            for spec in specs:
                place = sum(edge <= spec.block_numel for edge in edges[1:-1])
                parts[home if spec.block_numel == 1 or not spec.numel else place].append(spec)
            found = tuple(plan_group(part, ranks, unit=unit, align=align) for part in parts)
            if best is None or _padding(found) < _padding(best):
                best = found
    return best


def _merged(specs: Sequence[TensorSpec], blocks: list[int]) -> list[int]:
    """The block sizes at which a cut is worth trying: those with the most elements, if there are many."""
    volume = {block: sum(s.numel for s in specs if s.block_numel == block) for block in blocks}
    return sorted(sorted(blocks, key=lambda block: (-volume[block], block))[:_MOST_BLOCKS])
