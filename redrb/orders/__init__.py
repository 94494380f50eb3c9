"""Orders: which of the waiting groups a trainer gets next. They stand beside the storage."""

from __future__ import annotations

from typing import Protocol

from redrb.errors import ConfigError
from redrb.orders.fifo import Fifo

__all__ = ["Fifo", "Order", "order_named"]


class Order(Protocol):
    """A policy that chooses among the waiting groups of a task."""

    @property
    def name(self) -> str:
        """What users type, and what the task remembers."""


_ORDERS: dict[str, Order] = {order.name: order for order in (Fifo(),)}


def order_named(name: str) -> Order:
    """Return the order that users call `name`.

    Raises:
        ConfigError: There is none of that name.
    """
    try:
        return _ORDERS[name]
    except KeyError:
        known = ", ".join(sorted(_ORDERS))
        raise ConfigError(f"unknown order {name!r}: use one of {known}.") from None
