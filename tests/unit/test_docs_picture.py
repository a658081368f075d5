"""The picture of README is drawn from layouts that are computed, and shows what its captions say."""

from docs_blocks import PICTURES, picture_script


def test_the_picture_is_that_of_the_code():
    module = picture_script("ragged_picture")
    assert (PICTURES / "ragged.svg").read_text() == module.draw(), "run docs/pictures/ragged_picture.py"
    ours, theirs = module.ragged_shards(), module.fsdp2_shards()
    assert not any(row == module.PAD for shard in ours for row in shard)
    homes = [{rank for rank, shard in enumerate(ours) if module.Row("E", e) in shard} for e in range(2)]
    assert all(len(ranks) == 1 for ranks in homes)
    cut = [{rank for rank, shard in enumerate(theirs) if module.Row("E", e) in shard} for e in range(2)]
    assert all(len(ranks) == 2 for ranks in cut)
    gathered = [row for shard in ours for row in shard]
    assert gathered == sorted(gathered, key=lambda row: ("EAB".index(row.tensor), row.block))


def test_the_picture_of_experts_is_that_of_the_code():
    """Rows are ordered as the dispatcher orders them, and none is lost or on a rank without its expert."""
    import torch

    from ragged_fsdp.experts.permute import order

    module = picture_script("experts_picture")
    assert (PICTURES / "experts.svg").read_text() == module.draw(), "run docs/pictures/experts_picture.py"
    for rank, chosen in enumerate(module.CHOSEN):
        numbers = [[module.number(expert) for expert in both] for both in chosen]
        row_of, _ = order(torch.tensor(numbers), 6)
        assert [module.slots(rank)[slot] for slot in row_of.argsort().tolist()] == module.ordered(rank)
        held = range(module.SPLIT.first[rank], module.SPLIT.first[rank] + module.SPLIT.held[rank])
        assert {slot.expert for slot in module.arrived(rank)} <= set(held)
    everywhere = [slot for rank in range(3) for slot in module.arrived(rank)]
    assert len(everywhere) == len(set(everywhere)) == sum(len(module.slots(rank)) for rank in range(3))
