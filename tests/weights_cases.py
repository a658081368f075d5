"""A small model with every kind of tensor, and what files hold of it."""

import json
import multiprocessing
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ragged_fsdp import weights

__all__ = ["Block", "Model", "cut_experts", "handed_over", "stored", "write"]


class Block(nn.Module):
    """Odd sizes, stacked experts, a frozen parameter, a persistent and a computed buffer."""

    def __init__(self, width=24):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(5, 2 * width, 16))
        self.proj = nn.Linear(width, 7)
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.register_buffer("count", torch.arange(4))
        self.register_buffer("table", torch.full((2,), 3.0), persistent=False)

    def forward(self, x):
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(33, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return x


def cut_experts(name, tensor):
    """Stored apart: two matrices per expert; other names have a prefix."""
    if not name.endswith("experts"):
        return f"net.{name}"
    half = tensor.shape[1] // 2
    parts = {}
    for index in range(tensor.shape[0]):
        parts[f"net.{name}.{index}.gate"] = tensor[index, :half]
        parts[f"net.{name}.{index}.up"] = tensor[index, half:].t()
    return parts


def stored(model, naming):
    """What the files of a model hold, tied ones once."""
    found, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor not in seen:
            seen.add(tensor)
            given = naming(name, tensor.detach())
            found.update({given: tensor.detach()} if isinstance(given, str) else given)
    return {name: value.contiguous() for name, value in found.items()}


def write(folder: Path, tensors, files=2):
    """Several files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    placed = {name: f"part-{i % files}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(placed.values())):
        save_file({n: tensors[n] for n in names if placed[n] == file}, folder / file)
    index = json.dumps({"weight_map": placed})
    (folder / "model.safetensors.index.json").write_text(index)


def handed_over(stream, receives, pipe=None, **options):
    """What a receiver in a thread takes of one hand-over; None on ranks that have none."""
    if not receives:
        weights.hand_over(stream, None, **options)
        return None
    ours, theirs = pipe or multiprocessing.Pipe()
    received, failures = {}, []

    def take():
        try:
            for bucket in weights.take_over(theirs, device=stream.device):
                received.update((name, value.clone()) for name, value in bucket.tensors())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    weights.hand_over(stream, ours, **options)
    thread.join(20)
    assert not failures, failures
    return received
