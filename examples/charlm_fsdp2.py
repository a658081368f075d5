"""Train a character-level language model on the source of argparse, sharded over all ranks.

    torchrun --nproc-per-node 2 THIS_FILE --steps 50 --checkpoint charlm-checkpoint

charlm_fsdp2.py and charlm_ragged.py differ in one line: where fully_shard is imported from.
Runs on GPUs if there are any, else on the CPU over gloo. With --checkpoint the run continues from
the last checkpoint in that folder, on any number of ranks, and saves one at the end.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

# isort: split
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

CONTEXT = 64


class Block(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each added to the residual stream."""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharModel(nn.Module):
    """Embedding, blocks, head; returns the mean cross-entropy of the next character."""

    def __init__(self, vocab: int, dim: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Embedding(CONTEXT, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """``text`` is a batch of CONTEXT + 1 character codes."""
        x = self.embed(text[:, :-1]) + self.position(torch.arange(CONTEXT, device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), text[:, 1:].flatten())


def batch(data: Tensor, step: int, rank: int, size: int) -> Tensor:
    """Windows of the text, drawn from a generator of their own for each step and rank."""
    generator = torch.Generator().manual_seed(7919 * step + rank)
    starts = torch.randint(0, len(data) - CONTEXT - 1, (size,), generator=generator)
    return torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()])


def checkpoint_states(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict:
    """What a checkpoint holds; the tensors are the sharded ones themselves."""
    model_states, optimizer_states = get_state_dict(model, optimizer)
    return {"model": model_states, "optimizer": optimizer_states, "step": torch.tensor(step)}


def main() -> None:
    """Build, shard, train, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50, help="train up to this step (default: 50)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step (default: 8)")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate (default: 3e-3)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, reduce in float32")
    parser.add_argument("--checkpoint", type=Path, help="folder to continue from and to save to")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())

    text = Path(argparse.__file__).read_text()
    codes = {character: code for code, character in enumerate(sorted(set(text)))}
    data = torch.tensor([codes[character] for character in text])

    torch.manual_seed(0)
    model = CharModel(vocab=len(codes)).to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    first = 0
    if args.checkpoint and args.checkpoint.exists():
        states = checkpoint_states(model, optimizer, 0)
        dcp.load(states, checkpoint_id=args.checkpoint)
        set_state_dict(
            model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
        first = int(states["step"])

    began = time.perf_counter()
    for step in range(first, args.steps):
        loss = model(batch(data, step, rank, args.batch).to(device))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        norm = norm.full_tensor()
        if rank == 0:
            print(f"step {step + 1:4d}  loss {mean.item():.5f}  grad norm {norm.item():.4f}", flush=True)
    if args.checkpoint:
        dcp.save(checkpoint_states(model, optimizer, args.steps), checkpoint_id=args.checkpoint)
    if rank == 0:
        held = sum(p.to_local().numel() for p in model.parameters())
        total = sum(p.numel() for p in model.parameters())
        seconds = time.perf_counter() - began
        print(f"{args.steps - first} steps in {seconds:.1f} s; rank 0 holds {held} of {total} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
