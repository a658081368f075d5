"""A small Llama, its batches and the losses of its unsharded training, for the tests of the adapters."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = [
    "assert_ragged",
    "batch",
    "fsdp_on_cpu",
    "keep_code_order",
    "llama",
    "mean",
    "own_rows",
    "reference_losses",
    "train_unsharded",
]

LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "use_cache": False,
    "tie_word_embeddings": False,
}


def llama(**changes: object) -> nn.Module:
    """A small Llama with the same weights on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes}))


def batch(step: int, rows: int) -> Tensor:
    """The tokens of a step, for all ranks."""
    return torch.randint(64, (rows, 16), generator=torch.Generator().manual_seed(step))


def own_rows(step: int, rank: int, rows: int = 2) -> Tensor:
    """A rank's share of a batch of two ranks."""
    return batch(step, 2 * rows)[rank * rows : (rank + 1) * rows]


def reference_losses(rows: int, steps: int = 3) -> list[float]:
    """Losses of the unsharded model on whole batches."""
    return train_unsharded(llama(), rows, steps)


def train_unsharded(model: nn.Module, rows: int, steps: int, max_norm: float = math.inf) -> list[float]:
    """Train what trains of a model on whole batches; the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        ids = batch(step, rows)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def keep_code_order(model: nn.Module) -> nn.Module:
    """Where a processor has bf16, bitsandbytes' 4-bit layers reorder their codes in the first forward that
    is no training, and round their magnitudes to bf16; sharded ones do not. For references beside those."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def mean(value: Tensor) -> float:
    """The mean over all ranks."""
    total = value.detach().clone()
    torch.distributed.all_reduce(total)
    return (total / torch.distributed.get_world_size()).item()


def assert_ragged(model: nn.Module) -> None:
    """Every parameter is a ragged DTensor, once modules that stay gathered after a forward are resharded."""
    from ragged_fsdp import FSDPModule
    from ragged_fsdp.dtensor import is_ragged

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert all(is_ragged(parameter) for parameter in model.parameters())


@contextmanager
def fsdp_on_cpu() -> Iterator[Callable[[], None]]:
    """Accelerate offers FSDP on accelerators only. Call what this yields once Accelerate's state exists: CPU
    ranks then count as such, and its FSDP2 path runs unchanged."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    def count_as_accelerator() -> None:
        if PartialState(cpu=True).distributed_type == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield count_as_accelerator
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
