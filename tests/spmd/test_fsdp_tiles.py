"""Parameters in the order of tiles: the numbers, checkpoints and tensors of row-major ones."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_cases import Blocked, fully_shard, ragged_only
from ragged_fsdp import BlockCodes, Elements, RaggedShard, Rows, Tiles, weights
from ragged_fsdp.block_codes import quantize_dequantize
from ragged_fsdp.dtensor import RaggedOpError
from ragged_fsdp.optim import AdamW8bit, FusedAdamW, Muon, Shampoo, block_policy
from ragged_fsdp.tiling import tiled
from ragged_fsdp.trainer.config import OptimizerConfig
from ragged_fsdp.trainer.optimizers import build_optimizer
from rank_pool import spmd

pytestmark = ragged_only
WIDE = 20


Net = partial(Blocked, WIDE)  # with edge tiles on either side


def by_tiles(name, param):
    return Tiles(8, 8) if param.ndim > 1 else None


def by_elements(name, param):
    return Elements(1)


def make(rank, policy, seed=0, **options):
    torch.manual_seed(seed)
    net = Net().to(rank.device)
    whole = copy.deepcopy(net)
    fully_shard(net, orig_param_policy=policy, **options)
    return net, whole


def steps(net, rank, optimizer, count=3, accumulate=False):
    """Losses of some steps; the batch depends on the rank."""
    losses = []
    for step in range(count):
        generator = torch.Generator().manual_seed(100 * step + rank.rank)
        batch = torch.randn(5, WIDE, generator=generator).to(rank.device)
        if accumulate:
            net.set_requires_gradient_sync(False)
            net(batch).float().square().mean().backward()
            net.set_requires_gradient_sync(True)
        loss = net(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def fulls(net):
    return {name: p.full_tensor().detach() for name, p in net.named_parameters()}


def assert_alike(value, other, note, exact):
    assert torch.equal(value, other) if exact else torch.allclose(value, other, rtol=1e-5, atol=1e-6), note


CASES = {
    "plain": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "kept": {"reshard_after_forward": False},
    "all-to-all": {"reduction": "all_to_all"},
    "all-to-all bf16": {
        "reduction": "all_to_all",
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    },
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "two buffers": {"max_buffers": 2},
}


@spmd(1, 2, 3, 4)
def test_training_has_the_bits_of_row_major_training(rank):
    """Where the sums of the gradients have one order, every bit is that of the other layout.

    A reduce-scatter over three ranks or more adds each part of its buffer in another order.
    """
    for case in CASES:
        compare_with_rows(rank, case, exact=rank.world_size < 3 or "all-to-all" in case)


def compare_with_rows(rank, case, exact):
    results = []
    for policy in (by_tiles, by_elements):
        net, _ = make(rank, policy, **CASES[case])
        if policy is by_tiles:
            assert net.up.weight.placements[-1].tile == (8, 8)
            assert net.up.weight.to_local().ndim == 1 and net.norm.weight.placements[-1].tile is None
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        losses = steps(net, rank, optimizer, accumulate=case == "plain")
        results.append((losses, fulls(net)))
    (losses, weights), (other_losses, other_weights) = results
    for name, weight in {**weights, "losses": torch.stack(losses)}.items():
        other = other_weights[name] if name in weights else torch.stack(other_losses)
        assert_alike(weight, other, (case, name), exact)


@spmd(1, 3)
def test_what_users_do_with_parameters(rank):
    """full_tensor, printing, clipping, norms, casts, initialisation, moves; what has no meaning says so."""
    net, whole = make(rank, by_tiles)
    for (name, p), q in zip(net.named_parameters(), whole.parameters()):
        assert torch.equal(p.full_tensor(), q), name
        assert torch.allclose(p.norm().full_tensor(), q.norm())
        assert torch.allclose(p.sum(-1, keepdim=True).full_tensor(), q.sum(-1, keepdim=True), atol=1e-5)
        assert torch.allclose(p.amax(0).full_tensor(), q.amax(0))
        if p.ndim > 1:
            row = distribute_tensor(q.detach()[..., :1, :].contiguous(), p.device_mesh, [Replicate()])
            assert torch.equal((p * row).full_tensor(), q * q[..., :1, :]), name
        repr(p), str(p.placements)
        rows = p.detach().redistribute(placements=[Shard(0)])
        assert torch.equal(rows.full_tensor(), q), name
        back = rows.redistribute(placements=p.placements)
        assert torch.equal(back.to_local(), p.to_local()), name
        mixed = rows + p  # operands of other layouts are moved
        assert torch.equal(mixed.full_tensor(), q + q), name
        copied = copy.deepcopy(p)
        assert copied.placements == p.placements and torch.equal(copied.full_tensor(), q)
    loss = net(torch.ones(2, WIDE, device=rank.device)).sum()
    loss.backward()
    expected = whole(torch.ones(2, WIDE, device=rank.device)).sum()
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    expected_norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    assert torch.allclose(norm.full_tensor() if isinstance(norm, DTensor) else norm, expected_norm)
    for p, q in zip(net.parameters(), whole.parameters()):
        assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6)
    for change in (nn.init.normal_, nn.init.xavier_uniform_):
        torch.manual_seed(3)
        change(net.up.weight)
        torch.manual_seed(3)
        change(whole.up.weight)
        assert torch.equal(net.up.weight.full_tensor(), whole.up.weight)
    with pytest.raises(RaggedOpError, match="in the order of tiles another shape is no view"):
        net.up.weight.view(-1)
    with pytest.raises(RaggedOpError):
        net.up.weight.t()
    net.to(torch.bfloat16)
    assert torch.equal(net.up.weight.full_tensor(), whole.up.weight.to(torch.bfloat16))
    net(torch.ones(2, WIDE, device=rank.device, dtype=torch.bfloat16)).sum().backward()


@spmd(2, 4)
def test_checkpoints_of_either_order_are_read_by_the_other(rank):
    """Model and AdamW state of four ranks in tiles are read by rows, by FSDP2, and back."""
    writer, _ = make(rank, by_tiles, seed=1)
    optimizer = torch.optim.AdamW(writer.parameters(), lr=1e-2)
    steps(writer, rank, optimizer)
    expected = fulls(writer)
    states = dict(zip(("model", "optimizer"), get_state_dict(writer, optimizer)))
    dcp.save(states, checkpoint_id=rank.shared_dir / "tiles")
    for kind in ("rows", "tiles", "stock"):
        torch.manual_seed(2)
        if kind == "stock":
            reader = Net().to(rank.device)
            stock_fully_shard(reader)
        else:
            reader, _ = make(rank, by_elements if kind == "rows" else by_tiles, seed=2)
        adam = torch.optim.AdamW(reader.parameters(), lr=1e-2)
        steps(reader, rank, adam, count=1)
        states = dict(zip(("model", "optimizer"), get_state_dict(reader, adam)))
        dcp.load(states, checkpoint_id=rank.shared_dir / "tiles")
        set_state_dict(reader, adam, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        for name, weight in fulls(reader).items():
            assert torch.equal(weight, expected[name]), (kind, name)
        for p, q in zip(writer.parameters(), reader.parameters()):
            for key in ("exp_avg", "exp_avg_sq"):
                a, b = optimizer.state[p][key].full_tensor(), adam.state[q][key].full_tensor()
                assert torch.equal(a, b), (kind, key)


@spmd(1, 2)
def test_checkpoints_have_parameters_without_elements(rank):
    def empty():
        net = nn.Module()
        for name, shape in {"full": (3, 5), "rows": (0, 5), "columns": (3, 0), "vector": (0,)}.items():
            net.register_parameter(name, nn.Parameter(torch.ones(shape, device=rank.device)))
        return net

    def sharded(kind):
        net = empty()
        if kind == "stock":
            stock_fully_shard(net)
        else:
            fully_shard(net, orig_param_policy=by_tiles if kind == "tiles" else by_elements)
        return net

    for kind in ("tiles", "rows"):
        dcp.save({"model": sharded(kind).state_dict()}, checkpoint_id=rank.shared_dir / kind)
        for other in ("tiles", "rows", "stock"):
            states = sharded(other).state_dict()
            dcp.load({"model": states}, checkpoint_id=rank.shared_dir / kind)
            if other != "stock":  # torch's own full_tensor takes no empty rows
                assert all(states[n].full_tensor().shape == p.shape for n, p in empty().named_parameters())


@spmd(4)
def test_a_checkpoint_of_four_ranks_in_tiles_is_read_on_two_in_rows_and_back(rank):
    writer, whole = make(rank, by_tiles, seed=1)
    dcp.save({"model": writer.state_dict()}, checkpoint_id=rank.shared_dir / "four")
    mesh = init_device_mesh(rank.device, (2, 2), mesh_dim_names=("half", "pair"))["pair"]
    reader, _ = make(rank, by_elements, seed=2, mesh=mesh)
    states = reader.state_dict()
    dcp.load({"model": states}, checkpoint_id=rank.shared_dir / "four")
    reader.load_state_dict(states)
    for (name, p), q in zip(reader.named_parameters(), whole.parameters()):
        assert torch.equal(p.full_tensor(), q), name
    dcp.save({"model": reader.state_dict()}, checkpoint_id=rank.shared_dir / "two")
    again, _ = make(rank, by_tiles, seed=3)
    states = again.state_dict()
    dcp.load({"model": states}, checkpoint_id=rank.shared_dir / "two")
    again.load_state_dict(states)
    for (name, p), q in zip(again.named_parameters(), whole.parameters()):
        assert torch.equal(p.full_tensor(), q), name


@spmd(4)
def test_other_meshes_and_frozen_parameters(rank):
    """HSDP, tensor parallelism before the tiles, a slice kept from forward to backward, frozen weights."""
    full_mesh = init_device_mesh(rank.device, (2, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for policy in (by_tiles, by_elements):
        net, _ = make(rank, policy, mesh=full_mesh)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        found = [*steps(net, rank, sgd), *fulls(net).values()]
        net, _ = make(rank, policy, reshard_after_forward=2)
        found += steps(net, rank, torch.optim.SGD(net.parameters(), lr=0.1))
        found += fulls(net).values()
        torch.manual_seed(0)
        net = Net().to(rank.device)
        net.up.weight.requires_grad_(False)
        fully_shard(net, orig_param_policy=policy)
        found += steps(net, rank, torch.optim.SGD(net.parameters(), lr=0.1))
        found += fulls(net).values()
        torch.manual_seed(0)
        linear = nn.Linear(24, 20, bias=False).to(rank.device)
        weight = distribute_tensor(linear.weight.detach(), full_mesh["tp"], [Shard(0)])
        linear.weight = nn.Parameter(weight)
        fully_shard(linear, mesh=full_mesh["dp"], orig_param_policy=policy)
        assert torch.equal(linear.weight.full_tensor(), weight.full_tensor())
        out = linear(distribute_tensor(torch.ones(3, 24, device=rank.device), full_mesh["tp"], [Replicate()]))
        out.full_tensor().square().sum().backward()
        found.append(linear.weight.grad.full_tensor())
        results.append(found)
    assert len(results[0]) == len(results[1])
    for place, (value, other) in enumerate(zip(*results)):
        assert_alike(value, other, place, exact=False)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
@spmd(1, 2, 3, 4)
def test_codes_of_tiles_are_those_of_the_whole_weight(rank, kind):
    """Edge tiles have scales of their own; outputs and gradients are to the bit those of decoded weights."""
    codes = BlockCodes(kind, (8, 8))

    def gathered(name, p):
        return codes if p.ndim > 1 else None

    dtype = torch.bfloat16
    options = {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32), "reduction": "all_to_all"}
    net, whole = make(rank, by_tiles, gather_policy=gathered, **options)
    batch = torch.randn(5, WIDE, generator=torch.Generator().manual_seed(1)).to(rank.device)
    for _ in range(2):
        decoded = {
            name: (
                quantize_dequantize(p, codes, dtype) if p.ndim > 1 else p.detach().to(dtype)
            ).requires_grad_()
            for name, p in whole.named_parameters()
        }
        expected = torch.func.functional_call(whole, decoded, batch.to(dtype))
        expected.float().square().sum().backward()
        out = net(batch)
        assert torch.equal(out, expected)
        out.float().square().sum().backward()
        for (name, p), q in zip(net.named_parameters(), whole.parameters()):
            assert torch.equal(p.grad.full_tensor(), decoded[name].grad.float()), name  # alike on every rank
            with torch.no_grad():
                p -= 0.01 * p.grad
                q -= 0.01 * decoded[name].grad.float()
            p.grad = None
            assert torch.equal(p.full_tensor(), q)


class Even(nn.Module):
    """Matrices that tiles of 8 x 8 divide, stacked ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, 24, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 24, 16) / 8)

    def forward(self, x):
        return torch.einsum("bd,edk->bk", torch.relu(self.up(x)), self.experts)


OPTIMIZERS = {
    "adam8bit": lambda ps: AdamW8bit(ps, lr=0.01, block_shape=(8, 8), min_8bit_numel=1),
    "shampoo": lambda ps: Shampoo(
        ps, lr=0.01, block_shape=(8, 8), start_step=1, root_interval=1, min_numel=1
    ),
    "muon": lambda ps: Muon(ps, lr=0.01),
    "fused": lambda ps: FusedAdamW(ps, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@spmd(1, 4)
def test_block_optimizers_take_tiles_for_their_blocks(rank, kind):
    """Weights of the unsharded model to the bit, and 8-bit state that a row-major model reads."""
    torch.manual_seed(0)
    net = Even().to(rank.device)
    net.up = nn.Linear(WIDE - 4, 24, bias=False).to(rank.device)
    whole, bands = copy.deepcopy(net), copy.deepcopy(net)
    fully_shard(net, orig_param_policy=by_tiles)
    fully_shard(bands, orig_param_policy=lambda name, p: Rows(8))
    makers = [OPTIMIZERS[kind](list(model.named_parameters())) for model in (net, whole, bands)]
    for step in range(3):
        batch = torch.randn(5, WIDE - 4, generator=torch.Generator().manual_seed(step)).to(rank.device)
        for model, optimizer in zip((net, whole, bands), makers):
            model(batch).square().mean().backward()  # alike on every rank
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(net.named_parameters(), whole.parameters()):
        error = (p.full_tensor() - q).abs().max().item()
        assert error == 0 if kind == "adam8bit" else error < 1e-5, (name, error)
    if kind != "adam8bit":
        return
    for p, q, r in zip(net.parameters(), bands.parameters(), whole.parameters()):
        for key, value in makers[0].state[p].items():
            if torch.is_tensor(value) and value.ndim:
                expected = makers[1].state[r][key]
                assert torch.equal(value.full_tensor(), expected), key
                assert torch.equal(makers[2].state[q][key].full_tensor(), expected), key
    _, state = get_state_dict(net, makers[0])
    dcp.save({"o": state}, checkpoint_id=rank.shared_dir / "adam")
    fresh = OPTIMIZERS[kind](list(bands.named_parameters()))
    _, target = get_state_dict(bands, fresh)
    dcp.load({"o": target}, checkpoint_id=rank.shared_dir / "adam")
    set_state_dict(bands, fresh, model_state_dict=bands.state_dict(), optim_state_dict=target)
    for q, r in zip(bands.parameters(), whole.parameters()):
        scales = fresh.state[q]["exp_avg_scales"].full_tensor()
        assert torch.equal(scales, makers[1].state[r]["exp_avg_scales"])


@spmd(1, 4)
def test_8bit_adam_with_edge_tiles_and_with_flat_runs(rank):
    """Edges: the same on any number of ranks. Flat runs: those of the unsharded model."""
    found = []
    alone = init_device_mesh(rank.device, (rank.world_size, 1), mesh_dim_names=("all", "one"))["one"]
    for mesh in (None, alone):
        options = {} if mesh is None else {"mesh": mesh}
        net, _ = make(rank, by_tiles, **options)
        adam = AdamW8bit(net.named_parameters(), lr=0.01, block_shape=(8, 8), min_8bit_numel=100)
        batch = torch.randn(5, WIDE, generator=torch.Generator().manual_seed(0)).to(rank.device)
        for _ in range(3):
            net(batch).square().mean().backward()
            adam.step()
            adam.zero_grad()
        found.append(fulls(net))
    for name, weight in found[0].items():
        assert torch.equal(weight, found[1][name]), name
    results = []
    for sharded in (True, False):
        torch.manual_seed(0)
        net = Net().to(rank.device)
        if sharded:
            fully_shard(net, orig_param_policy=block_policy(None, run=16, min_numel=100))
        adam = AdamW8bit(net.named_parameters(), lr=0.01, block_shape=None, run=16, min_8bit_numel=100)
        for _ in range(3):
            net(batch).square().mean().backward()
            adam.step()
            adam.zero_grad()
        results.append([p.full_tensor() if sharded else p for p in net.parameters()])
        assert adam.state[net.up.weight]["exp_avg_scales"].shape == (72 * WIDE // 16, 1)
    assert all(torch.equal(a, b) for a, b in zip(*results))
    net, _ = make(rank, by_tiles)
    for block_shape in (None, (32, 32)):
        with pytest.raises(ValueError, match=r"experts: is stored in Tiles.*Pass block_shape=\(8, 8\)"):
            AdamW8bit(net.named_parameters(), block_shape=block_shape, min_8bit_numel=100)
    groups = build_optimizer(OptimizerConfig(optimizer="adam8bit"), net).param_groups
    assert sorted(group["block_shape"] for group in groups) == [(8, 8), (32, 32)]
    with pytest.raises(ValueError, match=r"experts: stored in Tiles.*Exclude it"):
        Shampoo(net.named_parameters(), block_shape=(8, 8), min_numel=1)


@spmd(1, 3)
def test_weights_are_read_and_handed_over_in_the_ordinary_order(rank):
    """A folder of safetensors into tiles, a stream out of them, safetensors written by DCP, pickles."""
    net, _ = make(rank, by_tiles, seed=1)
    _, whole = make(rank, by_elements, seed=2)
    folder = rank.shared_dir / "folder"
    if rank.rank == 0:
        folder.mkdir()
        save_file(
            {name: value.cpu() for name, value in whole.state_dict().items()}, folder / "model.safetensors"
        )
    dist.barrier()
    weights.load(net, folder)
    for (name, p), q in zip(net.named_parameters(), whole.parameters()):
        assert torch.equal(p.full_tensor(), q), name
    for name, value in weights.stream(net).tensors():
        assert torch.equal(value, whole.state_dict()[name]), name
    full_state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank.rank == 0:
        assert all(torch.equal(full_state[name], value.cpu()) for name, value in whole.state_dict().items())
    other, _ = make(rank, by_tiles, seed=3)
    set_model_state_dict(other, whole.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(other.parameters(), whole.parameters()))
    path = rank.shared_dir / f"piece{rank.rank}.pt"
    torch.save(net.up.weight, path)
    assert torch.equal(torch.load(path, weights_only=True).full_tensor(), whole.up.weight)


@spmd(2)
def test_refusals_name_the_parameter(rank):
    with pytest.raises(ValueError, match=r"bias[\s\S]*two dims or more"):
        fully_shard(nn.Linear(4, 4), orig_param_policy=lambda name, p: Tiles(2, 2))
    with pytest.raises(ValueError, match=r"weight: Tiles.* shard_placement_fn .* exclude each other"):
        fully_shard(
            nn.Linear(4, 4, bias=False),
            orig_param_policy=lambda name, p: Tiles(2, 2),
            shard_placement_fn=lambda p: Shard(1),
        )
    with pytest.raises(ValueError, match=r"weight: BlockCodes.*use tiles of one size"):
        fully_shard(
            nn.Linear(4, 4, bias=False),
            orig_param_policy=lambda name, p: Tiles(2, 2),
            gather_policy=lambda name, p: BlockCodes("int8", (4, 4)),
        )
    net, _ = make(rank, by_tiles)
    net.requires_grad_(False)
    net.up.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="must keep one dtype"):
        net(torch.ones(2, WIDE, device=rank.device))


@spmd(3)
def test_a_tensor_of_its_own(rank):
    mesh = rank.mesh()
    whole = torch.arange(35.0, device=rank.device).view(5, 7)
    placement = RaggedShard.even((5, 7), 3, Tiles(2, 3))
    tensor = DTensor.from_local(
        tiled(whole, (2, 3))[sum(placement.local_units[: rank.rank]) :][: placement.local_units[rank.rank]],
        mesh,
        [placement],
        shape=whole.shape,
        stride=whole.stride(),
    )
    assert torch.equal(tensor.full_tensor(), whole)
