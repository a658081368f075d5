"""Lays the tensors of a group out in one buffer of equal shards, with as little padding as can be."""

from ragged_fsdp.planner.group import plan, plan_group
from ragged_fsdp.planner.orders import ORDERS, Order, register_order

__all__ = ["ORDERS", "Order", "plan", "plan_group", "register_order"]
