"""Where the weights of each layer are in every moment of a step: sharded or whole, allocated or not."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collective_calls import count, noted
from fsdp_cases import (
    GatheredMemory,
    Transformer,
    assert_same,
    average_gradients,
    backward_both,
    build,
    full,
    fully_shard,
    is_sharded,
    ragged_only,
    shard_blocks,
    tokens,
)
from rank_pool import Rank, spmd

pytestmark = ragged_only
LAYERS = 5


class Diary:
    """The state of all layers in each moment, a letter per layer.

    ``s``: sharded, with nothing allocated. ``a``: gathered ahead of its use, or kept from the last one, with
    the sharded parameters registered. ``w``: whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = model.layers
        self.pages: list[tuple[str, str]] = []
        self._memory = GatheredMemory(*model.layers)
        for index, layer in enumerate(model.layers):
            layer.mlp.up.register_forward_hook(lambda m, args, out, index=index: self._in_forward(index, out))

    def _in_forward(self, index: int, out: torch.Tensor) -> None:
        self.note(f"forward of {index}")
        if out.requires_grad:
            out.register_hook(lambda _: self.note(f"backward of {index}"))

    def note(self, moment: str) -> None:
        """Write down where the layers are."""
        letters = ""
        for layer in self.layers:
            if not self._memory.was_used(layer):
                letters += "?"
            elif is_sharded(layer.parameters()):
                letters += "a" if self._memory.nbytes(layer) else "s"
            else:
                letters += "w"
        self.pages.append((moment, letters))


FIRST, MIDDLE, LAST = range(3)
MOMENTS = ["forward of 0", "forward of 1", "forward of 2", "after forward"]
MOMENTS += ["backward of 2", "backward of 1", "backward of 0", "after backward"]
STEPS = {  # from the second step on, when the order of the layers is known: the next one is gathered ahead
    "True": (True, "was swa ssw sss saw aws wss sss"),
    "False": (False, "was wwa www www www wws wss sss"),
    "None": (None, "was swa saw saa saw aws wss sss"),  # backward starts with the last two
    "2": (2, "was swa ssw sss saw aws wss sss"),  # what is kept is a larger shard, not the whole
}


@spmd(4)
@pytest.mark.parametrize("name", STEPS)
def test_every_moment_of_a_step(rank: Rank, name: str) -> None:
    reshard, expected = STEPS[name]
    model, _ = build(lambda: Transformer(layers=3), rank.device)
    shard_blocks(model, mesh=rank.mesh(), reshard_after_forward=reshard)
    diary = Diary(model)
    for step in range(3):
        diary.pages.clear()
        loss = model(tokens(rank, step))
        diary.note("after forward")
        with noted() as notes:
            loss.backward()
        diary.note("after backward")
        if step:
            assert diary.pages == list(zip(MOMENTS, expected.split())), diary.pages
        sizes = {call.group.size() for call in notes.of("gather")}
        assert sizes == ({2} if reshard == 2 else {4} if sizes else set())
    diary.pages.clear()
    with torch.no_grad():
        model(tokens(rank, 0))
    diary.note("after forward")
    # no backward follows, so that nothing is kept for it
    without = "was wwa www www" if reshard is False else "was swa ssw sss"
    assert diary.pages == list(zip(MOMENTS, without.split())), diary.pages


@spmd(2)
def test_moments_that_the_user_chooses(rank: Rank) -> None:
    model, _ = build(lambda: Transformer(layers=3), rank.device)
    shard_blocks(model, mesh=rank.mesh(), reshard_after_forward=True)
    diary, first = Diary(model), model.layers[FIRST]
    for step in range(2):
        model(tokens(rank, step)).backward()

    def now() -> str:
        diary.note("now")
        return diary.pages.pop()[1]

    handle = first.unshard(async_op=True)
    assert now() == "ass"
    handle.wait()
    assert now() == "wss"
    first.reshard()
    assert now() == "sss"
    first.set_modules_to_forward_prefetch([model.layers[MIDDLE], model.layers[LAST]])
    model.layers[LAST].set_modules_to_backward_prefetch([model.layers[MIDDLE], first])
    model.layers[MIDDLE].set_reshard_after_backward(False)
    diary.pages.clear()
    model(tokens(rank, 2)).backward()
    assert [letters for _, letters in diary.pages] == ["waa", "swa", "ssw", "aaw", "aws", "wws"]
    assert now() == "sws"


@pytest.mark.parametrize("kept", [2, 3])
@spmd(2)
def test_the_end_of_the_forward_stays_gathered(rank: Rank, kept: int) -> None:
    """From the second step on backward does not gather its first two groups again, or as many as fit."""
    model, reference = build(lambda: Transformer(layers=LAYERS), rank.device)
    layer_bytes = 4 * sum(p.numel() for p in reference.layers[0].parameters())
    budget = {"reshard_after_forward": "auto", "gathered_budget_bytes": int(3.5 * layer_bytes)}
    shard_blocks(model, mesh=rank.mesh(), **(budget if kept == 3 else {}))
    memory = GatheredMemory(*model.layers)
    for step in range(3):
        loss, forward = count(lambda step=step: model(tokens(rank, step)))
        held = [memory.nbytes(layer) > 0 for layer in model.layers]
        now = kept if step else 0
        assert held == [False] * (LAYERS - now) + [True] * now
        assert is_sharded(model.layers.parameters())  # what is kept is not registered
        _, backward = count(loss.backward)
        assert (forward["gather"], backward["gather"]) == (LAYERS + 1, LAYERS - now)
        assert not any(memory.nbytes(layer) for layer in model.layers)
        reference(tokens(rank, step)).backward()
    average_gradients(reference)
    assert_same(model, reference, tolerance=1e-6, grads=True)
    with pytest.raises(ValueError, match="go together"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward="auto")
    with pytest.raises(ValueError, match="must be an int >= 0"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward="auto", gathered_budget_bytes=-1)


def _after_two_steps(rank: Rank) -> tuple[nn.Module, nn.Module, GatheredMemory]:
    """A model whose next forward keeps its last layers."""
    model, reference = build(lambda: Transformer(layers=3), rank.device)
    shard_blocks(model, mesh=rank.mesh())
    memory = GatheredMemory(*model.layers)
    for step in range(2):
        model(tokens(rank, step)).backward()
    model.zero_grad()
    return model, reference, memory


@spmd(2)
def test_kept_data_is_dropped_if_no_backward_follows(rank: Rank) -> None:
    """A change of parameters must be seen by the next forward."""
    model, reference, memory = _after_two_steps(rank)
    before = model(tokens(rank, 0))
    assert memory.nbytes(model.layers[-1]) and is_sharded(model.layers[-1].parameters())
    model.reshard()  # the root stays unsharded after forward, as in FSDP2
    with torch.no_grad():
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.mul_(0.5)
    after = model(tokens(rank, 0))
    torch.testing.assert_close(after, reference(tokens(rank, 0)))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("how", ["no_grad forward", "reshard", "state_dict", "cast"])
@spmd(2)
def test_what_gives_kept_data_up(rank: Rank, how: str) -> None:
    model, _, memory = _after_two_steps(rank)
    model(tokens(rank, 0))
    last = model.layers[-1]
    assert memory.nbytes(last)
    if how == "no_grad forward":
        with torch.no_grad():
            _, seen = count(lambda: model(tokens(rank, 1)))
        assert seen["gather"] == 3  # of all layers; the root is still gathered
    elif how == "reshard":
        last.reshard()
    elif how == "state_dict":
        model.state_dict()
    else:
        model.double()
    assert not memory.nbytes(last)
    assert is_sharded(last.parameters())


@pytest.mark.parametrize("how", ["as sharded", "moved", "assigned"])
@spmd(1, 2)
def test_an_optimizer_step_makes_what_an_evaluation_gathered_old(rank: Rank, how: str) -> None:
    """Also of parameters that ``Module.to`` or a state dict has made anew since ``fully_shard``."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh())
    if how == "moved":
        model.to(rank.device)
    elif how == "assigned":
        copies = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(copies, assign=True)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, reference)]
    for step in range(2):
        backward_both(model, reference, tokens(rank, step))
        with torch.no_grad():
            model(tokens(rank, step))  # the root stays gathered
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(model(tokens(rank, 9)), reference(tokens(rank, 9)))


@spmd(2)
def test_data_kept_for_a_backward_is_not_taken_for_the_present(rank: Rank) -> None:
    model, _, _ = _after_two_steps(rank)
    parameters = list(model.parameters())
    model(tokens(rank, 0)).backward()
    assert all(p.grad is not None for p in parameters)
    loss = model(tokens(rank, 0))
    layer = model.layers[-1]
    with torch.no_grad():
        layer.mlp.up.weight.mul_(0.5)
    expected = full(layer.mlp.up.weight)
    layer.unshard()
    assert torch.equal(layer.mlp.up.weight, expected)
    model.zero_grad()  # the root is still gathered: the sharded gradients must go all the same
    assert all(p.grad is None for p in parameters)
    loss.backward()
    assert all(p.grad is not None for p in parameters)


@spmd(8, timeout=60)
def test_larger_shards_on_a_mesh_of_some_ranks(rank: Rank) -> None:
    """The stages of a pipeline, or what is beside tensor parallelism: the others make no groups for these."""
    for mesh in (
        rank.mesh(2, 4, names=("stage", "shard"))["shard"],
        rank.mesh(4, 2, names=("shard", "other"))["shard"],
    ):
        model, reference = build(Transformer, rank.device)
        shard_blocks(model, mesh=mesh, reshard_after_forward=2)
        for step in range(2):
            loss = model(tokens(rank, step))
            with noted() as notes:
                loss.backward()
            reference(tokens(rank, step)).backward()
        average_gradients(reference, mesh.get_group())
        assert_same(model, reference, tolerance=1e-6, grads=True)
        first = mesh.get_group().rank() // 2 * 2
        own = mesh.mesh[first : first + 2].tolist()
        assert all(dist.get_process_group_ranks(call.group) == own for call in notes.of("gather"))
