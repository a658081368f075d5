"""LoRA on a Llama in a plain loop: train, resume on any number of ranks, write the adapter, merge it.

    torchrun --nproc-per-node 4 examples/lora.py --steps 20 --checkpoint run --adapter adapter
    torchrun --nproc-per-node 2 examples/lora.py --steps 40 --checkpoint run --adapter adapter
    python examples/lora.py --merge adapter merged

The second goes on where the first ended. Without ``--model`` it builds a small Llama with random weights, the
same on every rank, and makes up its data. Adapters are attached before ``fully_shard``, the optimizer is made
after it. Needs ``transformers`` and ``peft``.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ragged_fsdp import fully_shard

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
WHOLE = StateDictOptions(ignore_frozen_params=True, full_state_dict=True, cpu_offload=True)


def base_model(path: str | None) -> torch.nn.Module:
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def adapted(model: torch.nn.Module, rank: int) -> PeftModel:
    torch.manual_seed(1)  # adapters are drawn alike on every rank; each keeps its part
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


def batch(step: int, rows: int, vocab: int) -> torch.Tensor:
    """This rank's rows of the step's tokens; together they are the same on any number of ranks."""
    drawn = torch.randint(vocab, (rows, 16), generator=torch.Generator().manual_seed(step))
    return drawn[dist.get_rank() :: dist.get_world_size()]


def train(args: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = (
        torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)
    if args.batch % dist.get_world_size():
        raise SystemExit(f"--batch {args.batch} must be a multiple of the {dist.get_world_size()} ranks")
    model = adapted(base_model(args.model), args.rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    done = resume(model, optimizer, args.checkpoint) if args.checkpoint else 0
    for step in range(done, args.steps):
        ids = batch(step, args.batch, model.config.vocab_size).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step + 1:3}  loss {mean.item() / dist.get_world_size():.5f}")
    if args.checkpoint:
        weights, state = get_state_dict(model, optimizer, options=TRAINED)
        dcp.save({"model": weights, "optimizer": state, "step": args.steps}, checkpoint_id=args.checkpoint)
    if args.adapter:
        whole = get_model_state_dict(model, options=WHOLE)  # every rank takes part; rank 0 has the result
        if dist.get_rank() == 0:
            model.save_pretrained(args.adapter, state_dict=whole)
    dist.destroy_process_group()


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> int:
    """Load the checkpoint, if there is one; the steps it has made."""
    if not Path(folder, ".metadata").exists():
        return 0
    weights, state = get_state_dict(model, optimizer, options=TRAINED)
    saved = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(saved, checkpoint_id=folder)
    weights, state = saved["model"], saved["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=TRAINED)
    return saved["step"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or name for from_pretrained; default: a small random Llama")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=12, help="rows of a step, over all ranks")
    parser.add_argument("--checkpoint", help="where to save at the end, and to go on from if it is there")
    parser.add_argument("--adapter", help="where to write the adapter, for peft")
    parser.add_argument("--merge", nargs=2, metavar=("ADAPTER", "OUT"), help="merge an adapter; no training")
    args = parser.parse_args()
    if args.merge:
        merged = PeftModel.from_pretrained(base_model(args.model), args.merge[0]).merge_and_unload()
        merged.save_pretrained(args.merge[1])
    else:
        train(args)


if __name__ == "__main__":
    main()
