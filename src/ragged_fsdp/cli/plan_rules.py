"""The small languages of ``ragged-fsdp plan``: granularity rules, wrap rules and lists of FSDP sizes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

from ragged_fsdp.cli.plan_models import TensorShape
from ragged_fsdp.layout import TensorSpec
from ragged_fsdp.policy import Elements, Granularity, Rows, parse_granularity

__all__ = ["GranularityRule", "Group", "expand_rules", "parse_rule", "parse_sizes", "spec_of", "wrap_groups"]


@dataclass(frozen=True)
class GranularityRule:
    """Parameters whose name matches ``pattern`` keep blocks of ``granularity`` together."""

    pattern: str
    granularity: Granularity

    @property
    def text(self) -> str:
        match self.granularity:
            case Rows(count):
                return f"{self.pattern}={count}rows"
            case Elements(count):
                return f"{self.pattern}={count}elements"
        return f"{self.pattern}=whole"


def parse_rule(text: str) -> GranularityRule:
    """``PATTERN=GRANULARITY``, the granularity being ``128rows``, ``256elements`` or ``whole``."""
    pattern, separator, granularity = text.rpartition("=")
    if not separator or not pattern:
        raise ValueError(
            f"granularity {text!r}: expected PATTERN=GRANULARITY, such as '*.experts.*=128rows', "
            "'*=256elements' or '*=whole'."
        )
    return GranularityRule(pattern, parse_granularity(granularity))


def expand_rules(texts: Sequence[str]) -> list[tuple[GranularityRule, ...]]:
    """One list of rules per granularity to compare: ``'*=1rows|128rows'`` gives two lists."""
    choices = []
    for text in texts:
        pattern, separator, alternatives = text.rpartition("=")
        choices.append([parse_rule(f"{pattern}{separator}{option}") for option in alternatives.split("|")])
    return [tuple(rules) for rules in product(*choices)]


def spec_of(tensor: TensorShape, rules: Sequence[GranularityRule], nearest: bool = False) -> TensorSpec:
    """The tensor with the block of the first rule that matches its name; element-wise without one.

    Rows mean something for matrices only: tensors of one dimension stay element-wise under a row rule.
    Where a block does not divide the tensor, ``nearest`` takes the largest one below it that does.
    """
    if tensor.block_numel is not None:
        return TensorSpec(tensor.name, tensor.numel, tensor.block_numel)
    rule = next((rule for rule in rules if fnmatchcase(tensor.name, rule.pattern)), None)
    if rule is None or not tensor.numel:
        return TensorSpec(tensor.name, tensor.numel)
    granularity = rule.granularity
    if isinstance(granularity, Rows) and len(tensor.shape) < 2:
        return TensorSpec(tensor.name, tensor.numel)
    block = granularity.block_numel(tensor.shape)
    if tensor.numel % block and isinstance(granularity, Rows):
        rows, row = tensor.numel // tensor.shape[-1], tensor.shape[-1]
        fitting = next(count for count in range(min(granularity.count, rows), 0, -1) if rows % count == 0)
        if not nearest:
            raise ValueError(
                f"{tensor.name}: {granularity.count} rows do not divide its {rows} rows; put a rule such as "
                f"'{tensor.name}={fitting}rows' before '{rule.text}', or pass --nearest."
            )
        block = fitting * row
    elif tensor.numel % block:
        fitting = math.gcd(block, tensor.numel)
        if not nearest:
            raise ValueError(
                f"{tensor.name}: blocks of {block} elements do not divide its {tensor.numel} elements; put a "
                f"rule such as '{tensor.name}={fitting}elements' before '{rule.text}', or pass --nearest."
            )
        block = fitting
    return TensorSpec(tensor.name, tensor.numel, block)


@dataclass(frozen=True)
class Group:
    """Parameters that share a buffer."""

    name: str
    tensors: tuple[TensorShape, ...]


def wrap_groups(tensors: Sequence[TensorShape], wraps: Sequence[str]) -> list[Group]:
    """Groups by module, as ``fully_shard`` on the modules that match would make them.

    A wrap is ``layers`` (every member of the outermost module lists), ``model`` (one group), or a module
    pattern compared part by part, such as ``model.layers.*`` or ``lm_head``. A parameter goes to the
    longest module that matches; what no pattern matches goes to the root group.
    """
    members: dict[str, list[TensorShape]] = {}
    unused = {wrap for wrap in wraps if wrap not in ("layers", "model")}
    for tensor in tensors:
        parts = tensor.name.split(".")[:-1]
        taken = {wrap: _wrapped(parts, wrap) for wrap in wraps}
        unused -= {wrap for wrap, length in taken.items() if length}
        home = max(taken.values(), default=0)
        members.setdefault(".".join(parts[:home]), []).append(tensor)
    if unused:
        example = tensors[len(tensors) // 2].name.rpartition(".")[0] if tensors else ""
        raise ValueError(f"wrap {min(unused)!r} matches no module; modules are named like {example!r}.")
    return [Group(name or "root", tuple(held)) for name, held in members.items()]


def _wrapped(parts: Sequence[str], wrap: str) -> int:
    """How many leading name parts the wrapped module takes; 0 where the wrap does not apply."""
    if wrap == "model":
        return 0
    if wrap == "layers":
        return next((place + 1 for place, part in enumerate(parts) if part.isdigit()), 0)
    pattern = wrap.split(".")
    fits = len(parts) >= len(pattern) and all(map(fnmatchcase, parts, pattern))
    return len(pattern) if fits else 0


def parse_sizes(text: str) -> list[int]:
    """FSDP sizes: ``64``, ``8,16,32`` or ``8:1024:8`` (from, to and step; both ends included)."""
    sizes: list[int] = []
    for part in text.split(","):
        fields = part.strip().split(":")
        if len(fields) > 3 or not all(field.isdigit() and int(field) > 0 for field in fields):
            raise ValueError(f"FSDP sizes {text!r}: expected numbers or FROM:TO:STEP, got {part!r}.")
        first, *rest = (int(field) for field in fields)
        last = rest[0] if rest else first
        step = rest[1] if len(rest) == 2 else first
        if last < first:
            raise ValueError(f"FSDP sizes {text!r}: {part!r} ends before it starts.")
        sizes += range(first, last + 1, step)
    return sorted(set(sizes))
