"""Supervised fine-tuning with TRL and LoRA: a script for FSDP2, which knows nothing of this package.

    torchrun --nproc-per-node 8 -m ragged_fsdp.run examples/trl_sft.py --model FOLDER --data chats.jsonl
    torchrun --nproc-per-node 8 examples/trl_sft.py ...            # the same on stock FSDP2

``ragged_fsdp.run`` puts our fully_shard in the place of torch's. The adapter lies in ``--out`` at the end, in
peft's format. Without ``--model`` and ``--data`` a small model is made and fine-tuned on numbers that count.
Accelerate, below TRL, offers FSDP on accelerators only, so this needs GPUs.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
VOCABULARY = 64


def settings(out: str, steps: int, **changes: Any) -> SFTConfig:
    """What TRL is told; ``fsdp_config`` is as for torch's FSDP2."""
    shards = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "FULL_STATE_DICT",
    }
    told: dict[str, Any] = {
        "output_dir": out,
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "fsdp": True,
        "fsdp_config": shards,
    }
    return SFTConfig(**{**told, **changes})


def small_model() -> tuple[Any, Any]:
    """A Llama with random weights, the same on every rank, and a tokenizer of numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=VOCABULARY, use_cache=False)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    return transformers.LlamaForCausalLM(config), tokenizer


def counting() -> Dataset:
    """Texts that count upwards, of different lengths."""
    texts = [" ".join(str((i + j) % VOCABULARY) for j in range(8 + i % 5)) for i in range(64)]
    return Dataset.from_dict({"text": texts})


def train(arguments: SFTConfig, folder: str | None = None, data: str | None = None) -> list[float]:
    """Train, write the adapter, return the losses that were logged."""
    if folder is None:
        model, tokenizer = small_model()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = counting() if data is None else load_dataset("json", data_files=data, split="train")
    torch.manual_seed(1)  # the adapter begins alike on every rank
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=rows, peft_config=LORA, processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model(arguments.output_dir)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder that from_pretrained reads (default: a small model)")
    parser.add_argument("--data", help="a file of JSON lines with 'text' or 'messages' (default: numbers)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/sft")
    given = parser.parse_args()
    if not torch.accelerator.is_available():
        parser.error("Accelerate has FSDP on accelerators only; on CPUs it would train with DDP, unsharded")
    train(settings(given.out, given.steps, bf16=torch.cuda.is_available()), given.model, given.data)
