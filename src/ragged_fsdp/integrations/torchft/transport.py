"""torchft's way from one replica to another, over :mod:`ragged_fsdp.replicas.transport`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torchft.checkpointing.transport import CheckpointTransport

from ragged_fsdp.replicas.copies import Copies
from ragged_fsdp.replicas.state import Offer
from ragged_fsdp.replicas.transport import HealingError, Received, StateServer, receive

__all__ = ["StateTransport"]

_KEY = "default"
"""Under which a manager keeps the state of its constructor's functions."""


class StateTransport(CheckpointTransport[dict[str, Any]]):
    """Serves what this rank offers, and receives what ``copies`` need; torchft's counters go along."""

    def __init__(
        self, copies: Copies, token: bytes, host: str, timeout_s: float, device: torch.device
    ) -> None:
        self._copies, self._token, self._pin = copies, token, device.type == "cuda"
        self._server = StateServer(token, host, timeout_s, device)

    # -- between ranks of two replicas -----------------------------------------------------------

    def offer(self, step: int, offer: Offer | str, counters: dict[str, int]) -> str:
        """Let peers copy the state of ``step`` until the vote on it; the address where they find it."""
        if isinstance(offer, Offer):
            offer.header["counters"] = counters
        self._server.offer(step, offer)
        return self._server.address

    def receive(self, address: str, step: int, seconds: float) -> tuple[Received, dict[str, int]]:
        """The state that a peer offers for ``step``, and its counters; what went wrong is noted too."""
        try:
            received = receive(address, self._token, step, seconds, self._copies.check, pin_memory=self._pin)
        except HealingError as failure:
            self._copies.failed(failure)
            raise
        counters = received.header["counters"]
        return received, {key: int(counters[key]) for key in ("step", "batches_committed")}

    # -- as torchft's manager calls it -----------------------------------------------------------

    def metadata(self) -> str:
        return self._server.address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        self.offer(step, state_dict["user"][_KEY], state_dict["torchft"])

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        received, counters = self.receive(metadata, step, timeout.total_seconds())
        return {"user": {_KEY: received}, "torchft": counters}

    def disallow_checkpoint(self) -> None:
        self._server.withdraw()

    def shutdown(self, wait: bool = True) -> None:
        self._server.close()
