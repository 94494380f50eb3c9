"""Settings that belong to a task: checked here, remembered in Redis."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from redrb.checks import check_choice, checked_int_or_none
from redrb.errors import ConfigError
from redrb.orders import Fifo, Order, check_order, known_order, order_named
from redrb.stream.task.rate import RateLimit
from redrb.stream.task.tags import declare_tags

Eviction: TypeAlias = Literal["oldest", "stalest", "last"]
OnExpired: TypeAlias = Literal["discard", "keep"]

_LEAST = {
    "limit": 0,
    "max_bytes": 0,
    "max_deliveries": 1,
    "max_staleness": 0,
    "max_token_staleness": 0,
    "max_reads": 0,
    "capacity": 1,
    "keep_groups": 1,
}
_PERIODS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_PERIOD = re.compile(r"(\d{1,9})([smhdw])")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """What somebody asks of a task; None: whatever it is. See `ExperienceStream`."""

    order: str | Order | None = None
    limit: int | None = None
    max_bytes: int | None = None
    max_deliveries: int | None = None
    max_staleness: int | None = None
    max_token_staleness: int | None = None
    on_expired: OnExpired | None = None
    max_reads: int | None = None
    capacity: int | None = None
    eviction: Eviction | None = None
    rate: RateLimit | None = None
    tags: Sequence[str] | None = None
    keep: str | None = None
    keep_groups: int | None = None

    def as_stored(self) -> dict[str, str]:
        """Return the settings that were given, checked, as Redis keeps them.

        Raises:
            ConfigError: One is not usable, or two contradict each other.
        """
        numbers = {
            name: checked_int_or_none(name, getattr(self, name), least)
            for name, least in _LEAST.items()
        }
        if self.on_expired is not None:
            check_choice("on_expired", self.on_expired, get_args(OnExpired))
        if self.eviction is not None:
            check_choice("eviction", self.eviction, get_args(Eviction))
        if self.capacity is not None and self.limit:
            raise ConfigError("give a limit (puts wait) or a capacity (puts evict), not both.")
        self._check_rate()
        stored = {name: str(value) for name, value in numbers.items() if value is not None}
        for name in ("on_expired", "eviction", "rate"):
            if getattr(self, name) is not None:
                stored[name] = str(getattr(self, name))
        if self.tags is not None:
            stored["tags"] = json.dumps(declare_tags(self.tags))
        if self.keep is not None:
            stored["keep_ms"] = str(_period_ms(self.keep))
        return {**stored, **self._stored_order(), **self._stored_index(stored)}

    def chosen_order(self, stored: str) -> Order | None:
        """Return the task's order; None where it is somebody's own that was not given here."""
        if self.order is not None and not isinstance(self.order, str):
            return self.order
        return known_order(stored or Fifo.name)

    def _check_rate(self) -> None:
        """Refuse a rate at which both sides would wait for ever."""
        rate, reads = self.rate, 1 if self.max_reads is None else self.max_reads
        if rate is None:
            return
        if not isinstance(rate, RateLimit):
            raise ConfigError(
                f"rate={rate!r}: make it with redrb.RateLimit, such as .ratio(4, ...)."
            )
        if math.isfinite(rate.max_diff) and reads and rate.samples_per_insert > reads:
            raise ConfigError(
                f"{rate.samples_per_insert:g} samples an insert cannot be read from groups that "
                f"are taken {reads} times: give max_reads=0 with a capacity, or more reads."
            )
        for name, most in (("limit", self.limit), ("capacity", self.capacity)):
            if most and rate.min_size > most:
                raise ConfigError(
                    f"min_size={rate.min_size} can never be stored with {name}={most}."
                )

    def _stored_order(self) -> dict[str, str]:
        if self.order is None:
            return {}
        order = order_named(self.order) if isinstance(self.order, str) else self.order
        check_order(order)
        own = known_order(order.name)
        if own is not None and type(own) is not type(order):
            raise ConfigError(
                f"an order of your own cannot be called {order.name!r}: redrb has one."
            )
        return {"order": order.name, "sampled": str(int(order.sampled))}

    def _stored_index(self, stored: Mapping[str, str]) -> dict[str, str]:
        """Return whether the task must keep facts and pools, which order fifo does without."""
        plain = {"limit", "max_bytes", "max_deliveries"}
        order = self._stored_order().get("order", Fifo.name)
        return {"indexed": "1"} if order != Fifo.name or stored.keys() - plain else {}


def _period_ms(text: str) -> int:
    matched = _PERIOD.fullmatch(text) if isinstance(text, str) else None
    if matched is None or int(matched[1]) == 0:
        raise ConfigError(f'keep={text!r}: write a period such as "90s", "30m", "12h" or "7d".')
    return int(matched[1]) * _PERIODS[matched[2]]
