"""Adam and AdamW whose moments are 8-bit codes with one scale per block.

::

    optimizer    Adam8bit, AdamW8bit: which parameters have codes, their state, and the step
    reference    the update in plain tensor operations: the CPU's, and what the kernel must equal bit by bit
    codes        the 8-bit map, rounding, and the numbers that round at random
    launch       tables of addresses, one launch for many parameters
    kernel       the update as a Triton kernel

Which blocks a parameter has is in :mod:`ragged_fsdp.optim.blocks`.
"""

from ragged_fsdp.optim.adam8bit.optimizer import Adam8bit, AdamW8bit

__all__ = ["Adam8bit", "AdamW8bit"]
