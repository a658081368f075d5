"""Frozen bases that are stored as codes, ours and other libraries', with adapters that train on top.

Sharded they compute what they compute whole, bit for bit where the order of sums allows; a rank holds its
part of codes and scales and nothing of the whole; what is gathered are codes; merged weights are those of the
whole model. Libraries that are not installed are skipped by name; ``make test-tuning`` has them all.
"""

import copy
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from collective_calls import noted
from integration_cases import keep_code_order
from rank_pool import spmd

DIM, WIDE, RANK = 64, 128, 4


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank addition."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, outputs, bias=False)})
        self.scaling = {"default": 0.5}
        self.active_adapters = ["default"]

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 0.5


class Block(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = Adapted(make(DIM, WIDE), DIM, WIDE)
        self.down = Adapted(make(WIDE, DIM), WIDE, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(make) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _ours(dtype, device):
    from ragged_fsdp import BlockCodes, encode_frozen

    model = Net(nn.Linear).to(device)
    named = encode_frozen(model, lambda name, weight: BlockCodes(dtype, (16, 32)))
    assert len(named) == 4 and named[0] == "layers.0.up.base_layer.weight"
    return model


def _four_bit(device, nested, storage=torch.uint8):
    bnb = pytest.importorskip("bitsandbytes")
    layer = partial(
        bnb.nn.Linear4bit,
        compute_dtype=torch.float32,
        quant_type="nf4",
        compress_statistics=nested,
        quant_storage=storage,
    )
    return keep_code_order(Net(layer).to(device))  # which quantises


def _eight_bit(device):
    bnb = pytest.importorskip("bitsandbytes")
    return Net(partial(bnb.nn.Linear8bitLt, has_fp16_weights=False)).to(device)


def _torchao(config, device):
    torchao = pytest.importorskip("torchao")
    from torchao import quantization

    model = Net(nn.Linear).to(device)
    more = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)} if "Intx" in config else {}
    wanted = lambda module, name: name.endswith("base_layer")  # noqa: E731
    torchao.quantize_(model, getattr(quantization, config)(**more), filter_fn=wanted)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name or "norm" in name)
    return model


BASES = {
    "our int8": partial(_ours, "int8"),
    "our float8": partial(_ours, "float8_e4m3fn"),
    "nf4": partial(_four_bit, nested=False),
    "nf4, scales quantised": partial(_four_bit, nested=True),
    "nf4 in float32": partial(_four_bit, nested=False, storage=torch.float32),
    "bitsandbytes int8": _eight_bit,
    "torchao int8": partial(_torchao, "Int8WeightOnlyConfig"),
    "torchao int4": partial(_torchao, "IntxWeightOnlyConfig"),
    "torchao float8": partial(_torchao, "Float8WeightOnlyConfig"),
}


def _model(kind, device, seed=3):
    torch.manual_seed(seed)
    model = BASES[kind](device=device)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def _shard(model, **options):
    from ragged_fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _rows(device, step):
    return torch.randn(4, 6, DIM, generator=torch.Generator().manual_seed(step)).to(device)


def _train(model, device, first=0, steps=3):
    """Losses of SGD on batches that are the same on every rank, so that means of gradients are exact."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(first, first + steps):
        loss = model(_rows(device, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("kind", BASES)
@spmd(1, 2, 3, 4)
def test_it_trains_as_the_whole_model(rank, kind):
    reference, model = _model(kind, rank.device), _model(kind, rank.device)
    whole_bytes = {n: _code_bytes(p) for n, p in reference.named_parameters() if "base_layer.weight" in n}
    _shard(model)
    for name, nbytes in whole_bytes.items():
        local = model.get_parameter(name).to_local()
        held = torch.tensor(local.nbytes, device=rank.device)
        dist.all_reduce(held)
        assert 0 <= held.item() - nbytes < 64, (
            name
        )  # every byte of codes and scales on one rank, and few more
    expected, losses = _train(reference, rank.device), _train(model, rank.device)
    exact = rank.world_size != 3
    assert losses == (expected if exact else pytest.approx(expected, rel=1e-5))
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            got = _whole(model.get_parameter(name))
            assert torch.equal(got, parameter) if exact else torch.allclose(got, parameter, atol=1e-6), name
    with torch.no_grad():  # an evaluation, and training again after it
        model.eval(), reference.eval()
        if kind != "bitsandbytes int8":  # whose evaluation rounds to fp16, and sums in another order
            x = _rows(rank.device, 9)
            torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-6)
        model.train(), reference.train()
    again, expected = (_train(m, rank.device, first=3, steps=1) for m in (model, reference))
    assert again == pytest.approx(expected, rel=1e-5)


def _code_bytes(parameter):
    """Bytes of codes and scales of an unsharded weight."""
    if getattr(parameter, "quant_state", None) is not None:
        state = parameter.quant_state
        return parameter.nbytes + state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
    if hasattr(parameter, "SCB"):
        return parameter.nbytes
    names, _ = parameter.__tensor_flatten__()
    return sum(getattr(parameter, name).nbytes for name in names)


@pytest.mark.parametrize("kind", ["our int8", "nf4", "bitsandbytes int8", "torchao int8"])
@spmd(2)
def test_codes_travel_and_nothing_else_is_kept(rank, kind):
    from ragged_fsdp import MixedPrecisionPolicy

    model = _model(kind, rank.device)
    if kind == "bitsandbytes int8":
        model(_rows(rank.device, 0))  # a forward before sharding moves codes and scales into the module
    nbytes = sum(
        _code_bytes(p) if "base_layer.weight" in name else p.numel() * 2
        for name, p in model.named_parameters()
    )
    _shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x = _rows(rank.device, 0)
    with noted() as notes:
        model(x)
    travelled = sum(call.written.nbytes for call in notes.of("gather"))
    assert nbytes <= travelled < 1.1 * nbytes  # parameters in bf16, codes as they are, a little padding
    model.reshard()
    for module in model.modules():
        assert getattr(module, "quant_state", None) is None
        held = getattr(getattr(module, "state", None), "CB", None)
        assert held is None or held.untyped_storage().nbytes() == 0  # gathered memory, which is gone


@pytest.mark.parametrize("kind", BASES)
@spmd(2)
def test_merged_weights_are_streamed(rank, kind):
    from ragged_fsdp import weights

    reference, model = _model(kind, rank.device), _shard(_model(kind, rank.device))
    _train(model, rank.device), _train(reference, rank.device)
    sent = {name: tensor.clone() for name, tensor in weights.stream(model, dtype=torch.float32).tensors()}
    assert len([name for name in sent if name.endswith("weight")]) == 4 + 2, sorted(sent)
    for name, module in reference.named_modules():
        if isinstance(module, Adapted):  # what it makes of each input alone is its merged weight
            inputs = torch.eye(module.lora_A["default"].in_features, device=rank.device)
            with torch.no_grad():
                values = (module(inputs) - module.base_layer.bias).t()
            # on a GPU bitsandbytes multiplies its 8 bits in fp16
            close = 2e-4 if kind == "bitsandbytes int8" and rank.device == "cuda" else 1e-5
            torch.testing.assert_close(sent[f"{name}.weight"], values, atol=close, rtol=close)


@pytest.mark.parametrize("kind", ["our int8", "nf4, scales quantised", "bitsandbytes int8", "torchao int8"])
@spmd(2)
def test_state_dicts_hold_all_of_it(rank, kind):
    """What one model holds another takes over, codes and scales too; and only what trains, if asked for."""
    model, other = (_shard(_model(kind, rank.device, seed)) for seed in (3, 4))
    expected = _train(model, rank.device)
    other(_rows(rank.device, 0))  # what the computation sees is there already
    other.reshard()
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    assert _train(other, rank.device, first=3) == _train(model, rank.device, first=3) != expected
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert not any(name.endswith("base_layer.weight") for name in trained)


class _Codes(nn.Parameter):
    """What ``Int8Params`` of bitsandbytes is to us, where that is not installed."""

    __module__, __qualname__ = "bitsandbytes.nn.modules", "Int8Params"

    def __new__(cls, data, requires_grad=False, has_fp16_weights=False, CB=None, SCB=None):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.CB, made.SCB = CB, SCB
        return made


class _CodesLinear(nn.Module):
    """As ``Linear8bitLt`` its first forward takes the codes from the weight, and later ones use those."""

    def __init__(self, device) -> None:
        super().__init__()
        codes = torch.arange(DIM * DIM, device=device).remainder(251).sub(125).to(torch.int8).view(DIM, DIM)
        self.weight = _Codes(codes, CB=codes, SCB=torch.arange(1.0, DIM + 1, device=device))
        self.state = SimpleNamespace(CB=None, SCB=None)

    def forward(self, x):
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        return x @ (self.state.CB.float() * self.state.SCB[:, None] / 127).t()


@pytest.mark.parametrize("assign", [False, True])
@spmd(1, 2)
def test_codes_that_a_module_has_taken_stay_there(rank, assign):
    """They are gathered into the same memory each time; without them it would quantise codes once more."""
    from ragged_fsdp import fully_shard

    model, x = _CodesLinear(rank.device), _rows(rank.device, 0)
    expected = model(x)
    fully_shard(model)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
        model.reshard()
        copies = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(copies, assign=assign)


@pytest.mark.parametrize("kind", ["our int8", "nf4, scales quantised", "bitsandbytes int8", "torchao int8"])
@spmd(2)
def test_a_base_may_wait_on_the_host(rank, kind):
    """Losses are those of one that does not, also after other codes are loaded into a model that has run."""
    from ragged_fsdp import CPUOffloadPolicy

    offload = CPUOffloadPolicy(pin_memory=rank.device == "cuda")
    model, other = (_shard(_model(kind, rank.device, seed), offload_policy=offload) for seed in (3, 4))
    assert all(parameter.to_local().device.type == "cpu" for parameter in model.parameters())
    plain = _shard(_model(kind, rank.device, 3))
    expected = _train(plain, rank.device)
    assert _train(model, rank.device) == pytest.approx(expected, rel=1e-5)
    other(_rows(rank.device, 0))
    other.reshard()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    again = _train(other, rank.device, first=3)
    assert again == pytest.approx(_train(plain, rank.device, first=3), rel=1e-5) != expected


def test_magnitudes_of_8_bits_are_one_tensor_where_they_are_computed_with():
    """Codes are on the host; loading writes to the magnitudes of the sharded parameter."""
    bnb = pytest.importorskip("bitsandbytes")
    from ragged_fsdp.packing import packing_of

    layer = bnb.nn.Linear8bitLt(DIM, WIDE, has_fp16_weights=False).to("cpu")
    packing = packing_of(layer.weight)
    sharded = nn.Parameter(packing.pack(layer.weight), requires_grad=False)
    packing.attach(sharded, [layer])
    assert sharded.SCB is layer.SCB and sharded.SCB.device.type == "cpu"
    seen = packing.unpack(torch.empty(WIDE, DIM, dtype=torch.int8, device="meta"))
    assert seen.SCB is sharded.SCB is layer.SCB and seen.SCB.is_meta


@spmd(2)
def test_a_class_with_hooks_is_gathered_by_them(rank):
    """torchao's ``NF4Tensor``, of which a rank's part is one too, where the rows divide evenly."""
    pytest.importorskip("torchao")
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, linear_nf4, to_nf4

    from ragged_fsdp import fully_shard

    class Linear(nn.Linear):
        def forward(self, x):
            return linear_nf4(x, self.weight) + self.bias

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(*(Linear(256, 256, dtype=torch.bfloat16) for _ in range(2))).to(rank.device)
        for layer in model:
            layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 256), requires_grad=False)
        return model

    reference, model = make(), make()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model[0].weight.to_local(), NF4Tensor)
    for step in range(2):
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(step)).to(rank.device, torch.bfloat16)
        for module in (reference, model):
            module(x).float().square().sum().backward()
    assert torch.equal(_whole(model[0].bias.grad), reference[0].bias.grad)


@spmd(2)
def test_shared_weights_stay_shared(rank):
    """Layers with one weight have one weight after it, sharded too; an embedding's is left to its values."""
    from ragged_fsdp import BlockCodes, encode_frozen, fully_shard

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(DIM, DIM), *(nn.Linear(DIM, DIM) for _ in range(3)))
        model[2].weight = model[1].weight
        model[3].weight = model[0].weight
        for layer in model:
            layer.weight.requires_grad_(False)
        return model.to(rank.device)

    reference, model = make(), make()
    with pytest.raises(ValueError, match=r"3.weight: is also 0.weight, which needs its values"):
        encode_frozen(model, lambda name, weight: BlockCodes("int8", (16, 32)))
    assert type(model[1].weight.data) is torch.Tensor, "nothing is changed"
    asked = []

    def choose(name, weight):
        asked.append(name)
        return None if name == "3.weight" else BlockCodes("int8", (16, 32))

    for built in (reference, model):
        assert encode_frozen(built, choose) == ["1.weight"]
    assert asked == ["3.weight", "1.weight"] * 2
    assert model[1].weight is model[2].weight and model[3].weight is model[0].weight
    fully_shard(model)
    assert model[1].weight is model[2].weight
    tokens = torch.arange(8, device=rank.device)
    for built in (reference, model):
        built(tokens).square().sum().backward()
    for layer in (1, 2, 3):
        assert torch.equal(_whole(model[layer].bias.grad), reference[layer].bias.grad)


def test_one_row_is_an_input_too():
    """A linear layer takes a vector, and its bias may train."""
    from ragged_fsdp import BlockCodes, encode_frozen

    layer = nn.Linear(DIM, WIDE)
    layer.weight.requires_grad_(False)
    encode_frozen(layer, lambda name, weight: BlockCodes("int8", (16, 32)))
    x = torch.randn(DIM, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.ones(WIDE))
    torch.testing.assert_close(x.grad, layer.weight.dequantize().sum(0))


def test_a_weight_is_let_go_when_it_is_encoded():
    """Weights and codes of a whole model would not fit beside each other."""
    from ragged_fsdp import BlockCodes, encode_frozen
    from ragged_fsdp.frozen_codes import CodedWeight

    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3))).requires_grad_(False)
    held = [weakref.ref(layer.weight) for layer in model]
    alive, encode = [], CodedWeight.encode

    def noting(weight, codes):
        alive.append(sum(ref() is not None for ref in held))
        return encode(weight, codes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CodedWeight, "encode", noting)
        encode_frozen(model, lambda name, weight: BlockCodes("int8", (16, 32)))
    assert alive == [3, 2, 1]


@spmd(2)
def test_what_cannot_be_encoded_is_named(rank):
    from ragged_fsdp import BlockCodes, encode_frozen, fully_shard

    model = Net(nn.Linear)
    with pytest.raises(ValueError, match=r"layers.0.up.base_layer.weight: tiles of 24 x 32 do not cover"):
        encode_frozen(model, lambda name, weight: BlockCodes("int8", (24, 32)))
    with pytest.raises(TypeError, match=r"layers.0.up.base_layer.weight: the policy must return"):
        encode_frozen(model, lambda name, weight: "int8")
    assert type(model.layers[0].up.base_layer.weight.data) is torch.Tensor
    model = _model("our int8", "cpu")
    with pytest.raises(NotImplementedError, match="a CodedWeight is frozen and computes in linear layers"):
        model.layers[0].up.base_layer.weight + 1
    # ranks whose codes differ are told so, though the bytes are as many
    torch.manual_seed(0)
    layer = nn.Linear(DIM, DIM, bias=False).requires_grad_(False)
    kinds = ("int8", "float8_e4m3fn")
    encode_frozen(layer, lambda name, weight: BlockCodes(kinds[rank.rank], (16, 32)))
    with pytest.raises(ValueError, match="the ranks disagree"):
        fully_shard(layer)
