"""FP8 products in ``bench step``, ours and torchao's, on one rank of eight: what is coded, what travels."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.fp8 import losses
from benchmarks.step.case import Case
from benchmarks.step.implementations import build, missing
from benchmarks.step.wire import Wire, join

from ragged_fsdp.fp8 import fp8_modules

DENSE = Case("small-dense", layers=2, tokens=128, ranks=8)
LINEARS = 2 * 7
"""Queries, keys, values, output; gate, up, down."""


def trained(name, case=DENSE, gathered="zeros"):
    """The trainer after two steps, and the bytes that the second one gathered."""
    wire = Wire(payload=gathered)
    join(case.ranks, wire)
    try:
        torch.manual_seed(0)
        trainer = build(name, case, torch.device("cpu"))
        trainer.stack.bind(case.tokens, "cpu", torch.bfloat16)
        x = torch.randn(1, case.tokens, case.shape.width, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):  # the first one learns the order
            wire.reset_counts()
            loss = trainer.forward_backward(x)
            trainer.update()
        assert torch.isfinite(loss) and x.grad is not None
        return trainer, wire.moved_bytes
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["ours-fp8", "ours-fp8-all-to-all-nothing-kept"])
def test_ours_gathers_a_byte_per_element(name):
    trainer, moved = trained(name)
    assert len(fp8_modules(trainer.stack)) == LINEARS
    gathers = 2 if "nothing-kept" in name else 1
    assert gathers * DENSE.numel <= moved["all_gather"] < 1.2 * gathers * DENSE.numel


@pytest.mark.skipif(missing("fsdp2-torchao-rowwise") is not None, reason="needs torchao")
@pytest.mark.parametrize(("recipe", "element_bytes"), [("rowwise", 2), ("gathered", 1)])
def test_torchaos_layers_train_and_gather_what_their_recipe_says(recipe, element_bytes):
    trainer, moved = trained(f"fsdp2-torchao-{recipe}", gathered="repeat")
    kinds = [type(module).__name__ for module in trainer.stack.modules()]
    assert kinds.count("Float8Linear") == LINEARS and "Linear" not in kinds
    least = 2 * element_bytes * DENSE.numel
    assert least <= moved["all_gather"] < 1.1 * least
    assert moved.get("all_reduce", 0) > 0 if recipe == "gathered" else "all_reduce" not in moved


def test_torchaos_blockwise_layers_take_the_place_of_ours(monkeypatch):
    """Its class and its autograd function ask for a Hopper GPU: the one is let in, the other replaced."""
    linear = pytest.importorskip("torchao.prototype.blockwise_fp8_training.linear")

    class Plain:
        apply = staticmethod(lambda x, weight, *_: F.linear(x, weight))

    monkeypatch.setattr(linear, "is_sm_at_least_90", lambda: True)
    monkeypatch.setattr(linear, "fp8_blockwise_mm", Plain)
    trainer, moved = trained("fsdp2-torchao-blockwise", gathered="repeat")
    kinds = [type(module).__name__ for module in trainer.stack.modules()]
    assert kinds.count("Float8BlockwiseLinear") == LINEARS and "Linear" not in kinds
    assert 4 * DENSE.numel <= moved["all_gather"] < 4.4 * DENSE.numel


@pytest.mark.skipif(missing("fsdp2-torchao-rowwise") is not None, reason="needs torchao")
def test_a_recipe_that_takes_nothing_says_so():
    with pytest.raises(ValueError, match="torchao, blockwise: expected a linear layer that the recipe takes"):
        trained("fsdp2-torchao-blockwise", replace(DENSE, model="tiny-moe", tokens=16))


def test_losses_are_compared_over_the_seeds_that_both_have_and_kept_for_the_same_setting(tmp_path):
    options = argparse.Namespace(
        backend="gloo", device="cpu", ranks=4, tiles=False, steps=None, out=tmp_path / "losses.json"
    )
    rows = {"dense": {"bf16": {"last_tenth": [2.0, 4.0, 9.0], "held_out": [2.0, 3.0, 9.0]}}}
    rows["dense"]["fp8"] = {"last_tenth": [2.0, 4.6], "held_out": [2.5, 3.5]}
    head = losses._head(options)
    losses._write(options, head, rows)
    kept = losses._kept(options.out, head)
    assert kept == rows and kept["dense"]["fp8_over_bf16"] == {"last_tenth": 1.1, "held_out": 1.2}
    assert "bf16_over_fp32" not in kept["dense"]
    assert losses._kept(options.out, losses._head(argparse.Namespace(**{**vars(options), "steps": 7}))) == {}
    assert losses._kept(tmp_path / "none.json", head) == {}
