"""Triton kernels of the FP8 products: quantising in both orientations, transposing codes, grouped products.

All work on rows that are grouped by expert, in tiles that a table names
(:class:`~ragged_fsdp.fp8.groups.Groups`); a linear layer is one group. None asks the device for the sizes
of the groups.

=============  ============================================================================
``quantizing``  tiles of values to codes, as they lie and turned; the table of tiles
``turning``     matrices of codes with their dims the other way round, from rows or from tiles
``multiplying`` rows times the matrix of their group, as it lies or transposed
``gradients``   sums over the rows of each group
=============  ============================================================================
"""

from ragged_fsdp.fp8.kernels.gradients import weight_gradient
from ragged_fsdp.fp8.kernels.launching import Config
from ragged_fsdp.fp8.kernels.multiplying import lying_product, product
from ragged_fsdp.fp8.kernels.quantizing import groups_of, quantize
from ragged_fsdp.fp8.kernels.turning import transpose, untile

__all__ = [
    "Config",
    "groups_of",
    "lying_product",
    "product",
    "quantize",
    "transpose",
    "untile",
    "weight_gradient",
]
