"""`TaskSettings`: the settings of a task; `SETTINGS`: the table of what each of them can be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from redrb.checks import check_choice, checked_int, checked_number
from redrb.errors import ConfigError
from redrb.stream.orders import Fifo, Order, check_order, known_order, order_named
from redrb.stream.task.tags import declare_tags

OnExpired: TypeAlias = Literal["discard", "keep"]

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

MOST_PER_VERSION = 1e9


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a task: its value, the text that Redis keeps, and the text of `redrb set`.

    Attributes:
        stored: Returns a value as Redis keeps it; raises ConfigError, with the given name, for a
            value that the setting cannot have.
        value: Returns the value of what Redis keeps.
        text: Returns what Redis keeps as users write it.
        parsed: Returns the value of what a user writes; ValueError: it is not of this form.
        form: What users write, for errors.
        fixed: Why it cannot change while the task exists; "": it can.
    """

    stored: Callable[[str, Any], str]
    value: Callable[[str], Any] = str
    text: Callable[[str], str] = str
    parsed: Callable[[str], Any] = str
    form: str = ""
    fixed: str = ""


def whole_number(least: int, *, fixed: str = "") -> Setting:
    """Return a setting that is an int, and its smallest value."""
    return Setting(
        lambda name, value: str(checked_int(name, value, least)),
        value=int,
        parsed=int,
        form="a number, or none",
        fixed=fixed,
    )


def _choice(choices: Sequence[str]) -> Setting:
    def stored(name: str, value: object) -> str:
        check_choice(name, value, choices)
        return str(value)

    return Setting(stored)


def _stored_groups(name: str, groups: object) -> str:
    number = checked_number(name, groups)
    if not 0 < number <= MOST_PER_VERSION:
        raise ConfigError(
            f"{name}={groups!r}: give the groups that are trained for each weight version, a "
            "number > 0."
        )
    return repr(number).removesuffix(".0")


def checked_order(order: object) -> Order:
    """Return an order, given as one or by its name; raises ConfigError for another value."""
    found: Any = order_named(order) if isinstance(order, str) else order
    check_order(found)
    namesake = known_order(found.name)
    if namesake is not None and type(namesake) is not type(found):
        raise ConfigError(f"name your order otherwise: redrb has an order {found.name!r}.")
    return found  # type: ignore[no-any-return]


SETTINGS: Mapping[str, Setting] = {
    "order": Setting(lambda _, order: checked_order(order).name),
    "limit": whole_number(0),
    "max_waiting": whole_number(0),
    "max_bytes": whole_number(0),
    "max_deliveries": whole_number(1),
    "max_dead": whole_number(0),
    "max_staleness": whole_number(0),
    "max_token_staleness": whole_number(0),
    "on_expired": _choice(get_args(OnExpired)),
    "max_reads": whole_number(
        0,
        fixed="the reads that stored groups have had are counted by the old number. Use another "
        "task, or clear() this one",
    ),
    "tags": Setting(
        lambda _, names: json.dumps(declare_tags(names)),
        value=json.loads,
        text=lambda stored: ",".join(json.loads(stored)),
        parsed=lambda text: [tag for tag in text.split(",") if tag],
    ),
    "groups_per_version": Setting(
        _stored_groups, value=float, parsed=float, form="a number, or none"
    ),
}
"""All settings of a task, by name, in the order of the fields of `TaskSettings`."""


def stored_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names under which Redis keeps settings; beside an order, whether it draws."""
    found = tuple(names)
    return (*found, "sampled") if "order" in found else found


STORED_NAMES = stored_names(SETTINGS)
"""Names of all settings in Redis."""


class SettingArguments(TypedDict, total=False):
    """The fields of `TaskSettings` as keyword arguments of `ExperienceStream`."""

    order: str | Order | None
    limit: int | None
    max_waiting: int | None
    max_bytes: int | None
    max_deliveries: int | None
    max_dead: int | None
    max_staleness: int | None
    max_token_staleness: int | None
    on_expired: OnExpired | None
    max_reads: int | None
    tags: Sequence[str] | None
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
        max_waiting: Most groups that wait for a consumer group, leased ones aside; 0 (default): no
            limit. Puts wait at it.
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
            for ever, until it expires or a put with `on_full="drop_oldest"` evicts it.
        tags: Names of the tags that queries may use. Default: none.
        groups_per_version: Fewest groups that trainers train for each weight version, which
            `admit` needs beside `max_staleness`. In a mixture, the task's share of them, such as
            22.4. Default: none, then `admit` waits until a process gives it. See
            docs/explanation/staleness-and-admission.md.
    """

    order: str | Order | None = None
    limit: int | None = None
    max_waiting: int | None = None
    max_bytes: int | None = None
    max_deliveries: int | None = None
    max_dead: int | None = None
    max_staleness: int | None = None
    max_token_staleness: int | None = None
    on_expired: OnExpired | None = None
    max_reads: int | None = None
    tags: Sequence[str] | None = None
    groups_per_version: float | None = None

    def as_stored(self) -> dict[str, str]:
        """Return the settings that are not None as the strings that Redis keeps.

        Raises:
            ConfigError: A setting is not usable, or two contradict each other.
        """
        stored = {
            name: setting.stored(name, value)
            for name, setting in SETTINGS.items()
            if (value := getattr(self, name)) is not None
        }
        if self.groups_per_version is not None and self.max_reads not in (None, 1):
            raise read_too_often(self.max_reads)
        if self.order is not None:
            stored["sampled"] = str(int(checked_order(self.order).sampled))
        return stored

    def chosen_order(self, stored: str) -> Order | None:
        """Return the task's order; None for an `Order` object that these settings do not hold."""
        name = stored or Fifo.name
        if not isinstance(self.order, str | None) and self.order.name == name:
            return self.order
        return known_order(name)


def settings_with(settings: TaskSettings | None, given: Mapping[str, Any]) -> TaskSettings:
    """Return settings with further ones by name; raises ConfigError for an unknown one."""
    if not isinstance(settings, TaskSettings | None):
        raise ConfigError(f"settings={settings!r:.80}: give a redrb.stream.TaskSettings.")
    for name in given:
        if name not in SETTINGS:
            raise ConfigError(
                f"a stream has no argument or setting {name!r}; the settings of a task are "
                f"{', '.join(SETTINGS)}."
            )
    return replace(settings or TaskSettings(), **given)


def may_give_rights(settings: Mapping[str, Any]) -> bool:
    """Return whether a task with these settings may give rights, and nobody says how many."""
    if settings.get("max_staleness") is None or settings.get("groups_per_version") is not None:
        return False
    return settings.get("max_reads") in (None, 1, "1")


def read_too_often(max_reads: object) -> ConfigError:
    """Return the error for `max_reads` of a task with `groups_per_version`."""
    return ConfigError(
        f"groups_per_version and max_reads={max_reads} exclude each other: admission counts the "
        "groups of one task that are begun and not yet trained, and each is trained once. Leave "
        "one of them out, or use another task."
    )
