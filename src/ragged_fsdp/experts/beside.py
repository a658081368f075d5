"""A shared expert that is computed while rows travel to the others, without another forward for the model.

Models call their experts and then the shared one, on the same tokens, and add the two::

    routed = self.experts(tokens, chosen, weights)
    return routed + self.shared_experts(tokens)

Inside the first call, once rows are on their way, the shared expert is called on those tokens; the model's
own call then gets what was computed. A model that calls it first, or on something else, goes on as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ragged_fsdp.fsdp.autograd import in_backward
from ragged_fsdp.torch_internals import version_of

__all__ = ["SharedBeside"]


class SharedBeside:
    """The shared expert of one layer: what was computed ahead of the model's own call."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._forward = module, module.forward
        self._ahead: tuple[Tensor, tuple[Any, ...], Tensor] | None = None
        """Tokens, their state then and their output, until the model's call takes it."""
        self._is_wanted = True
        """Whether the model calls it after the experts, on their tokens."""
        self._was_recomputed = False
        module.forward = self.forward  # type: ignore[method-assign]

    def work(self, tokens: Tensor) -> Callable[[], None] | None:
        """What is to be done while the rows of ``tokens`` travel; None if the model would not use it."""
        if self._ahead is not None and not self._was_recomputed:  # recomputing may end before the call
            self._is_wanted = False
        self._ahead = None
        # one that is sharded by itself is gathered by its own call, not yet here
        usable = self._is_wanted and not isinstance(self._module, FSDPModule)
        return (lambda: self._compute(tokens)) if usable else None

    def _compute(self, tokens: Tensor) -> None:
        self._was_recomputed = in_backward()
        self._ahead = (tokens, _state_of(tokens), self._forward(tokens))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's call."""
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and len(args) == 1 and not kwargs and _is_same(args[0], *ahead[:2]):
            return ahead[2].view(*args[0].shape[:-1], ahead[2].shape[-1])
        self._is_wanted = False
        return self._forward(*args, **kwargs)


def _state_of(tokens: Tensor) -> tuple[Any, ...]:
    """What an output depends on beside the elements: whether gradients go back, and writes until now."""
    version = None if tokens.is_inference() else version_of(tokens)
    return torch.is_grad_enabled(), tokens.requires_grad, version


def _is_same(given: Any, tokens: Tensor, state: tuple[Any, ...]) -> bool:
    """Whether these are the same elements in the same state, in another shape at most."""
    return (
        isinstance(given, Tensor)
        and given.numel() == tokens.numel()
        and given.shape[-1:] == tokens.shape[-1:]
        and given.data_ptr() == tokens.data_ptr()
        and given.is_contiguous()
        and _state_of(given) == state
    )
