"""Accelerate's loop with LoRA or QLoRA: a script for FSDP2, which knows nothing of this package.

    torchrun --nproc-per-node 8 -m ragged_fsdp.run examples/accelerate_lora.py --model FOLDER --four-bits
    torchrun --nproc-per-node 8 examples/accelerate_lora.py ...            # the same on stock FSDP2
    accelerate launch -m ragged_fsdp.run examples/accelerate_lora.py ...

``ragged_fsdp.run`` puts our fully_shard in the place of torch's. ``--four-bits`` loads the base as NF4, with
bitsandbytes; its codes are then sharded, which stock FSDP2 leaves whole on every rank. A second call goes on
from the checkpoint in ``--out``, on any number of ranks; the adapter lies there too. Accelerate offers FSDP
on accelerators only, so this needs GPUs.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
WHOLE = StateDictOptions(ignore_frozen_params=True, full_state_dict=True, cpu_offload=True)
ROWS = 12  # of a step, over all ranks


def small_model(folder: Path) -> None:
    """A Llama with random weights, written to ``folder`` as a download would be."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, use_cache=False)).save_pretrained(folder)


def adapted(folder: Path, device: torch.device, four_bits: bool) -> torch.nn.Module:
    """The base in ``folder`` with adapters, before it is sharded."""
    quantized = None
    if four_bits:
        quantized = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=quantized, device_map={"": device}
    )
    torch.manual_seed(1)  # adapters are drawn alike on every rank
    return get_peft_model(base, LORA)


def train(args: argparse.Namespace) -> list[float]:
    """Train, save, write the adapter; the losses of the steps."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    folder = Path(args.model or Path(args.out, "base"))
    if args.model is None and accelerator.is_main_process:
        small_model(folder)
    accelerator.wait_for_everyone()
    model = adapted(folder, accelerator.device, args.four_bits)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    checkpoint, done = Path(args.out, "checkpoint"), 0
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
        done = int((checkpoint / "steps").read_text())
    losses = []
    for step in range(done, args.steps):
        drawn = torch.randint(64, (ROWS, 16), generator=torch.Generator().manual_seed(step))
        ids = drawn[accelerator.process_index :: accelerator.num_processes].to(accelerator.device)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.print(f"step {step + 1:3}  loss {losses[-1]:.5f}")
    accelerator.save_state(str(checkpoint))
    whole = get_model_state_dict(model, options=WHOLE)  # every rank takes part; the first has the result
    if accelerator.is_main_process:
        (checkpoint / "steps").write_text(str(args.steps))
        accelerator.unwrap_model(model).save_pretrained(Path(args.out, "adapter"), state_dict=whole)
    accelerator.wait_for_everyone()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder that from_pretrained reads (default: a small model)")
    parser.add_argument("--four-bits", action="store_true", help="load the base as NF4, with bitsandbytes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--out", default="runs/accelerate", help="for checkpoint, adapter and the small model"
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
