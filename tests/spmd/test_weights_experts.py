"""Weights in and out of models whose experts are spread over ranks: the ordinary files and names."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import experts_cases as cases
from ragged_fsdp import fully_shard, weights
from ragged_fsdp.experts import ExpertSplit, expert_parallel
from ragged_fsdp.weights import spans
from rank_pool import spmd


def _spread(family, mesh, everyone, split=None):
    """The model without its weights, spread and sharded."""
    model = cases.build(family, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    expert_parallel(model, mesh["ep"], split=split)
    cases.shard(model, mesh["dp"], everyone, everyone.size(), fully_shard)
    return model


@pytest.mark.parametrize("family", [f for f in cases.FAMILIES if f != "ours"])
@spmd(3, 4)
def test_experts_on_many_ranks_load_and_stream_the_ordinary_folder(rank, family):
    """Five experts on 3 ranks, on 2 beside data parallelism, and uneven: each rank reads its own."""
    reference = cases.build(family, torch.float32)
    folder = rank.shared_dir / "folder"
    if rank.rank == 0:
        reference.save_pretrained(folder)
    dist.barrier()
    stored = load_file(folder / "model.safetensors")
    dp = rank.world_size // 3 if rank.world_size == 3 else 2
    mesh = rank.mesh(dp, rank.world_size // dp, names=("dp", "ep"))
    whole = reference.state_dict()
    for split in (None, ExpertSplit((0, 5) if rank.world_size == 4 else (3, 0, 2))):
        model = _spread(family, mesh, rank.mesh(), split)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans, "GAP_BYTES", 0)  # or short gaps between these short runs would be read too
            report = weights.load(model, folder)
        assert report.missing == report.unexpected == ()
        for name, value in model.state_dict().items():
            assert torch.equal(
                value.full_tensor() if hasattr(value, "full_tensor") else value, whole[name]
            ), name
        read = torch.tensor(report.bytes_read)
        dist.all_reduce(read)
        everywhere = sum(b.nbytes for n, b in whole.items() if "bias" in n and "correction" in n)
        assert read == sum(t.nbytes for t in stored.values()) + (rank.world_size - 1) * everywhere
        got = {name: value.clone() for name, value in weights.stream(model).tensors()}
        assert got.keys() == stored.keys()
        assert all(torch.equal(got[name], value) for name, value in stored.items())
