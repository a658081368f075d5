"""What a training run computes, to the bit: losses, norms, final weights and optimizer states.

A change of structure must not change a result. This trains the demo's mixture of experts, half as wide, and a
dense model of that size for 20 steps with each optimizer on 1 to 4 gloo ranks, then on 4 ranks with each
option of ``fully_shard`` that takes another way through the runtime, and writes down what came out. Two files
are compared::

    python -m benchmarks.bits.run --out new.json                                    # two minutes
    python -m benchmarks.bits.run --only adamw --ranks 2,3 --out some.json          # some of the rows
    python -m benchmarks.bits.run --compare benchmarks/bits/results/torch-2.13.json new.json
    PYTHONPATH=OTHER/src python -m benchmarks.bits.run --out other.json             # of another source tree

Only public names are used, so that it runs on other commits. Bits also depend on the release of torch and on
the instructions of the processor, which the file names; a comparison says where they are not the same. Each
rank computes on one thread: with more, the sums of a matrix product would depend on the number of cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.ranks import join_ranks, start_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ragged_fsdp
from ragged_fsdp import BlockCodes, CPUOffloadPolicy, MixedPrecisionPolicy, Rows, fully_shard
from ragged_fsdp.models import BUILT_IN_SIZES, MoETransformer
from ragged_fsdp.optim import AdamW8bit, FusedAdamW, Muon, block_policy, clip_grad_norm_

__all__ = ["ROWS", "Row", "differences", "main"]

STEPS, SEQUENCES, TOKENS = 20, 12, 16
_DECAY = 0.1
_HALF_AS_WIDE = replace(BUILT_IN_SIZES["demo"], hidden=64, expert_hidden=64)
MODELS = {
    "dense": replace(_HALF_AS_WIDE, experts=1, experts_per_token=1, expert_hidden=256, tied_embeddings=True),
    "moe": _HALF_AS_WIDE,
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: FusedAdamW(model.named_parameters(), lr=2e-3, weight_decay=_DECAY),
    "adamw8bit": lambda model: AdamW8bit(model.named_parameters(), lr=2e-3, weight_decay=_DECAY),
    "muon": lambda model: Muon(
        model.named_parameters(), lr=1e-2, adamw_lr=2e-3, weight_decay=_DECAY, ns_dtype=torch.float32
    ),
    "torch-adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=_DECAY),
}
Options = dict[str, Any]
_OF_LAYERS = ("reshard_after_forward", "gathered_budget_bytes")  # the root is needed again at once


@dataclass(frozen=True)
class Row:
    """One run. ``options`` makes the arguments of ``fully_shard``, in the ranks, where a mesh can be made."""

    model: str
    optimizer: str
    ranks: int
    way: str = "default"
    options: Callable[[], Options] = field(default=dict, compare=False)
    micro_batches: int = 1
    checkpointed: bool = False

    @property
    def name(self) -> str:
        """What the row is called in files."""
        return f"{self.model} {self.optimizer} {self.ranks} {self.way}"


def _expert_rows(name: str, parameter: nn.Parameter) -> Rows | None:
    """The demo's granularity."""
    return Rows(32) if "experts." in name else None


def _codes(dtype: str) -> Options:
    codes = BlockCodes(dtype, (32, 32))
    return {"gather_policy": lambda name, parameter: codes if "proj" in name else None}


def _mixed() -> Options:
    return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def _replicated() -> Options:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


def _chunks(dim: int) -> Options:
    """FSDP2's equal chunks, which travel packed."""
    chosen = {"shard_placement_fn": lambda parameter: Shard(dim) if parameter.ndim > dim else None}
    return {**chosen, "orig_param_policy": None}


_SUMMED_ON_ARRIVAL: Options = {"reduction": "all_to_all"}
_WAYS: dict[str, Callable[[], Options]] = {
    "all-to-all": lambda: _SUMMED_ON_ARRIVAL,
    "hsdp": _replicated,
    "hsdp all-to-all": lambda: _replicated() | _SUMMED_ON_ARRIVAL,
    "codes int8": lambda: _codes("int8"),
    "codes float8": lambda: _codes("float8_e4m3fn") | _mixed() | _SUMMED_ON_ARRIVAL,
    "reshard 2": lambda: {"reshard_after_forward": 2},
    "reshard never": lambda: {"reshard_after_forward": False},
    "reshard auto": lambda: {"reshard_after_forward": "auto", "gathered_budget_bytes": 2 << 20},
    "bf16": _mixed,
    "bf16 all-to-all": lambda: _mixed() | _SUMMED_ON_ARRIVAL,
    "shard 0": lambda: _chunks(0),
    "shard 0 all-to-all": lambda: _chunks(0) | _SUMMED_ON_ARRIVAL,
    "shard 1": lambda: _chunks(1),
    "shard 1 all-to-all": lambda: _chunks(1) | _SUMMED_ON_ARRIVAL,
    "two buffers": lambda: {"max_buffers": 2, "orig_param_policy": block_policy()},
    "offload": lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
ROWS = {
    row.name: row
    for row in (
        *(
            Row(model, optimizer, ranks)
            for ranks in (1, 2, 3, 4)
            for model in MODELS
            for optimizer in ("adamw", "adamw8bit", "muon")
        ),
        *(Row("moe", "adamw", 3, way, _WAYS[way]) for way in ("all-to-all", "shard 0", "shard 0 all-to-all")),
        *(Row("moe", "adamw", 4, way, options) for way, options in _WAYS.items() if "shard 0" not in way),
        Row("moe", "adamw", 4, "accumulation", micro_batches=3),
        Row("moe", "adamw", 4, "accumulation all-to-all", lambda: _SUMMED_ON_ARRIVAL, micro_batches=3),
        Row("moe", "adamw", 4, "activation checkpoints", checkpointed=True),
        Row("moe", "torch-adamw", 4),
    )
}


def train(row: Row) -> dict[str, Any]:
    """The result of a row; every rank calls this and gets the same."""
    model = _sharded(row)
    optimizer = OPTIMIZERS[row.optimizer](model)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(_accumulated(model, _my_part(_tokens(step)), row.micro_batches))
        norms.append(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": _hex(_summed(torch.stack(losses))),
        "grad_norms": _hex(torch.stack(norms)),
        "weights_sha256": _digest((name, p) for name, p in model.named_parameters()),
        "states_sha256": _digest(_states(model, optimizer)),
    }


def _sharded(row: Row) -> nn.Module:
    """The model from the same weights on every rank, a group per layer and one for the rest."""
    model = MoETransformer(MODELS[row.model])
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            model.init_module(module, generator)
    policy = block_policy() if row.optimizer == "adamw8bit" else _expert_rows
    options = {"orig_param_policy": policy} | row.options()
    for index in range(len(model.layers)):
        if row.checkpointed:
            model.layers[index] = checkpoint_wrapper(model.layers[index])
        fully_shard(model.layers[index], **options)
    return fully_shard(model, **{k: v for k, v in options.items() if k not in _OF_LAYERS})


def _tokens(step: int) -> Tensor:
    """(sequences, tokens + 1) bytes: each sequence counts up, from a start and by a stride of its own."""
    generator = torch.Generator().manual_seed(step)
    starts, strides = torch.randint(0, 256, (2, SEQUENCES, 1), generator=generator)
    return (starts + (1 + strides % 8) * torch.arange(TOKENS + 1)) % 256


def _my_part(tokens: Tensor) -> Tensor:
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def _accumulated(model: Any, tokens: Tensor, micro_batches: int) -> Tensor:
    """Forward and backward; the loss is this rank's sum over its tokens, over all tokens of the step."""
    losses = []
    for index, part in enumerate(tokens.chunk(micro_batches)):
        model.set_requires_gradient_sync(index == micro_batches - 1)
        output = model(part[:, :-1])
        logits = output.logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum") / (SEQUENCES * TOKENS)
        balance = output.balance_loss.sum() / SEQUENCES
        ((loss + balance) * dist.get_world_size()).backward()  # undoes the mean of the reduction
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _summed(values: Tensor) -> Tensor:
    """The sum over ranks, in the order of the ranks and in double precision."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.stack(parts).double().sum(0)


def _hex(values: Tensor) -> list[str]:
    return [value.hex() for value in values.double().tolist()]


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state[parameter].items()):
            yield f"{name} {key}", value


def _digest(named: Iterable[tuple[str, Any]]) -> str:
    """SHA-256 of names, shapes and bytes of whole tensors; what is no DTensor is the same on every rank."""
    found = hashlib.sha256()
    for name, value in named:
        name = name.replace("_checkpoint_wrapped_module.", "")
        full = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
        found.update(f"{name} {full.dtype} {tuple(full.shape)}".encode())
        found.update(full.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Train the rows of this number of ranks; rank 0 writes what came out."""
    join_ranks(rank, arguments, port)
    found: dict[str, Any] = {}
    for name in arguments.names:
        try:
            found[name] = train(ROWS[name])
        except Exception as error:  # the other rows still count; ranks fail together or not at all
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        if rank == 0:
            print(f"{name}: {found[name].get('error') or found[name]['weights_sha256'][:16]}", flush=True)
    if rank == 0:
        arguments.part.write_text(json.dumps(found))
    dist.destroy_process_group()


def run(names: Iterable[str]) -> dict[str, Any]:
    """The results of the named rows, with what they depend on."""
    chosen, rows = list(names), {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({ROWS[name].ranks for name in chosen}):
            part = Path(folder) / f"{ranks}.json"
            mine = [name for name in chosen if ROWS[name].ranks == ranks]
            start_ranks(run_rank, argparse.Namespace(ranks=ranks, device="cpu", names=mine, part=part))
            rows |= json.loads(part.read_text())
    about = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "steps": STEPS}
    return {**about, "rows": {name: rows[name] for name in chosen}}


def write(path: Path, result: dict[str, Any]) -> None:
    """One line per row, so that a difference of two files shows which rows changed."""
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in result["rows"].items())
    about = "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in result.items() if k != "rows")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n{about} "rows": {{\n{rows}\n }}\n}}\n')


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each row that is not the same in both results, and for what they were made with."""
    lines = [
        f"{key}: {old[key]} and {new[key]}; bits may differ for this alone"
        for key in ("torch", "cpu", "steps")
        if old[key] != new[key]
    ]
    for name in [*old["rows"], *(name for name in new["rows"] if name not in old["rows"])]:
        rows = [side["rows"].get(name) for side in (old, new)]
        if None in rows:
            lines.append(f"{name}: only in the {'second' if rows[0] is None else 'first'} file")
        elif rows[0] != rows[1]:
            lines.append(f"{name}: {_difference(*rows)}")
    return lines


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    errors = [row.get("error") for row in (old, new)]
    if any(errors):
        return f"failed: {errors[0] or 'no error'}; {errors[1] or 'no error'}"
    found = []
    for what in ("losses", "grad_norms"):
        pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(old[what], new[what])]
        apart = [step for step, (a, b) in enumerate(pairs, 1) if a != b]
        if apart:
            most = max(abs(a - b) for a, b in pairs)
            found.append(f"{what} from step {apart[0]}, by {most:.1e} at most")
    found += [what for what in ("weights", "states") if old[f"{what}_sha256"] != new[f"{what}_sha256"]]
    return "other " + "; ".join(found)


def main() -> int:
    """Train and write, or compare two files; 1 if they differ or a row failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where to write the results (JSON)")
    parser.add_argument("--ranks", default="1,2,3,4", help="rows of these numbers of ranks")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="two files to compare")
    options = parser.parse_args()
    if options.compare:
        lines = differences(*(json.loads(path.read_text()) for path in options.compare))
        print("\n".join(lines) or "the same to the bit")
        return int(bool(lines))
    ranks = [int(text) for text in options.ranks.split(",")]
    names = [name for name, row in ROWS.items() if options.only in name and row.ranks in ranks]
    print(f"{len(names)} rows of {Path(ragged_fsdp.__file__).parent}", flush=True)
    result = run(names)
    if options.out:
        write(options.out, result)
    return int(any("error" in row for row in result["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
