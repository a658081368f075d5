"""Brings each matrix of sharded parameters to one rank, lets an optimizer work on it, brings the result back.

::

    every rank     ``collect``: its own elements, written where they are sent from
    all-to-all     each slab to its root                             (packed: one per bucket)
    root           ``work`` on whole matrices, equal shapes as one batch
    all-to-all     each result to the ranks that hold the parameter  (packed: one per bucket)
    every rank     ``apply``: the results to its own elements

The exchange knows shards, ranks and buffers; what is computed belongs to the optimizer, which passes an
object with these three methods (:class:`MatrixWork`) and a cost by which the work is divided::

    exchanges = Exchanges("MyOptimizer", cost=lambda rows, columns: rows * columns, dtype=torch.float32)
    for exchange in exchanges.bind([Member(name, p) for name, p in model.named_parameters() if p.ndim > 1]):
        exchange.run(MyWork(exchange.parameters))

Read in this order: ``matrices`` (which a parameter has, and who stores what of them), ``plan`` (who works on
which, and when), ``program`` (what one rank sends, keeps and receives), ``run`` (the transfers), ``members``
(from parameters and their placements to exchanges).
"""

from ragged_fsdp.optim.exchange.matrices import Flattened, Fused, MatrixRule
from ragged_fsdp.optim.exchange.members import Exchanges, Member
from ragged_fsdp.optim.exchange.program import BatchKind, Link, Links, MatrixId
from ragged_fsdp.optim.exchange.run import Exchange, MatrixWork

__all__ = [
    "BatchKind",
    "Exchange",
    "Exchanges",
    "Flattened",
    "Fused",
    "Link",
    "Links",
    "MatrixId",
    "MatrixRule",
    "MatrixWork",
    "Member",
]
