"""The Transformers Trainer on ragged parameters.

    torchrun --nproc-per-node 8 examples/trainer_ragged.py --steps 20 --out runs/trainer

The Trainer shards with torch's fully_shard when it trains; ragged_fully_shard replaces it there. Accelerate,
below it, offers FSDP on accelerators only, so this needs GPUs.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ragged_fsdp import Rows
from ragged_fsdp.integrations.substitute import ragged_fully_shard

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def settings(out: str, steps: int) -> TrainingArguments:
    """What the Trainer is told; ``fsdp_config`` is as for torch's FSDP2."""
    return TrainingArguments(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        use_cpu=not torch.cuda.is_available(),
    )


def train(arguments: TrainingArguments) -> list[float]:
    """Train, return the losses that were logged."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=128, vocab_size=256, use_cache=False))
    rows = torch.arange(64)[:, None] + torch.arange(
        32
    )  # rows that count: each token is the one before plus one
    trainer = Trainer(
        model=model, args=arguments, train_dataset=[{"input_ids": ids, "labels": ids} for ids in rows]
    )
    with ragged_fully_shard(lambda name, p: Rows(8) if p.ndim == 2 else None):
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/trainer")
    given = parser.parse_args()
    train(settings(given.out, given.steps))
