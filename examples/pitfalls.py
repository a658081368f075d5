"""Public issues of FSDP2, a few lines each that show it: on stock FSDP2, with ``--ours`` on this package.

    torchrun --nproc-per-node 2 examples/pitfalls.py                 # all, on stock FSDP2
    torchrun --nproc-per-node 2 examples/pitfalls.py --ours          # the same lines with our fully_shard
    torchrun --nproc-per-node 2 examples/pitfalls.py optimizer_after_a_forward

Each function takes the module that ``fully_shard`` comes from and returns what went wrong, or "" if nothing
did. It runs on 2 CPU ranks. ``docs/fsdp2-pitfalls.md`` has the list.
"""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

PITFALLS: dict[str, Callable[[Any], str]] = {}


def pitfall(function: Callable[[Any], str]) -> Callable[[Any], str]:
    """Enter ``function`` in the list."""
    PITFALLS[function.__name__] = function
    return function


def _layers(count: int = 2, dim: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(dim, dim) for _ in range(count)))


def _rows(dim: int = 8) -> torch.Tensor:
    torch.manual_seed(1 + dist.get_rank())
    return torch.randn(3, dim)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _anywhere(problem: str) -> str:
    """What a rank found, on all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    return next((text for text in found if text), "")


@pitfall
def optimizer_after_a_forward(fsdp: Any) -> str:
    """pytorch/pytorch#149205: after a forward the root is gathered; an optimizer gets the wrong tensors."""
    model = fsdp.fully_shard(_layers())
    with torch.no_grad():
        model(_rows())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(_rows()).sum().backward()
    before = [_whole(p).detach().clone() for p in model.parameters()]
    try:
        optimizer.step()
    except RuntimeError:
        return ""  # refused: nothing is lost
    same = all(torch.equal(_whole(p), old) for p, old in zip(model.parameters(), before))
    return "the step changed nothing, without a word" if same else ""


@pitfall
def optimizer_before_sharding(fsdp: Any) -> str:
    """mosaicml/composer#3822, huggingface/accelerate#3394: it steps tensors that the model does not use."""
    model = _layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp.fully_shard(model)
    model(_rows()).sum().backward()
    before = [_whole(p).detach().clone() for p in model.parameters()]
    try:
        optimizer.step()
    except RuntimeError:
        return ""
    same = all(torch.equal(_whole(p), old) for p, old in zip(model.parameters(), before))
    return "the step changed nothing, without a word" if same else ""


@pitfall
def an_adapter_attached_late(fsdp: Any) -> str:
    """huggingface/transformers#48792: nobody reduces its gradient, and each rank trains its own."""
    model = _layers()
    fsdp.fully_shard(model)
    torch.manual_seed(5)
    model.append(nn.Linear(8, 8))
    try:
        model(_rows()).square().sum().backward()
    except ValueError:
        return ""
    gradients: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gradients, _whole(model[2].weight.grad))
    return "" if torch.equal(gradients[0], gradients[1]) else "gradients of the adapter differ between ranks"


@pitfall
def clipping_over_two_meshes(fsdp: Any) -> str:
    """pytorch/pytorch#180346: clip_grad_norm_ raises where parameters lie on different meshes."""
    model = _layers()
    flat = init_device_mesh("cpu", (2,))
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fsdp.fully_shard(model[0], mesh=flat)
    fsdp.fully_shard(model[1], mesh=replicas)
    fsdp.fully_shard(model, mesh=flat)
    model(_rows()).sum().backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


@pitfall
def the_norm_of_a_part(fsdp: Any) -> str:
    """pytorch/pytorch#144054 and #166638: item() of a norm is that of the rank's own part."""
    model = fsdp.fully_shard(nn.Linear(8, 8, bias=False))
    model(_rows()).sum().backward()
    whole = _whole(model.weight.grad).norm().item()
    try:
        told = model.weight.grad.norm().item()
    except RuntimeError:
        return ""  # refused: full_tensor() first
    return "" if abs(told - whole) < 1e-5 else f"norm().item() is {told:.4f}, the norm {whole:.4f}"


@pitfall
def second_order_gradients(fsdp: Any) -> str:
    """pytorch/pytorch#172543: the second backward finds the memory of the weights gone."""
    model = fsdp.fully_shard(nn.Linear(8, 8))
    x = _rows().requires_grad_()
    output = model(x)
    weight = torch.zeros_like(output, requires_grad=True)
    (first,) = torch.autograd.grad(output, x, grad_outputs=weight, create_graph=True)
    try:
        torch.autograd.grad(first.sum(), weight)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


@pitfall
def inference_mode_first(fsdp: Any) -> str:
    """pytorch/pytorch#197327: a first forward under inference_mode, and training raises."""
    model = fsdp.fully_shard(_layers())
    try:
        with torch.inference_mode():
            model(_rows())
        model(_rows()).sum().backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


@pitfall
def main_weights_of_16_bits(fsdp: Any) -> str:
    """areal-project/AReaL#1292: a model loaded in bf16 trains in bf16, and nobody says so."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        model = _layers().to(torch.bfloat16)
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fsdp.fully_shard(model, mp_policy=policy)
        model(_rows().bfloat16()).sum().backward()
    finally:
        logging.getLogger().removeHandler(handler)
    if any("16 bits" in record.getMessage() for record in records):
        return ""
    return "optimizer steps are rounded to bf16, without a word"


@pitfall
def random_values_on_the_host(fsdp: Any) -> str:
    """pytorch/torchtitan#3106: parameters on the host get the same random values on every rank."""
    with torch.device("meta"):
        model = nn.Linear(8, 8, bias=False)
    fsdp.fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    nn.init.normal_(model.weight)
    whole = _whole(model.weight)
    return "both halves have the same values" if torch.equal(whole[:4], whole[4:]) else ""


@pitfall
def a_forward_that_failed(fsdp: Any) -> str:
    """pytorch/torchtitan#1329: a batch that fails is skipped, and the next one computes with old weights."""
    model = _layers()
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    parameters = list(model.parameters())
    handle = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        model(_rows())
    except ZeroDivisionError:
        handle.remove()
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()  # as an optimizer step or a checkpoint would write them
        output = model(_rows())
    return "the forward after it computes with weights from before" if output.any() else ""


@pitfall
def a_list_that_is_used_again(fsdp: Any) -> str:
    """pytorch/pytorch#183702: a module of fully_shard([norm, head]) runs once more in the same step."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            first = self.head(self.norm(x))
            self.aside = self.head(x)
            return first.sum()

    torch.manual_seed(0)
    model = Model()
    fsdp.fully_shard(model.body)
    fsdp.fully_shard([model.norm, model.head])
    fsdp.fully_shard(model)
    try:
        model(_rows())
        model.aside.sum().backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


@pitfall
def a_frozen_base_of_codes(fsdp: Any) -> str:
    """pytorch/ao#2127, pytorch/ao#1929: weights that are codes and scales cannot be sharded.

    Those of torchao are a tensor class without all-gather hooks, as is ours, which stands for them here.
    """
    from ragged_fsdp import BlockCodes, encode_frozen

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, rows = _layers().requires_grad_(False).to(device), _rows().to(device)
    encode_frozen(model, lambda name, weight: BlockCodes("int8", (4, 8)))
    expected = model(rows)
    try:
        fsdp.fully_shard(model)
        output = model(rows)
    except NotImplementedError as error:
        return str(error).splitlines()[0]
    return "" if torch.equal(output, expected) else "the sharded model computes something else"


@pitfall
def a_tower_that_one_rank_does_not_run(fsdp: Any) -> str:
    """pytorch/pytorch#152964, huggingface/transformers#37186: ranks without images hang the others.

    The last one: its process group is broken afterwards.
    """
    ours = fsdp.__name__ == "ragged_fsdp"
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(ranks, timeout=timedelta(seconds=60 if ours else 2), backend="gloo")
    mesh = DeviceMesh.from_group(group, "cpu")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.tower = _layers(), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
            x = self.layers[0](x)
            if image is not None:
                x = x + self.tower(image)
            return self.layers[1](x).sum()

    model = Model()
    for layer in model.layers:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model.tower, mesh=mesh, **({"conditional": True} if ours else {}))
    fsdp.fully_shard(model, mesh=mesh)
    problem = ""
    try:
        model(_rows(), _rows() if dist.get_rank() == 0 else None).backward()
    except RuntimeError as error:
        problem = f"a rank is alone in a collective: {str(error).splitlines()[0]}"
    return _anywhere(problem)


def main() -> None:
    """Run the pitfalls that are named, or all."""
    parser = argparse.ArgumentParser(description="Public issues of FSDP2, shown on two CPU ranks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(PITFALLS)}; default: all")
    parser.add_argument("--ours", action="store_true", help="with the fully_shard of ragged_fsdp")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in PITFALLS:
            parser.error(f"{name!r} is not one of {', '.join(PITFALLS)}")
    dist.init_process_group("gloo")
    if dist.get_world_size() != 2:
        parser.error(f"started on {dist.get_world_size()} ranks; expected 2")
    fsdp = importlib.import_module("ragged_fsdp" if arguments.ours else "torch.distributed.fsdp")
    for name in arguments.names or PITFALLS:
        problem = PITFALLS[name](fsdp)
        if dist.get_rank() == 0:
            print(f"{name}: {problem or 'nothing went wrong'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
