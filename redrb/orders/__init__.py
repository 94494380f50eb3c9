"""Orders decide which of the waiting groups a trainer gets next."""

from __future__ import annotations

from redrb.orders.admission import ByAdmission
from redrb.orders.fifo import Fifo, Lifo
from redrb.orders.names import ignores_priority, known_order, order_named
from redrb.orders.order import GroupFacts, Order, Score, check_order, checked_score
from redrb.orders.priority import Prioritized, Priority, Uniform
from redrb.orders.versions import Freshest, Stalest

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
