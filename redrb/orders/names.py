"""The built-in orders by name: a new order is added here."""

from __future__ import annotations

import re

from redrb.errors import ConfigError
from redrb.orders.admission import ByAdmission
from redrb.orders.fifo import Fifo, Lifo
from redrb.orders.order import Order
from redrb.orders.priority import Prioritized, Priority, Uniform
from redrb.orders.versions import Freshest, Stalest

_ORDERS: dict[str, Order] = {
    order.name: order
    for order in (Fifo(), Lifo(), Stalest(), Freshest(), Priority(), Uniform(), ByAdmission())
}
_PRIORITIZED = re.compile(r"prioritized(?:\(([0-9.e+-]{1,12})\))?")


def known_order(name: str) -> Order | None:
    """Return the built-in order with this name; None if there is none."""
    matched = _PRIORITIZED.fullmatch(name)
    if matched is None:
        return _ORDERS.get(name)
    try:
        return Prioritized() if matched[1] is None else Prioritized(float(matched[1]))
    except ValueError:
        return None


def order_named(name: str) -> Order:
    """Return the built-in order with this name; raises ConfigError if there is none."""
    order = known_order(name)
    if order is None:
        known = ", ".join(sorted([*_ORDERS, "prioritized"]))
        raise ConfigError(f"unknown order {name!r}: use one of {known}, or an Order object.")
    return order


def ignores_priority(order: Order | None) -> bool:
    """Return whether an order does not depend on priorities; False if that is unknown."""
    return isinstance(order, Fifo | Lifo | Stalest | Freshest | Uniform | ByAdmission)
