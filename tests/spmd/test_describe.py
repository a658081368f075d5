"""``describe``: the table and its numbers are those of the tensors, in every state of a model."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from rank_pool import spmd


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 24, bias=False)
        self.down = nn.Linear(24, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def _model():
    return nn.Sequential(*(_Layer() for _ in range(3)), nn.Linear(8, 5))


@spmd(1, 3)
def test_numbers_are_those_of_the_tensors(rank):
    from ragged_fsdp import Rows, describe, fully_shard

    model = _model()
    model[3].weight.requires_grad_(False)
    for layer in model[:3]:
        fully_shard(
            layer,
            mesh=rank.mesh(),
            orig_param_policy=lambda name, p: Rows(4) if name == "up.weight" else None,
        )
    fully_shard(model, mesh=rank.mesh(), ignored_params={model[3].bias})
    before = describe(model)
    text = str(before)
    assert [len(group.tensors) for group in before.groups] == [1, 3, 3, 3]
    shards = {n: p for n, p in model.named_parameters() if n != "3.bias"}
    lines = {tensor.name: tensor for group in before.groups for tensor in group.tensors}
    assert lines.keys() == shards.keys() and before.others == (("3.bias", 20),)
    for name, shard in shards.items():
        line = lines[name]
        assert line.shape == tuple(shard.shape) and line.parts[rank.rank] == shard.to_local().numel(), name
        assert line.placements == shard.placements and sum(line.parts) == shard.numel()
    assert lines["0.up.weight"].stays_together == "4 rows"
    assert before.rank_bytes >= sum(shard.to_local().nbytes for shard in shards.values())
    assert before.padding_ratio >= 0
    assert "0 .. 2 " in text and "0 .. 2.up.weight" in text and "total" in text
    assert "1 parameter is in no group: 20 B on this rank, such as 3.bias" in text
    assert max(map(len, text.splitlines())) <= 80
    shown = before._repr_html_()
    assert shown.count("<table>") == 2 and "<td" in shown and "0 .. 2.up.weight" in shown
    model(torch.ones(2, 8)).sum()  # the root stays gathered
    assert describe(model) == before


@spmd(2)
def test_explicit_shards_and_plain_models(rank):
    from ragged_fsdp import describe, fully_shard

    model = fully_shard(_Layer(), mesh=rank.mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    (group,) = describe(model).groups
    assert group.rank_bytes == sum(p.to_local().nbytes for p in model.parameters())
    assert {t.name: t.shares for t in group.tensors}["up.weight"] == "50 50"
    plain = describe(_model())
    assert not plain.groups
    assert str(plain).startswith("11 parameters are in no group") and plain.padding_ratio is None
    assert str(describe(nn.Identity())) == "the model has no parameters"
    with pytest.raises(TypeError, match=r"describe: model must be an nn.Module, got 3"):
        describe(3)
