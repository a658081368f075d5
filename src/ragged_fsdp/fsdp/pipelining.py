"""What ``torch.distributed.pipelining`` reads of FSDP2's private state to end the backward of a stage.

A stage runs the backward of each microbatch without reductions. Up to torch 2.13 it then asks torch's
``fully_shard`` for the state of its module, lets every parameter group in it reduce, and calls the end of
the backward. Later releases call ``finalize_backward``, which is all that happens here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed.fsdp
from torch import nn
from torch.distributed._composable.contract import STATE_KEY

if TYPE_CHECKING:
    from ragged_fsdp.fsdp.state import ModuleState

__all__ = ["register_stage"]

# the function under which torch keeps the state of a module that it sharded itself
_TORCH_KEY: Any = torch.distributed.fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]


class _StageState:
    """Answers to the names that pipelining uses: no groups to walk, and an end that does it all."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._state_ctx = self
        self.all_states: tuple[Any, ...] = ()

    def _root_post_backward_final_callback(self) -> None:
        self._state.root.finalize()
        self._state.root.finish_reductions()


def register_stage(module: nn.Module, state: ModuleState) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state`` find ``module``, should it become a stage."""
    module.__dict__[STATE_KEY][_TORCH_KEY] = _StageState(state)
