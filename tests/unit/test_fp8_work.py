"""What FP8 products do more than once, counted: tables of experts, quantising of inputs; and who has them."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ragged_fsdp import fp8
from ragged_fsdp.experts import grouped_linear
from ragged_fsdp.models import MoEConfig
from ragged_fsdp.models.moe import Experts


class Counted(TorchDispatchMode):
    """How often each operator of FP8 training ran."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ragged_fsdp":
            self.calls[func._opname.removeprefix("fp8_")] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def experts():
    torch.manual_seed(0)
    made = Experts(MoEConfig(hidden=128, expert_hidden=128, experts=3, init_std=0.1))
    return fp8.fp8_training(nn.ModuleDict({"experts": made}))["experts"]


def test_a_layer_of_experts_makes_one_table(experts):
    x, chosen = torch.randn(40, 128, requires_grad=True), torch.arange(40).remainder(3)[:, None]
    with Counted() as counted:
        experts(x, chosen, torch.ones(40, 1)).sum().backward()
    # two products: each quantises its input and its gradient, and turns no weight in memory
    assert counted.calls == {"groups": 1, "quantize": 4, "product": 4, "weight_gradient": 2}


def test_a_table_is_made_anew_for_other_counts(experts):
    rows, weight = torch.randn(40, 128), experts.gate_up_proj
    counts = torch.tensor([10, 20, 10])
    before = grouped_linear(rows, weight, counts)
    assert torch.equal(before, grouped_linear(rows, weight, counts))
    counts.copy_(torch.tensor([20, 10, 10]))
    after = grouped_linear(rows, weight, counts)
    assert torch.equal(after, grouped_linear(rows, weight, counts.clone()))
    assert torch.equal(before[:10], after[:10]) and not torch.equal(before[10:20], after[10:20])
    fewer = grouped_linear(rows[:20], weight, torch.tensor([20, 0, 0]))
    assert torch.equal(after[:20], fewer)


def test_layers_that_share_an_input_quantise_it_once():
    torch.manual_seed(0)
    model = fp8.fp8_training(nn.ModuleDict({name: nn.Linear(128, 128, bias=False) for name in "abc"}))
    x = torch.randn(40, 128)
    with Counted() as counted:
        sum(layer(x) for layer in model.values()).sum().backward()
    # the inputs need no gradient, so there is no product for it
    assert counted.calls == {"quantize": 1 + 3, "product": 3, "weight_gradient": 3}


def test_a_captured_graph_quantises_its_static_inputs_itself(experts, monkeypatch):
    """A replay would read the codes of a step before the capture, or of another graph, for other values."""
    torch.manual_seed(0)
    layers = fp8.fp8_training(nn.ModuleDict({name: nn.Linear(128, 128, bias=False) for name in "ab"}))
    x, rows, counts = torch.randn(40, 128), torch.randn(40, 128), torch.tensor([10, 20, 10])

    def forward():
        hidden = layers["a"](x)
        grouped_linear(rows, experts.gate_up_proj, counts)
        return layers["a"](hidden) + layers["b"](hidden)

    with Counted() as before:  # a step before the capture
        forward()
    monkeypatch.setattr("ragged_fsdp.fp8.autograd._is_captured", lambda tensor: True)
    for _ in range(2):  # as of two graphs with one static input
        with Counted() as captured:
            forward()
        assert captured.calls == before.calls == {"quantize": 3, "groups": 1, "product": 4}
    with Counted() as also_after:
        layers["a"](x)
    assert also_after.calls["quantize"] == 1


def test_a_gradient_of_a_gradient_is_refused():
    """What is left of it without the codes is another number."""
    layer = fp8.fp8_training(nn.Sequential(nn.Linear(128, 128)))
    x = torch.randn(4, 128, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_layers_whose_weight_is_read_past_them_or_computed_stay_as_they_are():
    """Torch's attention multiplies with its layer's weight itself: sharded, that would be nans."""
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(128, 2),
            "encoder": nn.TransformerEncoderLayer(128, 2, 128),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(128, 128)),
            "up": nn.Linear(128, 128),
        }
    )
    rules = fp8.left_out(model)
    assert (
        rules["attention.out_proj.weight"] == "is read by its MultiheadAttention, past the layer: exclude it"
    )
    assert "read by its TransformerEncoderLayer" in rules["encoder.linear1.weight"]
    with pytest.raises(ValueError, match=r"attention.out_proj.weight is read by its MultiheadAttention"):
        fp8.fp8_training(model, include=lambda name, module: True)
    assert list(fp8.fp8_modules(fp8.fp8_training(model))) == ["up"]


def test_a_weight_that_another_module_reads_is_left_alone():
    """The codes have no values for it: it would compute with nans."""

    def tied(name):
        model = nn.ModuleDict({own: nn.Linear(128, 128, bias=False) for own in ("up", "down", name)})
        model[name].weight = model["up"].weight
        return model

    assert list(fp8.fp8_modules(fp8.fp8_training(tied("also")))) == ["up", "down", "also"]
    model = tied("gate")  # a router, by its name
    assert list(fp8.fp8_modules(fp8.fp8_training(model))) == ["down"]
    assert list(fp8.left_out(tied("gate"))) == ["up.weight"]
    model = tied("also")
    model["embed"] = nn.Embedding(128, 128)
    model["embed"].weight = model["up"].weight
    assert "tied to embed, which does not" in fp8.left_out(model)["up.weight"]
    with pytest.raises(ValueError, match=r"up.weight is tied to also, which .*: include both or neither"):
        fp8.fp8_training(tied("also"), include=lambda name, module: name != "also")
