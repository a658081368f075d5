"""Lays the tensors of a group out in one buffer of equal shards, with as little padding as can be.

Needs no torch. ``plan_group`` is what the runtime calls; ``plan`` answers on plain integers. From the ground
up: ``problem`` (what is asked, whether an order fits, orders by name), ``bounds`` (which sizes can work),
``mixing`` (the best order at one size), ``search`` (the smallest size), ``group`` (the entry points).
"""

from ragged_fsdp.layout import GroupLayout, LocalRange, TensorSpec
from ragged_fsdp.planner.group import (
    SPLIT_THRESHOLD,
    bound_group,
    fullest_numel,
    plan,
    plan_buffers,
    plan_group,
    split_trainable,
)
from ragged_fsdp.planner.problem import ORDERS, Order, register_order

__all__ = [
    "ORDERS",
    "SPLIT_THRESHOLD",
    "GroupLayout",
    "LocalRange",
    "Order",
    "TensorSpec",
    "bound_group",
    "fullest_numel",
    "plan",
    "plan_buffers",
    "plan_group",
    "register_order",
    "split_trainable",
]
