"""`TaskSettings`: the settings of a task; their meaning, defaults, minimums and checks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from redrb.checks import check_choice, checked_int_or_none, checked_number
from redrb.errors import ConfigError
from redrb.orders import Fifo, Order, check_order, known_order, order_named
from redrb.stream.arguments import checked_period_ms
from redrb.stream.task.rate import UNREAD_FILL, RateLimit
from redrb.stream.task.tags import declare_tags

Eviction: TypeAlias = Literal["oldest", "stalest", "last"]
OnExpired: TypeAlias = Literal["discard", "keep"]

LEASE_MS = 30_000
"""Default of `lease_ms`, which belongs to a consumer and not to the task."""

LEAST_LEASE_MS = 100

NO_BOUND = 2**31
"""A `max_staleness` that no group reaches: versions are indexed to expire groups on demand only."""

DEFAULT_MAX_DELIVERIES = 5
DEFAULT_MAX_READS = 1
DEFAULT_MAX_DEAD = 1000

WIRE_FORMAT = 3
"""Version of the layout of a task in Redis."""

STORED_DEFAULTS = {
    "default_max_deliveries": str(DEFAULT_MAX_DELIVERIES),
    "default_max_reads": str(DEFAULT_MAX_READS),
    "default_max_dead": str(DEFAULT_MAX_DEAD),
}
"""Defaults that scripts need. A task keeps the defaults of the redrb version that created it."""

NUMBERS = {
    "limit": 0,
    "max_bytes": 0,
    "max_deliveries": 1,
    "max_dead": 0,
    "max_staleness": 0,
    "max_token_staleness": 0,
    "max_reads": 0,
    "capacity": 1,
    "keep_groups": 1,
    "partitions": 1,
}
"""Settings that are integers, and their smallest values."""

EXCLUDED_BY_ADMISSION = {"max_reads": 1, "capacity": None, "partitions": 1}
"""Settings that a task with `groups_per_version` cannot have, and the value that is allowed."""

MOST_PER_VERSION = 1e9

STORED_NAMES = (
    *(name for name in NUMBERS),
    *(
        "groups_per_version",
        "order",
        "sampled",
        "on_expired",
        "eviction",
        "rate",
        "tags",
        "keep_ms",
    ),
)
"""Names of all settings in Redis."""


class SettingArguments(TypedDict, total=False):
    """The fields of `TaskSettings` as keyword arguments of `ExperienceStream`."""

    order: str | Order | None
    limit: int | None
    max_bytes: int | None
    max_deliveries: int | None
    max_dead: int | None
    max_staleness: int | None
    max_token_staleness: int | None
    on_expired: OnExpired | None
    max_reads: int | None
    capacity: int | None
    eviction: Eviction | None
    rate: RateLimit | None
    tags: Sequence[str] | None
    keep: str | None
    keep_groups: int | None
    partitions: int | None
    groups_per_version: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """The settings of a task, which Redis remembers.

    A setting that is None is not compared: the task keeps the value that another process gave, or
    takes the default where nobody gave one. A setting that differs from the task's raises
    `TaskMismatch`.

    Attributes:
        order: Which groups are taken first: "fifo" (default), "lifo", "stalest", "freshest",
            "priority", "uniform", "prioritized", or an `Order` object.
        limit: Most groups that wait or are leased; 0 (default): no limit. Puts wait at the limit.
        max_bytes: Most bytes that wait or are leased; 0 (default): no limit.
        max_deliveries: Failed deliveries after which a group moves to the dead-letter stream,
            default 5. A delivery fails when its consumer dies, or its `with` block raises.
        max_dead: Most dead letters, default 1000; 0: no limit. Beyond it the oldest are deleted,
            and counted as `dead_dropped`.
        max_staleness: Most weight versions that a group's oldest token may be behind the current
            version. Staler groups expire at put, at take and by `expire`. Default: no rule.
        max_token_staleness: Most weight versions that the newest counted token of each sample may
            be behind; one sample whose tokens are all too stale expires its group. Default: no
            rule.
        on_expired: "discard" (default), or "keep": expired groups wait with status EXPIRED.
        max_reads: Acknowledgements after which a group is done, default 1; 0: it is taken again
            for ever, until it is evicted or expires.
        capacity: Most groups that are stored; puts never wait, and evict groups beyond it. Default:
            no capacity.
        eviction: Which groups go first, beyond the capacity or by `on_full="drop_oldest"`:
            "oldest" (by arrival, default), "stalest", or "last" (in the task's order).
        rate: How many reads each insert allows. Default: any number.
        tags: Names of the tags that queries may use. Default: none.
        keep: Period such as "7d" for which acknowledged groups stay readable. Default: none.
        keep_groups: Most acknowledged groups that stay readable. Default: none.
        partitions: Parts into which the groups are divided, on different nodes of a cluster;
            default 1. Every process must give the same number: see docs/scaling.md.
        groups_per_version: Fewest groups that trainers train for each weight version, which
            `admit` needs beside `max_staleness`. In a mixture, the task's share of them, such as
            22.4. Default: none, then `admit` waits until a process gives it. See
            docs/staleness.md.
    """

    order: str | Order | None = None
    limit: int | None = None
    max_bytes: int | None = None
    max_deliveries: int | None = None
    max_dead: int | None = None
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
    partitions: int | None = None
    groups_per_version: float | None = None

    def as_stored(self) -> dict[str, str]:
        """Return the settings that are not None as the strings that Redis keeps.

        Raises:
            ConfigError: A setting is not usable, or two contradict each other.
        """
        numbers = {
            name: checked_int_or_none(name, getattr(self, name), least)
            for name, least in NUMBERS.items()
        }
        if self.on_expired is not None:
            check_choice("on_expired", self.on_expired, get_args(OnExpired))
        if self.eviction is not None:
            check_choice("eviction", self.eviction, get_args(Eviction))
        if self.capacity is not None and self.limit:
            raise ConfigError("give a limit (puts wait) or a capacity (puts evict), not both.")
        self._check_rate()
        self._check_admission()
        stored = {name: str(value) for name, value in numbers.items() if value is not None}
        if stored.get("partitions") == "1":
            del stored["partitions"]  # a task without partitions
        for name in ("on_expired", "eviction", "rate"):
            if getattr(self, name) is not None:
                stored[name] = str(getattr(self, name))
        if self.groups_per_version is not None:
            stored["groups_per_version"] = repr(float(self.groups_per_version)).removesuffix(".0")
        if self.tags is not None:
            stored["tags"] = json.dumps(declare_tags(self.tags))
        if self.keep is not None:
            stored["keep_ms"] = str(checked_period_ms("keep", self.keep))
        return {**stored, **self._stored_order()}

    def chosen_order(self, stored: str) -> Order | None:
        """Return the task's order; None for an `Order` object that these settings do not hold."""
        name = stored or Fifo.name
        if not isinstance(self.order, str | None) and self.order.name == name:
            return self.order
        return known_order(name)

    def _check_rate(self) -> None:
        """Refuse a rate at which both sides would wait for ever."""
        rate, reads = self.rate, self.max_reads
        reads = DEFAULT_MAX_READS if reads is None else reads
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
            # groups that are read for ever and evicted leave their reads to the others
            least = rate.least_stored if name == "limit" or reads else rate.min_size
            if most and rate.min_size > most:
                raise ConfigError(
                    f"min_size={rate.min_size} can never be stored with {name}={most}."
                )
            if most and least > most:
                raise ConfigError(
                    f"min_diff={rate.min_diff:g} allows no take before {least} groups are stored, "
                    f"and {name}={most}: give a {name} of at least {least}, or a lower min_diff."
                )
        if self.limit and rate.bounds_reads and rate.samples_per_insert < reads:
            raise ConfigError(
                f"limit={self.limit}, max_reads={reads} and samples_per_insert="
                f"{rate.samples_per_insert:g}. {UNREAD_FILL}: leave the limit out, or give as many "
                "samples_per_insert as max_reads."
            )

    def _check_admission(self) -> None:
        """Refuse settings with which groups that were begun cannot be counted."""
        if self.groups_per_version is None:
            return
        if (
            not 0
            < checked_number("groups_per_version", self.groups_per_version)
            <= MOST_PER_VERSION
        ):
            raise ConfigError(
                f"groups_per_version={self.groups_per_version!r}: give the groups that are trained "
                "for each weight version, a number > 0."
            )
        for name, only in EXCLUDED_BY_ADMISSION.items():
            value = getattr(self, name)
            if value is not None and value != only:
                raise excluded_by_admission(name, value)

    def _stored_order(self) -> dict[str, str]:
        if self.order is None:
            return {}
        order = order_named(self.order) if isinstance(self.order, str) else self.order
        check_order(order)
        namesake = known_order(order.name)
        if namesake is not None and type(namesake) is not type(order):
            raise ConfigError(f"name your order otherwise: redrb has an order {order.name!r}.")
        return {"order": order.name, "sampled": str(int(order.sampled))}


def settings_with(settings: TaskSettings | None, given: Mapping[str, Any]) -> TaskSettings:
    """Return settings with further ones by name; raises ConfigError for an unknown one."""
    if not isinstance(settings, TaskSettings | None):
        raise ConfigError(f"settings={settings!r:.80}: give a redrb.stream.TaskSettings.")
    known = [field.name for field in fields(TaskSettings)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"a stream has no argument or setting {name!r}; the settings of a task are "
                f"{', '.join(known)}."
            )
    return replace(settings or TaskSettings(), **given)


def may_give_rights(settings: Mapping[str, Any]) -> bool:
    """Return whether a task with these settings may give rights, and nobody says how many."""
    if settings.get("max_staleness") is None or settings.get("groups_per_version") is not None:
        return False
    return all(
        settings.get(name) in (None, value, str(value))
        for name, value in EXCLUDED_BY_ADMISSION.items()
    )


def excluded_by_admission(name: str, value: object) -> ConfigError:
    """Return the error for a setting that a task with `groups_per_version` cannot have."""
    return ConfigError(
        f"groups_per_version and {name}={value} exclude each other: admission counts the groups of "
        "one task that are begun and not yet trained, and each is trained once. Leave one of them "
        "out, or use another task."
    )
