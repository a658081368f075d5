"""State that comes and goes on streams of its own is used, and its memory goes, behind its copies."""

from typing import Any

import pytest
import torch
from torch import nn

from ordered_streams import OrderedStreams
from ragged_fsdp.optim import AdamW8bit, FusedAdamW, offload_state
from ragged_fsdp.optim.offload.lanes import Lane

OPTIMIZERS = (torch.optim.AdamW, FusedAdamW, AdamW8bit)


def _train(kind: Any) -> None:
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    optimizer = offload_state(kind(net.parameters(), lr=1e-2), part_numel=300)
    for step in range(3):
        net(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())


def _give_streams(patch: pytest.MonkeyPatch, streams: OrderedStreams) -> None:
    init = Lane.__init__

    def with_streams(self: Lane, device: torch.device) -> None:
        init(self, device)
        self._module = streams
        self._inward, self._outward = (streams.named_stream(name) for name in ("inward", "outward"))

    patch.setattr(Lane, "__init__", with_streams)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_two_uses_of_memory_have_an_order(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = OrderedStreams()
    _give_streams(monkeypatch, streams)
    with streams.install(monkeypatch):
        _train(kind)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_copies_that_nobody_waits_for_are_found(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above can fail."""
    streams = OrderedStreams()
    _give_streams(monkeypatch, streams)
    monkeypatch.setattr(Lane, "_wait", lambda self, event: None)
    with streams.install(monkeypatch), pytest.raises(AssertionError, match="did not wait for"):
        _train(kind)
