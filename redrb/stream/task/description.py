"""`TaskDescription`: the settings of an open task, as producers and consumers need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from redrb.stream.orders import Order, Stalest
from redrb.stream.task.settings import SETTINGS
from redrb.unpacking import Reading


@dataclass(frozen=True)
class StalenessRules:
    """How many weight versions a group may be behind; None: the rule does not apply.

    Attributes:
        max_staleness: Versions that the group's oldest token may be behind.
        max_token_staleness: Versions that the newest counted token of each sample may be behind.
    """

    max_staleness: int | None
    max_token_staleness: int | None

    @cached_property
    def any(self) -> bool:
        """Whether a rule applies."""
        return self.max_staleness is not None or self.max_token_staleness is not None


@dataclass(frozen=True)
class TaskDescription:
    """The settings of a task at the time when it was last opened.

    Attributes:
        order: The task's order; None where it is an `Order` object that this process was not given.
        revision: Name of these settings; the task has another one once they changed.
        incarnation: Random name that the task was given when it was created; "" once this process
            has cleared the task.
        staleness: When its groups expire.
        keep_expired: Whether expired groups wait with status EXPIRED, instead of being discarded.
        epoch: The epoch of the producers' records (`include/producers.lua`).
        kind: Fields and dtypes of the completed groups that were put first, as `EncodedGroup.kind`;
            "" if there were none.
    """

    order: Order | None
    revision: str
    incarnation: str
    tags: tuple[str, ...]
    staleness: StalenessRules
    keep_expired: bool
    epoch: int
    kind: str = ""

    @classmethod
    @Reading("the settings of a task")
    def of(cls, stored: Mapping[str, str], epoch: int, order: Order | None) -> Self:
        """Return the description of a task from its settings in Redis; "" for those not given."""

        def given(name: str) -> Any:
            return SETTINGS[name].value(stored[name]) if stored[name] else None

        return cls(
            order=order,
            revision=stored["revision"],
            incarnation=stored["incarnation"],
            tags=tuple(given("tags") or ()),
            staleness=StalenessRules(given("max_staleness"), given("max_token_staleness")),
            keep_expired=given("on_expired") == "keep",
            epoch=epoch,
            kind=stored["kind"],
        )

    @cached_property
    def by_version(self) -> bool:
        """Whether Redis indexes the policy versions of groups."""
        stalest = self.order is not None and self.order.name == Stalest.name
        return stalest or self.staleness.max_staleness is not None
