"""Lightning on ragged parameters: the task shards its model in configure_model.

    python examples/lightning_ragged.py --devices 8 --steps 20
    python examples/lightning_ragged.py --accelerator cpu --devices 2 --steps 20

Lightning starts the processes itself, on GPUs or on CPUs.
"""

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from ragged_fsdp import Rows
from ragged_fsdp.integrations.lightning import shard_layers

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


class Task(lightning.LightningModule):
    """A small Llama; its layers, then the rest, are sharded over the data-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, intermediate_size=128, vocab_size=256, use_cache=False)
        self.model = LlamaForCausalLM(config)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Called by the strategy, which has made the device mesh."""
        policy = lambda name, p: Rows(8) if p.ndim == 2 else None  # noqa: E731
        shard_layers(self, self.model, self.model.model.layers, orig_param_policy=policy)

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Made after sharding: parameters are DTensors."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(devices: int, steps: int, **options: Any) -> list[float]:
    """Train, return the losses of this rank."""
    strategy = ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        **options,
    )
    data = torch.arange(64)[:, None] + torch.arange(
        32
    )  # rows that count: each token is the one before plus one
    task = Task()
    trainer.fit(task, DataLoader(data, batch_size=2))
    return task.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accelerator", default="auto")
    given = parser.parse_args()
    train(given.devices, given.steps, accelerator=given.accelerator)
