"""The picture of README is drawn from layouts that are computed, and shows what its captions say."""

import importlib.util
import sys

from docs_blocks import ROOT

FIGURES = ROOT / "docs" / "figures"


def _module():
    spec = importlib.util.spec_from_file_location("ragged_picture", FIGURES / "ragged_picture.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_that_of_the_code():
    module = _module()
    assert (FIGURES / "ragged.svg").read_text() == module.draw(), "run docs/figures/ragged_picture.py"
    ours, theirs = module.ragged_shards(), module.fsdp2_shards()
    assert not any(row == module.PAD for shard in ours for row in shard)
    homes = [{rank for rank, shard in enumerate(ours) if module.Row("E", e) in shard} for e in range(2)]
    assert all(len(ranks) == 1 for ranks in homes)
    cut = [{rank for rank, shard in enumerate(theirs) if module.Row("E", e) in shard} for e in range(2)]
    assert all(len(ranks) == 2 for ranks in cut)
    gathered = [row for shard in ours for row in shard]
    assert gathered == sorted(gathered, key=lambda row: ("EAB".index(row.tensor), row.block))
