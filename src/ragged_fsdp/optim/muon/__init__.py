"""Muon: momentum orthogonalized by Newton-Schulz, for hidden matrices of sharded models.

::

    optimizer               Muon: param groups, options, state, the step
    rules                   which parameters are hidden matrices, the scale of their steps, AdamW for the rest
    passes                  momentum and weights around the iteration, element by element
    newton_schulz           the iteration: reference, torch's products, choice of the kernels
    reference               the distributed algorithm one tensor at a time: the oracle of the tests
    passes_kernel           the passes as Triton kernels
    newton_schulz_kernel    the iteration as Triton kernels

How matrices get to one rank and back is :mod:`ragged_fsdp.optim.exchange`.
"""

from ragged_fsdp.optim.muon.optimizer import Muon

__all__ = ["Muon"]
