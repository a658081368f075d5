"""Real collectives: a few ranks, as processes that may share one device, train the same model.

Each implementation starts from the same weights and sees the same batches, so losses must agree; memory
must not grow after the second step. Kernels are torch's deterministic ones: what may differ is the order in
which gradients are added. Several NCCL ranks can share a device if each claims a host of its own
(``NCCL_HOSTID``); they then talk over sockets, so times mean nothing here and none are reported.
:func:`benchmarks.shared_device.shared_device` makes it bearable.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import statistics
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .layers import Stack
from .shapes import MODELS

__all__ = ["RealCase", "compare", "planned_runs", "run_real"]


@dataclass(frozen=True)
class RealCase:
    """What the ranks train. ``compute`` is the dtype of matrix products; weights and sums are fp32."""

    model: str = "small-dense"
    layers: int = 4
    tokens: int = 1024
    ranks: int = 2
    steps: int = 50
    compute: str = "fp32"
    device: str = "cuda"
    debug: bool = False
    """Run ours with ``RAGGED_FSDP_DEBUG=1``: freed storage is poisoned, so a stream race becomes a NaN."""

    def __post_init__(self) -> None:
        if self.compute not in ("fp32", "bf16"):
            raise ValueError(f"compute: expected fp32 or bf16, got {self.compute!r}")
        if self.tokens % MODELS[self.model].sequence:
            raise ValueError(
                f"tokens: expected a multiple of {MODELS[self.model].sequence}, got {self.tokens}"
            )


def planned_runs(
    ranks: Iterable[int], steps: int, device: str, debug: bool
) -> Iterator[tuple[RealCase, list[tuple[RealCase, str]]]]:
    """A dense model and one of experts for each number of ranks; each with what to run of it, in order."""
    for n in ranks:
        dense = RealCase("small-dense", 4, 1024, n, steps, "fp32", device)
        experts = RealCase("tiny-moe", 4, 256, n, steps, "bf16", device)
        for case, peers in ((dense, ("ddp", "fsdp2")), (experts, ("fsdp2",))):
            runs = [(case, name) for name in ("ours-all-to-all", *peers, "ours")]
            if debug:
                runs += [(replace(case, debug=True), name) for name in ("ours-all-to-all", "ours")]
            yield case, runs


def run_real(
    case: RealCase, implementation: str, limit_s: float = 120.0, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Losses of rank 0 and memory by step for ``ours``, ``ours-all-to-all``, ``fsdp2`` or ``ddp``.

    ``environment`` is what every rank has beside the variables of this process.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.tensor", __name__])
    ours, theirs = context.Pipe(duplex=False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    args = (case, implementation, store.port, dict(environment or {}), theirs)
    ranks = [context.Process(target=_rank, args=(rank, *args)) for rank in range(case.ranks)]
    for process in ranks:
        process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(limit_s) else f"no answer within {limit_s:.0f} s"
    except EOFError:
        answer = "every rank died"
    for process in ranks:
        process.join(10 if isinstance(answer, dict) else 0.1)
        if process.is_alive():
            process.kill()
            process.join()
    row: dict[str, Any] = {"implementation": implementation, "debug": case.debug}
    return row | (answer if isinstance(answer, dict) else {"error": answer})


def compare(case: RealCase, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The case, its rows, and how far the losses of each are from DDP's, or FSDP2's if DDP did not run."""
    ran = [row for row in rows if "losses" in row]
    found = {row["implementation"]: row for row in ran}
    reference = found.get("ddp") or found.get("fsdp2")
    for row in ran:
        row["largest_relative_difference"] = None
        if reference is not None:
            pairs = zip(row["losses"], reference["losses"])
            row["largest_relative_difference"] = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
            row["reference"] = reference["implementation"]
        row["flat_from_step_2"] = all(len(set(row[k][1:])) <= 1 for k in ("allocated_mib", "reserved_mib"))
    return {"case": asdict(case), "rows": rows}


def _rank(
    rank: int, case: RealCase, implementation: str, port: int, environment: dict[str, str], pipe: Any
) -> None:
    os.environ.update(environment, NCCL_HOSTID=f"rank{rank}", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    if case.debug:
        os.environ["RAGGED_FSDP_DEBUG"] = "1"
    try:
        result = _train(rank, case, implementation, port)
        if rank == 0:
            pipe.send(result)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send(f"rank {rank}: {traceback.format_exc(limit=-5)}")
        os._exit(1)  # others may be in a collective with this rank: do not wait for them


def _train(rank: int, case: RealCase, implementation: str, port: int) -> dict[str, Any]:
    cuda = case.device == "cuda"
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs a pass over every buffer
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=case.ranks)
    model, optimizer = _build(case, implementation, device)
    generator = torch.Generator().manual_seed(1000 + rank)
    shape, losses, allocated, reserved = MODELS[case.model], [], [], []
    for _ in range(case.steps):
        x = torch.randn(case.tokens // shape.sequence, shape.sequence, shape.width, generator=generator)
        loss = model(x.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / case.ranks)
        if cuda:
            allocated.append(torch.cuda.memory_allocated() / 2**20)
            reserved.append(torch.cuda.memory_reserved() / 2**20)
    return {
        "losses": losses,
        "allocated_mib": [round(v, 2) for v in allocated],
        "reserved_mib": [round(v, 2) for v in reserved],
        "median_allocated_mib": round(statistics.median(allocated), 2) if allocated else None,
    }


def _build(
    case: RealCase, implementation: str, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    stack = Stack(MODELS[case.model], case.layers)
    for layer in stack.layers:
        layer.reset_parameters()
    compute = torch.bfloat16 if case.compute == "bf16" else torch.float32
    stack.bind(case.tokens, device, compute)
    model: nn.Module = stack.to(device)
    if implementation == "ddp":
        if compute is not torch.float32:
            raise ValueError("ddp: keeps fp32 weights only with fp32 compute; expected compute fp32")
        model = nn.parallel.DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None
        )
    else:
        _shard(case, implementation, stack, device, compute)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _shard(case: RealCase, name: str, stack: Stack, device: torch.device, compute: torch.dtype) -> None:
    extra: dict[str, Any] = {}
    if name == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    else:
        from ragged_fsdp import MixedPrecisionPolicy, fully_shard

        extra = {"reduction": "all_to_all"} if name == "ours-all-to-all" else {}
    mesh = dist.device_mesh.init_device_mesh(device.type, (case.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in stack.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, **extra)
    fully_shard(stack, mesh=mesh, mp_policy=policy, **extra)
