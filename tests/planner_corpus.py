"""Groups of real and made-up models for the planner's tests, and the best shard sizes known for them.

A case is ``(name, sizes, blocks, ranks, unit, align)``. Real cases are layers of published models, with
experts fused or separate, split over expert-parallel ranks, several layers to a group, under rules from one
row to whole matrices and in tiles, on 1 to 131072 ranks. ``planner_best_known.json`` holds for each case the
smallest shard size any search ever found and the largest lower bound; ``benchmarks/planner/best_known.py``
extends it.
"""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BEST_KNOWN = Path(__file__).with_name("planner_best_known.json")

_TILE = 128 * 128
Shape = tuple[str, tuple[int, ...]]  # role (expert or FFN matrix "x", other matrix "a", the rest "n"), shape


class Case(NamedTuple):
    name: str
    sizes: list[int]
    blocks: list[int]
    ranks: int
    unit: int
    align: int


def _matrices(role: str, *shapes: tuple[int, ...]) -> list[Shape]:
    return [(role, shape) for shape in shapes]


def _experts(count: int, inner: int, hidden: int, form: str) -> list[Shape]:
    if form == "separate":
        return _matrices("x", (inner, hidden), (inner, hidden), (hidden, inner)) * count
    if form == "fused":
        return _matrices("x", (count, 2 * inner, hidden), (count, hidden, inner))
    fused = _matrices("x", (count, hidden, 2 * inner), (count, inner, hidden))  # with biases, as GPT-OSS
    return fused + _matrices("n", (count, 2 * inner), (count, hidden))


def _attention(hidden: int, query: int, key: int) -> list[Shape]:
    return _matrices("a", (query, hidden), (key, hidden), (key, hidden), (hidden, query))


def _norms(*sizes: int) -> list[Shape]:
    return _matrices("n", *((size,) for size in sizes))


def deepseek(experts: int = 256, form: str = "separate") -> list[Shape]:
    """A mixture-of-experts layer of DeepSeek-V3."""
    latent = _matrices("a", (1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384))
    shared = _experts(1, 2048, 7168, "separate")
    router = _matrices("a", (256, 7168))
    return [*latent, *_norms(1536, 512, 7168, 7168), *router, *_experts(experts, 2048, 7168, form), *shared]


def qwen(experts: int, inner: int, hidden: int, query: int, form: str = "separate") -> list[Shape]:
    """A mixture-of-experts layer of the Qwen3 family."""
    head = [*_attention(hidden, query, 512), *_norms(128, 128, hidden, hidden)]
    return [*head, *_matrices("a", (128, hidden)), *_experts(experts, inner, hidden, form)]


def gpt_oss(experts: int = 128) -> list[Shape]:
    """A layer of GPT-OSS: all experts in one tensor."""
    head = [*_attention(2880, 4096, 512), *_norms(4096, 512, 512, 2880, 64, 2880, 2880)]
    return [*head, *_matrices("a", (128, 2880)), *_norms(128), *_experts(experts, 2880, 2880, "biased")]


def dense(hidden: int, inner: int, key: int) -> list[Shape]:
    """A layer of the Llama family."""
    ffn = _matrices("x", (inner, hidden), (inner, hidden), (hidden, inner))
    return [*_attention(hidden, hidden, key), *ffn, *_norms(hidden, hidden)]


GROUPS: dict[str, list[Shape]] = {
    "deepseek-v3": deepseek(),
    "deepseek-v3-fused": deepseek(form="fused"),
    "deepseek-v3-ep8": deepseek(32),
    "deepseek-v3-ep64": deepseek(4),
    "deepseek-v3-ep16-x4": deepseek(16) * 4,
    "deepseek-v3-x2": deepseek() * 2,
    "qwen3-235b": qwen(128, 1536, 4096, 8192),
    "qwen3-235b-fused": qwen(128, 1536, 4096, 8192, "fused"),
    "qwen3-235b-ep8": qwen(16, 1536, 4096, 8192),
    "qwen3-235b-x4": qwen(128, 1536, 4096, 8192) * 4,
    "qwen3-30b": qwen(128, 768, 2048, 4096),
    "qwen3-30b-x3": qwen(128, 768, 2048, 4096) * 3,
    "gpt-oss-120b": gpt_oss(),
    "gpt-oss-120b-x2": gpt_oss() * 2,
    "gpt-oss-120b-ep8": gpt_oss(16),
    "gpt-oss-20b": gpt_oss(32),
    "llama3-8b": dense(4096, 14336, 1024),
    "llama3-8b-x8": dense(4096, 14336, 1024) * 8,
    "llama3-8b-all": [*dense(4096, 14336, 1024) * 32, *_matrices("a", (128256, 4096), (128256, 4096))],
    "llama3-70b": dense(8192, 28672, 1024),
    "llama3-70b-x4": dense(8192, 28672, 1024) * 4,
    "llama3-405b": dense(16384, 53248, 1024),
    "kimi-k2": [*deepseek(384), *_norms(384)],
    "mixtral-8x7b": [
        *_attention(4096, 4096, 1024),
        *_norms(4096, 4096),
        *_experts(8, 14336, 4096, "separate"),
    ],
    "qwen2-57b": [
        *_attention(3584, 3584, 512),
        *_experts(64, 2560, 3584, "separate"),
        *dense(3584, 20480, 512),
    ],
    "embedding": [*_matrices("a", (201088, 2880)), *_norms(2880)],
}
RULES: dict[str, tuple[str, str]] = {  # for FFN and expert matrices, for the other matrices
    "ffn-1": ("1", "0"),
    "ffn-16": ("16", "0"),
    "ffn-32": ("32", "0"),
    "ffn-64": ("64", "0"),
    "ffn-128": ("128", "0"),
    "ffn-256": ("256", "0"),
    "all-1": ("1", "1"),
    "all-32": ("32", "32"),
    "all-128": ("128", "128"),
    "ffn-128-rest-16": ("128", "16"),
    "whole": ("whole", "whole"),
    "ffn-whole": ("whole", "0"),
    "elements-32": ("e32", "e32"),
}
RANKS = (
    1,
    2,
    3,
    5,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    100,
    128,
    192,
    256,
    320,
    384,
    512,
    640,
    768,
    896,
    1000,
    1024,
)
RANKS += (1536, 2048, 4096, 8192, 16384, 131072)


def block_numel(shape: tuple[int, ...], rule: str) -> int:
    """Elements of a block under a rule; rows are taken down to what divides the tensor."""
    if rule == "0" or len(shape) < 2:
        return 1
    if rule == "whole":
        return math.prod(shape[-2:])
    if rule.startswith("e"):
        return math.gcd(math.prod(shape), int(rule[1:]))
    return math.gcd(math.prod(shape[:-1]), int(rule)) * shape[-1]


def real_case(group: str, rule: str, ranks: int, align: int = 1) -> Case:
    ffn, rest = RULES[rule]
    sizes, blocks = [], []
    for role, shape in GROUPS[group]:
        sizes.append(math.prod(shape))
        blocks.append(block_numel(shape, {"x": ffn, "a": rest, "n": "0"}[role]))
    return Case(f"{group}/{rule}/{ranks}/align{align}", sizes, blocks, ranks, 128, align)


def real_cases() -> Iterator[Case]:
    """Every 16th combination, spread over all groups, rules and rank counts; one in four aligned to 8."""
    combinations = [(group, rule, ranks) for group in GROUPS for rule in RULES for ranks in RANKS]
    for place, (group, rule, ranks) in enumerate(combinations[7::16]):
        yield real_case(group, rule, ranks, 8 if place % 4 == 3 else 1)


def tile_cases() -> Iterator[Case]:
    """The matrices of a layer in tiles of 128 x 128, in a buffer of their own; edges fill whole tiles."""
    groups = ["deepseek-v3-fused", "qwen3-30b", "gpt-oss-120b", "gpt-oss-20b", "llama3-8b", "llama3-70b"]
    for group in [*groups, "kimi-k2", "llama3-405b"]:
        shapes = [shape for role, shape in GROUPS[group] if role != "n" and not math.prod(shape) % _TILE]
        sizes, blocks = [math.prod(shape) for shape in shapes], [_TILE] * len(shapes)
        for ranks in (64, 256, 384, 768, 1000, 1024):
            yield Case(f"{group}/tiles/{ranks}/align8", sizes, blocks, ranks, 128, 8)


def made_up_cases(count: int = 200, seed: int = 3) -> Iterator[Case]:
    """Random kinds and counts: blocks that share few factors, long and short tensors together."""
    rng = random.Random(seed)
    pick = lambda *options: options[int(rng.random() * len(options))]  # noqa: E731
    for number in range(count):
        tensors: list[tuple[int, int]] = []
        for _ in range(pick(1, 2, 3, 4, 6, 8, 12)):
            block = pick(1, 1, 32, 64, 128, 96, 100, 720, 1000, 1024, 1536, 2880, 4096) * pick(1, 1, 2, 3, 16)
            numel = block * pick(1, 1, 2, 3, 5, 8, 10, 16, 30, 56, 100, 512, 2880) * pick(1, 1, 2, 4)
            tensors += [(numel, block)] * pick(1, 1, 1, 2, 3, 4, 8, 16, 64, 128)
        ranks = pick(1, 2, 3, 4, 6, 7, 8, 16, 24, 32, 48, 64, 100, 128, 256, 512, 1000, 1024, 4096, 131072)
        unit, align = pick(1, 8, 128, 128), pick(1, 1, 4, 8, 16)
        sizes, blocks = [numel for numel, _ in tensors], [block for _, block in tensors]
        yield Case(f"made-up-{number}/{ranks}/unit{unit}/align{align}", sizes, blocks, ranks, unit, align)


def all_cases() -> list[Case]:
    return [*real_cases(), *tile_cases(), *made_up_cases()]


def best_known() -> dict[str, dict[str, int]]:
    """The record by case: ``shard``, the smallest size ever found, and ``bound``, the largest lower bound."""
    return json.loads(BEST_KNOWN.read_text()) if BEST_KNOWN.exists() else {}
