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
