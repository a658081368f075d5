"""FP8 training on ranks: the bits of one process that is not sharded, whatever the mesh and the schedule."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from collective_calls import noted
from fsdp_cases import full, fully_shard, ragged_only
from ragged_fsdp import Tiles, fp8, weights
from ragged_fsdp.block_codes import encode_matrices
from ragged_fsdp.cli.plan_costs import PlanSettings
from ragged_fsdp.cli.plan_fp8 import plan_fp8
from ragged_fsdp.cli.plan_inputs import load_shapes
from ragged_fsdp.experts import expert_parallel
from ragged_fsdp.fp8.autograd import Fp8Product
from ragged_fsdp.models import MoEConfig
from ragged_fsdp.models.moe import Experts
from ragged_fsdp.tiling import untiled
from rank_pool import spmd

pytestmark = ragged_only
WIDE, EXPERTS, TOKENS = 128, 3, 40
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Net(nn.Module):
    """Two layers that share an input, one whose weight is tied to another's, one with a bias, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDE)
        self.gate_proj, self.up_proj = (nn.Linear(WIDE, 2 * WIDE, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDE, WIDE)
        self.first, self.again = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(2))
        self.again.weight = self.first.weight
        self.experts = Experts(MoEConfig(hidden=WIDE, expert_hidden=WIDE, experts=EXPERTS, init_std=0.1))

    def forward(self, x):
        normed = self.norm(x)
        x = x + self.down_proj(torch.relu(self.gate_proj(normed)) * self.up_proj(normed))
        x = x + self.again(self.first(x))
        chosen = (
            torch.arange(len(x), device=x.device).remainder(2).unsqueeze(1)
        )  # the last expert gets nothing
        return x + self.experts(x, chosen, torch.ones_like(chosen, dtype=x.dtype))


def built(device):
    torch.manual_seed(0)
    reference = Net().to(device)
    model = copy.deepcopy(reference)
    return fp8.fp8_training(model), fp8.fp8_training(reference)


def tokens(device, seed=0):
    return torch.randn(TOKENS, WIDE, generator=torch.Generator().manual_seed(seed)).to(device)


def step(model, batch):
    loss = model(batch).float().square().mean()
    loss.backward()
    return loss.detach()


def bf16_step(reference, batch):
    """A step of a model that is not sharded, with everything but the FP8 weights in bf16."""
    cast = fp8.fp8_training(copy.deepcopy(reference))  # again: a copy of a parameter has no attributes
    for name, p in cast.named_parameters():
        if fp8.gather_policy(name, p) is None:
            p.data = p.data.bfloat16()
    loss = cast(batch.bfloat16()).float().square().mean()
    loss.backward()
    for p, q in zip(reference.parameters(), cast.parameters()):
        p.grad = q.grad.bfloat16().to(p.dtype)
    return loss.detach()


CASES = {
    "plain": {"reshard_after_forward": True},
    "bf16": {"mp_policy": BF16},
    "kept": {"reshard_after_forward": False},
    "all-to-all": {"reduction": "all_to_all"},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "buffers": {"max_buffers": 2},
    "tiles": {"orig_param_policy": fp8.orig_param_policy, "reshard_after_forward": True},
}


def assert_same_gradients(rank, model, reference, case):
    for name, p in reference.named_parameters():
        got = full(model.get_parameter(name).grad).to(p.device)
        if case == "bf16" and name == "first.weight":  # tied: the reference adds its two gradients in fp32
            assert (got - p.grad).norm() < 0.01 * p.grad.norm()
        elif rank.world_size == 3:  # a third is rounded
            torch.testing.assert_close(got, p.grad, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(got, p.grad), (case, name)


@spmd(1, 2, 3, 4)
def test_losses_and_gradients_have_the_bits_of_one_process(rank):
    for case, options in CASES.items():
        model, reference = built(rank.device)
        fully_shard(model, gather_policy=fp8.gather_policy, **options)
        batch = tokens(rank.device)
        expected = bf16_step(reference, batch) if case == "bf16" else step(reference, batch)
        assert torch.equal(step(model, batch), expected), case
        assert_same_gradients(rank, model, reference, case)
        with torch.no_grad():  # without a backward nothing is turned
            assert torch.equal(model(batch), model(batch)), case


class Odd(nn.Module):
    """Sizes that leave tiles at the edges: right, below, in the corner, and smaller than a tile."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(144, 272, bias=False), nn.Linear(272, 144, bias=False)
        self.thin = nn.Linear(144, 32, bias=False)
        self.experts = Experts(MoEConfig(hidden=144, expert_hidden=208, experts=EXPERTS, init_std=0.1))

    def forward(self, x):
        x = x + self.back(torch.relu(self.wide(x)))
        chosen = torch.arange(len(x), device=x.device).remainder(2).unsqueeze(1)
        return self.thin(x + self.experts(x, chosen, torch.ones_like(chosen, dtype=x.dtype)))


@spmd(1, 3, 4)
def test_tiles_with_edges(rank):
    for case, options in {
        "plain": {"reshard_after_forward": True},
        "parked": {"reshard_after_forward": 2 if rank.world_size == 4 else False},
        "recomputed": {},
    }.items():
        torch.manual_seed(0)
        reference = fp8.fp8_training(Odd().to(rank.device), tiles=True)
        assert len(fp8.fp8_modules(reference)) == 4
        model = fp8.fp8_training(copy.deepcopy(reference), tiles=True)
        with pytest.raises(ValueError, match=r"wide.weight: tiles of 128 x 128 .*fp8.orig_param_policy"):
            fully_shard(model, gather_policy=fp8.gather_policy)
        policies = {"gather_policy": fp8.gather_policy, "orig_param_policy": fp8.orig_param_policy}
        fully_shard(model, **policies, **options)
        batch = torch.randn(TOKENS, 144, generator=torch.Generator().manual_seed(3)).to(rank.device)
        expected = step(reference, batch)
        if case == "recomputed":
            loss = checkpoint(model, batch.requires_grad_(), use_reentrant=False).float().square().mean()
            loss.backward()
        else:
            loss = step(model, batch)
        assert torch.equal(loss.detach(), expected), case
        assert_same_gradients(rank, model, reference, case)


@spmd(4)
def test_replicas_parking_recomputing_and_accumulating(rank):
    for case, options in {
        "hsdp": {"mesh": rank.mesh(2, 2, names=("r", "s")), "reshard_after_forward": True},
        "hsdp-tiles": {
            "mesh": rank.mesh(2, 2, names=("r", "s")),
            "orig_param_policy": fp8.orig_param_policy,
            "reduction": "all_to_all",
        },
        "parked": {"reshard_after_forward": 2},
        "recomputed": {},
        "accumulated": {},
        "frozen": {},
    }.items():
        model, reference = built(rank.device)
        if case == "frozen":
            for one in (model, reference):
                one.up_proj.weight.requires_grad_(False)
        fully_shard(model, gather_policy=fp8.gather_policy, **options)
        batches = [tokens(rank.device, seed) for seed in range(2 if case == "accumulated" else 1)]
        for batch in batches:
            model.set_requires_gradient_sync(batch is batches[-1])
            expected = step(reference, batch)
            if case == "recomputed":
                loss = checkpoint(model, batch.requires_grad_(), use_reentrant=False).float().square().mean()
                loss.backward()
            else:
                loss = step(model, batch)
            assert torch.equal(loss.detach(), expected), case
        if case == "frozen":
            assert model.up_proj.weight.grad is None and reference.up_proj.weight.grad is None
            for one in (model, reference):
                one.up_proj.weight.grad = one.gate_proj.weight.grad
        assert_same_gradients(rank, model, reference, case)


@spmd(4)
def test_two_levels(rank):
    """Sums of a node are rounded to bf16 between nodes: losses have their bits, gradients bf16's error."""
    for stored in ({}, {"orig_param_policy": fp8.orig_param_policy}):
        model, reference = built(rank.device)
        levels = {"reduction": "two_level", "ranks_per_node": 2}
        fully_shard(model, gather_policy=fp8.gather_policy, mp_policy=BF16, **levels, **stored)
        batch = tokens(rank.device)
        expected = bf16_step(reference, batch)
        assert torch.equal(step(model, batch), expected)
        for name, p in reference.named_parameters():
            got = full(model.get_parameter(name).grad).to(p.device)
            assert (got - p.grad).norm() <= 0.01 * p.grad.norm(), name


@spmd(2)
def test_bytes_on_the_wire_and_in_memory(rank):
    model, _ = built(rank.device)
    fully_shard(model, gather_policy=fp8.gather_policy, mp_policy=BF16)
    with noted() as calls:
        model.unshard()
    weight = model.up_proj.weight
    assert weight.shape == (2 * WIDE, WIDE) and weight.dtype == torch.bfloat16 and weight.isnan().all()
    coded = weight._ragged_fsdp_codes
    assert coded.codes.dtype == torch.float8_e4m3fn and coded.scales.shape == (2, 1)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    others = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    sizes = sorted(call.written.nbytes for call in calls.of("gather"))
    assert len(sizes) == 3 and 4 * matrices // 128**2 <= sizes[0] <= 2 * others + 256
    assert matrices <= sizes[-1] <= 1.1 * matrices  # one byte each, and padding


def gathered_codes(model, name, shape):
    """Codes in rows and columns, as bytes, and scales of a weight that is gathered."""
    coded = model.get_parameter(name)._ragged_fsdp_codes
    codes = coded.codes.view(torch.uint8)
    if codes.dim() == 1:  # in the order of tiles
        codes = untiled(codes, tuple(shape), (128, 128))
    return codes.view(shape), coded.scales


@spmd(1, 2, 3, 4)
def test_codes_and_scales_have_the_bits_of_one_process(rank):
    for stored in ({}, {"orig_param_policy": fp8.orig_param_policy}):
        model, reference = built(rank.device)
        fully_shard(model, gather_policy=fp8.gather_policy, **stored)
        model.unshard()
        for name, p in reference.named_parameters():
            if fp8.gather_policy(name, p) is None:
                continue
            codes, scales = gathered_codes(model, name, p.shape)
            expected = encode_matrices(p.detach())
            assert torch.equal(codes, expected[0].view(torch.uint8)), (stored, name)
            assert torch.equal(scales, expected[1]), (stored, name)


@spmd(2)
def test_what_is_exported_has_the_bits_that_were_computed_with(rank):
    import transformers

    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 64, "vocab_size": 64, "num_experts_per_tok": 2, "use_cache": False}
    config = transformers.Qwen3MoeConfig(**sizes, num_experts=3, moe_intermediate_size=128)
    torch.manual_seed(0)
    model = fp8.fp8_training(transformers.AutoModelForCausalLM.from_config(config).to(rank.device))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    fully_shard(model, gather_policy=fp8.gather_policy, orig_param_policy=fp8.orig_param_policy)
    model(torch.arange(8, device=rank.device)[None]).logits.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    sent = {name: value.clone() for name, value in weights.stream(model, codes="fp8").tensors()}
    model.unshard()
    layer = "model.layers.0"
    for own in ("q", "k", "v", "o"):
        name = f"{layer}.self_attn.{own}_proj.weight"
        codes, scales = gathered_codes(model, name, shapes[name])
        assert torch.equal(sent[name].view(torch.uint8), codes), name
        assert torch.equal(sent[f"{name}_scale_inv"], scales), name
    fused = f"{layer}.mlp.experts.gate_up_proj"
    codes, scales = gathered_codes(model, fused, shapes[fused])
    for expert in range(3):
        for half, own in enumerate(("gate", "up")):
            name = f"{layer}.mlp.experts.{expert}.{own}_proj.weight"
            rows = slice(128 * half, 128 * half + 128)
            assert torch.equal(sent[name].view(torch.uint8), codes[expert, rows]), name
            assert torch.equal(sent[f"{name}_scale_inv"], scales[expert, half : half + 1]), name


@spmd(4)
def test_plan_says_what_is_gathered(rank):
    shapes = load_shapes("demo")
    ways = plan_fp8(shapes, ["layers"], [4], PlanSettings()).sizes[4]
    for way, tiles in (("bands", False), ("tiles", True)):
        model = fp8.fp8_training(shapes.model if tiles else copy.deepcopy(shapes.model), tiles=tiles)
        policies = {"gather_policy": fp8.gather_policy, "mp_policy": BF16}
        policies |= {"orig_param_policy": fp8.orig_param_policy} if tiles else {}
        for part in (*model.layers, model):
            fully_shard(part, **policies)
        model.to_empty(device=rank.device)
        with noted() as calls:
            for part in (*model.layers, model):
                part.unshard()
        gathered = {torch.uint8: 0, torch.bfloat16: 0}
        for call in calls.of("gather"):
            if call.written.dtype in gathered:  # scales are a gather of their own, filled up for equal parts
                gathered[call.written.dtype] += call.written.numel()
        assert gathered[torch.uint8] == ways[way].coded.buffer_numel, way
        planned = ways[way].plain.buffer_numel  # where a group is small its shards need no multiple of 128
        assert 0.98 * planned < gathered[torch.bfloat16] <= planned, way


@spmd(2)
def test_checkpoints_know_nothing_of_it(rank):
    model, reference = built(rank.device)
    fully_shard(model, gather_policy=fp8.gather_policy)
    step(model, tokens(rank.device))
    state = get_model_state_dict(model)
    assert all(value.dtype == torch.float32 for value in state.values())
    dcp.save(state, checkpoint_id=rank.shared_dir / "c")
    plain = Net().to(rank.device)
    fully_shard(plain)
    loaded = get_model_state_dict(plain)
    dcp.load(loaded, checkpoint_id=rank.shared_dir / "c")
    set_model_state_dict(plain, loaded)
    for name, p in reference.named_parameters():
        assert torch.equal(full(plain.get_parameter(name)), p)


@spmd(2)
def test_a_compiled_layer_has_the_same_bits(rank):
    for stored in ({}, {"orig_param_policy": fp8.orig_param_policy}):
        model, reference = built(rank.device)
        model.compile(backend="aot_eager")
        if torch.__version__.startswith("2.11"):  # which adds a norm's gradient in another order when traced
            reference.compile(backend="aot_eager")
        fully_shard(model, gather_policy=fp8.gather_policy, reshard_after_forward=True, **stored)
        batch = tokens(rank.device)
        for _ in range(2):
            assert torch.equal(step(model, batch), step(reference, batch))
        assert_same_gradients(rank, model, reference, "compiled")


@spmd(2)
def test_inference_mode_before_a_step(rank):
    model, reference = built(rank.device)
    fully_shard(model, gather_policy=fp8.gather_policy)
    batch = tokens(rank.device)
    with torch.inference_mode():
        inside = tokens(rank.device)
        for given in (batch, inside, inside[:0]):
            assert torch.equal(model(given), reference(given))
    assert torch.equal(step(model, batch), step(reference, batch))
    assert_same_gradients(rank, model, reference, "after inference")


@spmd(2)
def test_experts_that_are_spread_before_or_after(rank):
    """Either order computes in FP8; weights that were made anew do so or say that they cannot."""

    def made(device):
        with torch.device(device):
            config = MoEConfig(hidden=WIDE, expert_hidden=WIDE, experts=EXPERTS, init_std=0.1)
            return nn.ModuleDict({"experts": Experts(config)})

    mesh = rank.mesh(1, 2, names=("dp", "ep"))
    batch = tokens(rank.device)
    given = batch, torch.arange(TOKENS, device=rank.device)[:, None] % EXPERTS, batch.new_ones(TOKENS, 1)
    outputs = []
    for first in ("experts", "fp8"):
        torch.manual_seed(0)
        layer = made("cpu").to(rank.device)
        if first == "fp8":
            fp8.fp8_training(layer)
        expert_parallel(layer, mesh["ep"])
        if first == "experts":
            fp8.fp8_training(layer)
        fully_shard(layer["experts"], mesh=mesh["dp"], gather_policy=fp8.gather_policy)
        outputs.append(layer["experts"](*given))
    assert torch.equal(*outputs)
    for again in (True, False):
        layer = made("meta")
        fp8.fp8_training(expert_parallel(layer, mesh["ep"]))
        layer.to_empty(device=rank.device)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        if again:
            fp8.fp8_training(layer)
        fully_shard(layer["experts"], mesh=mesh["dp"], gather_policy=fp8.gather_policy)
        if again:
            assert layer["experts"](*given).isfinite().all()
            continue
        with pytest.raises(RuntimeError, match=r"gate_up_proj was gathered as .*after to_empty\(\)"):
            layer["experts"](*given)


@spmd(2)
def test_what_is_not_finite_is_named(rank):
    model, _ = built(rank.device)
    fully_shard(model, gather_policy=fp8.gather_policy)
    batch = tokens(rank.device)
    step(model, batch)
    assert fp8.nonfinite(model) == []
    batch[3, 5] = float("inf")
    step(model, batch)
    found = fp8.nonfinite(model)
    assert found[0] == "gate_proj.weight: an input" and "gate_proj.weight: a gradient of its output" in found
    assert fp8.nonfinite(model) == []


@spmd(2)
def test_names_begin_with_what_was_seen_first(rank):
    model, _ = built(rank.device)
    fully_shard(model, gather_policy=fp8.gather_policy)
    watch, batch = fp8.Watch(model), tokens(rank.device)

    def spoil(module, args):
        args[0].register_hook(lambda grad: grad * float("inf"))

    hook = model.down_proj.register_forward_pre_hook(spoil)
    step(model, batch)  # its own gradient is finite, those of the layers before it are not
    hook.remove()
    watch.mark()
    expected = ["up_proj.weight: a gradient of its output", "gate_proj.weight: a gradient of its output"]
    assert watch.names() == expected
    step(model, batch * float("nan"))  # what is seen after the mark is not told
    assert watch.names() == expected
    watch.mark()
    # up_proj has the same input, quantised once
    assert watch.names()[:2] == ["gate_proj.weight: an input", "down_proj.weight: an input"]


@spmd(2)
def test_refusals_change_nothing(rank):
    model = Net().to(rank.device)
    with pytest.raises(ValueError, match=r"gate_proj.weight: codes that are not decoded need .*fp8_training"):
        fully_shard(model, gather_policy=lambda n, p: fp8.training._CODES if p.ndim == 2 else None)
    fp8.fp8_training(model)
    for tiles, error in ((Tiles(64, 64), "use tiles of one size"), (Tiles(128, 64), "use tiles of one size")):
        with pytest.raises(ValueError, match=error):
            fully_shard(
                model,
                gather_policy=fp8.gather_policy,
                orig_param_policy=lambda n, p, tiles=tiles: tiles if p.ndim > 1 else None,
            )
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"gate_proj.weight was gathered as torch.float32.*gather_policy"):
        model(tokens(rank.device))
    with pytest.raises(ValueError, match=r"FP8: .* is sharded already; call it before"):
        fp8.fp8_training(model)
    assert isinstance(model.up_proj.fp8_products["weight"], Fp8Product)


@spmd(4)
def test_linear_layers_that_tensor_parallelism_split(rank):
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    odd = parallelize_module(nn.Sequential(nn.Linear(WIDE, 129)), mesh["tp"], {"0": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"0.weight is placed as .* one even Shard: exclude it"):
        fp8.fp8_training(odd, include=lambda name, module: True)
    # halves of 256 have the blocks of the whole, and the same codes; halves of 288 have others
    for tiles, wide, tolerance in ((False, 256, 1e-6), (True, 288, 5e-3)):
        torch.manual_seed(0)
        layers = nn.Linear(WIDE, wide), nn.ReLU(), nn.Linear(wide, WIDE)
        reference = fp8.fp8_training(nn.Sequential(*layers).to(rank.device), tiles=tiles)
        model = copy.deepcopy(reference)
        model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fp8.fp8_training(model, tiles=tiles)
        assert len(fp8.fp8_modules(model)) == 2
        stored = {"orig_param_policy": fp8.orig_param_policy} if tiles else {}
        fully_shard(model, mesh=mesh["dp"], gather_policy=fp8.gather_policy, **stored)
        batch = tokens(rank.device)
        with pytest.raises(RuntimeError, match=r"fp8: 0.weight is placed as .*, not gathered"):
            model[0](batch)
        torch.testing.assert_close(step(model, batch), step(reference, batch), rtol=tolerance, atol=0)
        for name, p in reference.named_parameters():
            got = full(model.get_parameter(name).grad).to(p.device)
            assert (got - p.grad).norm() <= 10 * tolerance * p.grad.norm(), (tiles, name)


HF = {  # fused experts as (experts, out, in), and as (experts, in, out) with biases
    "Qwen3MoeConfig": {"num_experts": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "GptOssConfig": {"num_local_experts": 3, "intermediate_size": 48},
}


@spmd(3)
def test_fused_experts_of_transformers(rank):
    import transformers

    sizes = {"hidden_size": 144, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "vocab_size": 64, "num_experts_per_tok": 2, "use_cache": False}
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1)).to(rank.device)

    def trained(model):
        loss = model(ids).logits.float().square().mean()
        loss.backward()
        return loss.detach()

    for family, own in HF.items():
        torch.manual_seed(0)
        plain = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family)(**sizes, **own))
        plain = plain.to(rank.device)
        reference, model = (fp8.fp8_training(copy.deepcopy(plain), tiles=True) for _ in range(2))
        assert any(name.endswith(".experts") for name in fp8.fp8_modules(model)), family
        fully_shard(model, gather_policy=fp8.gather_policy, orig_param_policy=fp8.orig_param_policy)
        expected = trained(reference)
        assert torch.equal(trained(model), expected), family
        assert_same_gradients(rank, model, reference, family)
        torch.testing.assert_close(expected, trained(plain), rtol=0.02, atol=0)
