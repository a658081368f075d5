"""The public issues of ``examples/pitfalls.py``: they show on stock FSDP2, and do not happen here."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from fsdp_inside import forget_warnings
from rank_pool import spmd

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/fsdp2-pitfalls.md").read_text()
BREAKS_ITS_GROUP = "a_tower_that_one_rank_does_not_run"
SHOWN_BY = "2.13"  # the release of torch that the page is about; another may have mended some


def _pitfalls():
    spec = importlib.util.spec_from_file_location("pitfalls", ROOT / "examples/pitfalls.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PITFALLS


@spmd(2)
def test_none_happens_here(rank):
    import ragged_fsdp

    forget_warnings()
    found = {name: show(ragged_fsdp) for name, show in _pitfalls().items()}
    assert not any(found.values()), found


@pytest.mark.skipif(not torch.__version__.startswith(SHOWN_BY), reason=f"the page is about torch {SHOWN_BY}")
@spmd(2)
def test_all_show_on_stock_fsdp2(rank):
    """But for the one that hangs, and leaves a broken process group: the script shows it."""
    import torch.distributed.fsdp as stock

    found = {name: show(stock) for name, show in _pitfalls().items() if name != BREAKS_ITS_GROUP}
    assert all(found.values()), found


def test_the_page_lists_all_of_them():
    pitfalls = _pitfalls()
    assert len(pitfalls) >= 12
    listed = re.findall(r"`([a-z0-9_]+)` \|", PAGE)
    assert listed == list(pitfalls)
    for name, show in pitfalls.items():
        for issue in re.findall(r"([\w.-]+/[\w.-]+)?#(\d+)", show.__doc__):
            assert issue[1] in PAGE, f"{name}: {issue}"
