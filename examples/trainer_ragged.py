"""The Transformers Trainer on ragged parameters, all of them trained or LoRA adapters only.

    torchrun --nproc-per-node 8 examples/trainer_ragged.py --steps 20 --out runs/trainer
    torchrun --nproc-per-node 8 examples/trainer_ragged.py --lora 8 --model FOLDER --out runs/adapter

The Trainer shards with torch's fully_shard when it trains; ragged_fully_shard replaces it there. Accelerate,
below it, offers FSDP on accelerators only, so this needs GPUs. With ``--lora`` peft attaches adapters of that
rank, and ``--out`` has the adapter at the end, else the whole model.
"""

import argparse

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

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
        fsdp_config={
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "FULL_STATE_DICT",
        },
        use_cpu=not torch.cuda.is_available(),
    )


def rows_that_count() -> torch.Tensor:
    """Each token is the one before plus one."""
    return torch.arange(64)[:, None] + torch.arange(32)


def base_model(folder: str | None) -> PreTrainedModel:
    """What is in ``folder``; without one a small Llama with random weights, the same on every rank."""
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=128, vocab_size=256, use_cache=False))


def train(arguments: TrainingArguments, folder: str | None = None, lora_rank: int = 0) -> list[float]:
    """Train and save, return the losses that were logged."""
    model = base_model(folder)
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)  # adapters begin alike on every rank
        lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
        model = get_peft_model(model, lora)  # before the Trainer shards
    rows = rows_that_count()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=[{"input_ids": ids, "labels": ids} for ids in rows]
    )
    with ragged_fully_shard(lambda name, p: Rows(8) if p.ndim == 2 else None):
        trainer.train()
        trainer.save_model(arguments.output_dir)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--model", help="a folder that from_pretrained reads (default: a small model)")
    parser.add_argument("--lora", type=int, default=0, help="the rank of adapters; 0 trains all weights")
    given = parser.parse_args()
    if not torch.accelerator.is_available():
        parser.error("Accelerate has FSDP on accelerators only; on CPUs it would train with DDP, unsharded")
    train(settings(given.out, given.steps), given.model, given.lora)
