"""Damaged and hostile files are refused by name, and nothing in them runs: a third of the cases."""

import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from ragged_fsdp.checkpoint.reading import CheckedReader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.faults.hostile import Mark, cases, make_whole, open_checkpoint, try_case


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    make_whole(folder)
    return folder


@pytest.mark.parametrize("start", range(3))
def test_a_sample_of_the_cases_is_refused(wholes, tmp_path, start):
    """Three of nine parts of them."""
    chosen = [(seed, case) for seed, case in enumerate(cases()) if seed % 9 == start]
    results = {case.name: try_case(case, tmp_path / "try", wholes, seed) for seed, case in chosen}
    assert set(results.values()) == {"refused"}, results


def test_what_is_whole_is_taken(wholes):
    """Else the cases above would be refused for another reason."""
    for case in {case.whole: case for case in cases()}.values():
        case.open(wholes / case.whole)
    state = open_checkpoint(wholes / "checkpoint")
    assert state["optim.betas"] == (0.9, 0.95) and state["model.a"].shape == (64, 8)


def test_the_marks_of_the_cases_work(tmp_path):
    """torch's own reader runs what ours refuses."""
    torch.save(Mark(tmp_path / "mark"), tmp_path / "file")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        torch.load(tmp_path / "file", weights_only=True)
    assert not (tmp_path / "mark").exists()
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "mark").exists()


def test_an_index_of_any_layout_is_read(tmp_path):
    """Files per tensor, nested lists and a path as the checkpoint's name: all that dcp.save itself writes."""
    state = {
        "a": torch.ones(3),
        "list": [torch.zeros(2), {"x": 1}],
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    writer = dcp.FileSystemWriter(Path(tmp_path), single_file_per_rank=False)
    dcp.save(state, checkpoint_id=Path(tmp_path), storage_writer=writer, no_dist=True)
    assert set(CheckedReader(tmp_path).read_metadata().state_dict_metadata) == {
        "a",
        "list.0",
        "list.1.x",
        "half",
    }


@pytest.mark.parametrize(
    ("offsets", "sizes", "shape"),
    [
        ([(0, 0), (0, 0)], [(4, 2), (4, 2)], (4, 4)),
        ([(0, 0), (1, 1), (3, 0)], [(3, 4), (1, 3), (1, 1)], (4, 4)),
    ],
)
def test_pieces_that_overlap_leave_others_out(tmp_path, offsets, sizes, shape):
    """As many elements as the tensor has, but not all of them: the rest would keep what was there."""
    dcp.save({"a": torch.ones(shape)}, checkpoint_id=tmp_path, no_dist=True)
    index = dcp.FileSystemReader(tmp_path).read_metadata()
    index.state_dict_metadata["a"].chunks = [
        ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in zip(offsets, sizes)
    ]
    place = next(iter(index.storage_data.values()))
    index.storage_data = {MetadataIndex("a", torch.Size(at)): place for at in offsets}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"a of shape \(4, 4\) has pieces"):
        CheckedReader(tmp_path).read_metadata()
