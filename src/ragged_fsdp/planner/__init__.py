"""Lays the tensors of a group out in one buffer of equal shards, with as little padding as can be.

Needs no torch. ``plan_group`` is what the runtime calls; ``plan`` is the same on plain integers.
"""

from ragged_fsdp.layout import GroupLayout, LocalRange, TensorSpec
from ragged_fsdp.planner.group import bound_group, plan, plan_group
from ragged_fsdp.planner.orders import ORDERS, Order, register_order
from ragged_fsdp.planner.split import SPLIT_THRESHOLD, plan_buffers

__all__ = [
    "ORDERS",
    "SPLIT_THRESHOLD",
    "GroupLayout",
    "LocalRange",
    "Order",
    "TensorSpec",
    "bound_group",
    "plan",
    "plan_buffers",
    "plan_group",
    "register_order",
]
