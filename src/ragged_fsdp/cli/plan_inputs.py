"""What ``ragged-fsdp plan`` is asked to plan: parameter shapes, and the small languages of its options.

Shapes come from a model by any name that ``train`` takes, a Hugging Face config, or a list of tensors.
Models are built on the meta device, as ``train`` builds them, so nothing is downloaded and no memory is
used. ``transformers`` holds all experts of a layer in one tensor, whatever the checkpoint does;
``experts="published"`` plans them as the checkpoint has them (DeepSeek and Qwen: one matrix per expert),
``experts="separate"`` takes every expert apart.

The languages are granularity rules, wrap rules (which parameters share a buffer) and lists of FSDP sizes.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from ragged_fsdp.layout import TensorSpec
from ragged_fsdp.policy import Elements, Granularity, Rows, Tiles, parse_granularity

__all__ = [
    "GranularityRule",
    "Group",
    "ModelShapes",
    "TensorShape",
    "check_rules",
    "expand_rules",
    "load_shapes",
    "parse_rule",
    "parse_sizes",
    "spec_of",
    "wrap_groups",
]

_FUSED_AS_PUBLISHED = {"gpt_oss", "llama4", "llama4_text"}
_EXPERT_TENSOR = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<leaf>[^.]+)$")


@dataclass(frozen=True)
class TensorShape:
    """One parameter: name, shape and, where a plain list or a recipe gives it, its own granularity."""

    name: str
    shape: tuple[int, ...]
    granularity: Granularity | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelShapes:
    """All parameters of a model, in the order of the model."""

    title: str
    tensors: tuple[TensorShape, ...]
    model: Any = None
    """The model on the meta device that has just these parameters, where there is one."""


def load_shapes(source: str, *, experts: str = "built", ep: int = 1) -> ModelShapes:
    """The parameters of ``source``: a model's name, or the path of a JSON file or of a folder."""
    if experts not in ("built", "published", "separate"):
        raise ValueError(f"experts must be built, published or separate, got {experts!r}.")
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        content = _read_json(path)
        if isinstance(content, list) or (isinstance(content, dict) and "tensors" in content):
            return _from_list(path, content)
        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise ValueError(f"{path}: the config has no model_type; expected a Hugging Face config.json.")
        title = path.stem if path.stem != "config" else path.parent.name or "model"
        family, model = content["model_type"], _from_config(title, content)
    else:
        title, family, model = _by_name(source)
    tensors = [TensorShape(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    apart = experts == "separate" or (experts == "published" and family not in _FUSED_AS_PUBLISHED)
    stacked = family not in _FUSED_AS_PUBLISHED
    made = tuple(_with_experts(tensors, not apart, stacked, ep))
    return ModelShapes(title, made, None if apart else model)


def _by_name(source: str) -> tuple[str, str, Any]:
    """Name, family and meta model of what ``train --model`` would build."""
    try:
        from ragged_fsdp.models.config import BUILT_IN_SIZES
        from ragged_fsdp.models.names import nearest
        from ragged_fsdp.models.published import PUBLISHED, published_name
        from ragged_fsdp.models.source import find_model
    except ImportError as error:
        raise ValueError(f"{source}: building a model needs torch ({error}).") from None
    known = [*PUBLISHED, *BUILT_IN_SIZES]
    name = published_name(source) or source
    if name not in known and not (name[:1].isupper() and name.isidentifier()):  # not like a class either
        raise ValueError(
            f"{source!r} is neither a file nor a known model, nor a Hugging Face config class such as "
            f"LlamaConfig, nor a folder with a config.json; {nearest(source, known)}"
        )
    found = find_model(name, {}, random_weights=True)
    return name, str(found.settings.get("model_type", "")), found.build()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON: {error}.") from None


def _from_list(path: Path, content: Any) -> ModelShapes:
    """``[{"name": ..., "shape": [...]}, ...]``, or the same under ``tensors`` next to a ``model`` name."""
    entries = content if isinstance(content, list) else content["tensors"]
    title = path.stem if isinstance(content, list) else str(content.get("model", path.stem))
    if not isinstance(entries, list):
        raise ValueError(f"{path}: tensors must be a list, got {type(entries).__name__}.")
    tensors = []
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ValueError(f"{path}: entry {place} must be an object with a name, got {entry!r:.80}.")
        name, shape, block = entry["name"], entry.get("shape"), entry.get("block")
        if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
            raise ValueError(f"{path}: {name}: shape must be a list of sizes, got {shape!r:.80}.")
        if block is not None and (type(block) is not int or block < 1):
            raise ValueError(f"{path}: {name}: block must be a number of elements, got {block!r:.80}.")
        tensors.append(TensorShape(name, tuple(shape), None if block is None else Elements(block)))
    return ModelShapes(title, tuple(tensors))


def _from_config(title: str, config: dict[str, Any]) -> Any:
    """The model on the meta device: shapes without memory."""
    try:
        from ragged_fsdp.models.huggingface import model_from_settings
    except ImportError as error:
        raise ValueError(
            f"{title}: building a model needs transformers 5 ({error}); in a checkout: pip install '.[hf]', "
            "or give a JSON of tensors."
        ) from None

    try:
        return model_from_settings({k: v for k, v in config.items() if k != "quantization_config"})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{title}: transformers cannot build this config: {error}") from None


def _with_experts(
    tensors: Iterable[TensorShape], fused: bool, stacked: bool, ep: int
) -> Iterator[TensorShape]:
    """The expert tensors of one expert-parallel rank, together or one by one.

    ``stacked`` says that a ``gate_up_proj`` is the two published matrices on top of each other.
    """
    for tensor in tensors:
        match = _EXPERT_TENSOR.match(tensor.name)
        if match is None or len(tensor.shape) < 2:
            yield tensor
            continue
        experts = tensor.shape[0]
        if experts % ep:
            raise ValueError(f"{tensor.name}: {experts} experts cannot be split over {ep} ranks (--ep).")
        if fused:
            yield TensorShape(tensor.name, (experts // ep, *tensor.shape[1:]))
            continue
        leaf, shape = match["leaf"], tensor.shape[1:]
        for expert in range(experts // ep):
            prefix = f"{match['prefix']}.{expert}"
            if stacked and leaf == "gate_up_proj":
                for half in ("gate_proj", "up_proj"):
                    yield TensorShape(f"{prefix}.{half}.weight", (shape[0] // 2, *shape[1:]))
            else:
                yield TensorShape(f"{prefix}.{leaf}.weight", shape)


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
            case Tiles(rows, columns):
                return f"{self.pattern}=tiles:{rows}x{columns}"
        return f"{self.pattern}=whole"


def parse_rule(text: str) -> GranularityRule:
    """``PATTERN=GRANULARITY``: ``128rows``, ``tiles:128x128``, ``256elements`` or ``whole``."""
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


def check_rules(tensors: Sequence[TensorShape], rules: Iterable[GranularityRule]) -> None:
    """Raise for a rule that would do nothing: no name matches it, or all that do have an earlier rule or a
    block of their own."""
    left = [tensor.name for tensor in tensors if tensor.granularity is None]
    everything = [tensor.name for tensor in tensors]
    for rule in rules:
        matched = [name for name in everything if fnmatchcase(name, rule.pattern)]
        if not matched:
            near = get_close_matches(rule.pattern, everything, n=1, cutoff=0.0)
            example = f" like {near[0]!r}" if near else ""
            raise ValueError(
                f"granularity {rule.text!r}: matches none of {len(everything)} parameters; "
                f"they are named{example}."
            )
        taken = set(left).intersection(matched)
        if not taken:
            raise ValueError(
                f"granularity {rule.text!r}: earlier rules take every parameter it matches, "
                "or the file gives their blocks."
            )
        left = [name for name in left if name not in taken]


def spec_of(tensor: TensorShape, rules: Sequence[GranularityRule], nearest: bool = False) -> TensorSpec:
    """The tensor with the block of the first rule that matches its name; element-wise without one.

    Rows and tiles mean something for matrices only: tensors of one dimension stay element-wise under such a
    rule.
    Where a block does not divide the tensor, ``nearest`` takes the largest one below it that does.
    """
    if tensor.granularity is not None:
        own = tensor.granularity
        tile = (own.rows, own.columns) if isinstance(own, Tiles) else None
        return TensorSpec(tensor.name, tensor.numel, own.block_numel(tensor.shape), tile)
    rule = next((rule for rule in rules if fnmatchcase(tensor.name, rule.pattern)), None)
    if rule is None or not tensor.numel:
        return TensorSpec(tensor.name, tensor.numel)
    granularity = rule.granularity
    if isinstance(granularity, (Rows, Tiles)) and len(tensor.shape) < 2:
        return TensorSpec(tensor.name, tensor.numel)
    block = granularity.block_numel(tensor.shape)
    if isinstance(granularity, Tiles):
        return TensorSpec(tensor.name, tensor.numel, block, (granularity.rows, granularity.columns))
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
