"""Orders decide which of the waiting groups a trainer gets next."""

from __future__ import annotations

from redrb.stream.orders.builtin import (
    ByAdmission,
    Fifo,
    Freshest,
    Lifo,
    Prioritized,
    Priority,
    Stalest,
    Uniform,
    ignores_priority,
    known_order,
    order_named,
)
from redrb.stream.orders.order import GroupFacts, Order, Score, check_order, checked_score

__all__ = [
    "ByAdmission",
    "Fifo",
    "Freshest",
    "GroupFacts",
    "Lifo",
    "Order",
    "Prioritized",
    "Priority",
    "Score",
    "Stalest",
    "Uniform",
    "check_order",
    "checked_score",
    "ignores_priority",
    "known_order",
    "order_named",
]
