"""Which bytes a save copies, and that the copies have the shapes and values of what was copied."""

from collections import namedtuple

import numpy
import torch

from ragged_fsdp.checkpoint.staging import HostStaging, _same_view, _spans

Pair = namedtuple("Pair", "weights counts")


def _staged(tensors):
    """What a save would stage: every span copied at once, then cut into the tensors again."""
    found = {}
    for span in _spans(tensors):
        block = torch.empty(0, dtype=torch.uint8).set_(span.storage)[span.begin : span.end].clone()
        found.update({id(t): _same_view(t, block, span.begin) for t in span.members})
    return [found[id(t)] for t in tensors]


def test_a_buffer_is_copied_once_and_its_tensors_are_views_of_the_copy():
    buffer = torch.randn(1000)
    tensors = [buffer[3:103].view(10, 10), buffer[103:900], buffer[900:900], buffer[103:900]]
    (span,) = _spans(tensors)
    assert (span.begin, span.end) == (0, 3600)
    copies = _staged(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert len({c.untyped_storage().data_ptr() for c in copies}) == 1


def test_little_of_a_large_storage_is_copied_by_itself():
    buffer = torch.randn(100_000)
    tensors = [buffer[5:9], buffer[-3:], torch.randn(6, 4).t()]
    assert sum(span.end - span.begin for span in _spans(tensors)) < 300
    assert all(torch.equal(a, b) for a, b in zip(tensors, _staged(tensors), strict=True))


def test_dtypes_side_by_side_keep_their_places():
    raw = torch.arange(256, dtype=torch.uint8)
    tensors = [raw[3:40], raw[48:112].view(torch.float64), raw[40:48].view(torch.int16)]
    assert len(_spans(tensors)) == 1
    assert all(torch.equal(a, b) for a, b in zip(tensors, _staged(tensors), strict=True))


def test_host_tensors_are_copied_before_the_call_returns():
    weights, staging, counts = torch.ones(3), HostStaging(), numpy.ones(3)
    pair = Pair(weights, counts)
    copied = staging.copy({"a": weights, "list": [1, (weights,)], "none": None, "pair": pair})
    staging.before_update()
    weights.zero_()
    counts[:] = 0
    staging.wait()
    assert copied["a"].sum() == 3 and copied["list"][1][0].sum() == 3 and copied["none"] is None
    assert type(copied["pair"]) is Pair and [value.sum() for value in copied["pair"]] == [3, 3]
