"""Groups on their way into a task, and what an indexed task is told of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from redrb.codec import EncodedGroup
from redrb.errors import ConfigError
from redrb.experience import Status
from redrb.experience.records import Scalar
from redrb.orders import GroupFacts, Order, check_score


@dataclass(frozen=True, slots=True)
class Batch:
    """Encoded groups, and of each what its bytes do not tell; None: nothing of any.

    Attributes:
        groups: The groups.
        priority: Priority of all of them.
        newest: Version of the newest token of each, by the rule of the staleness of tokens.
        tags: Values of the declared tags of each.
        given_tags: What put was given for the tags of all of them.
        filtered: Groups that a filter has dropped before these.
        expired: Groups that their producer found too stale, and keeps back.
    """

    groups: Sequence[EncodedGroup]
    priority: float | None = None
    newest: Sequence[int | None] | None = None
    tags: Sequence[Sequence[Scalar | None]] | None = None
    given_tags: Mapping[str, Scalar | None] | None = None
    filtered: int = 0
    expired: int = 0

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.groups)

    def __bool__(self) -> bool:
        """Return whether there is anything to tell the task."""
        return bool(self.groups) or self.filtered + self.expired > 0

    @property
    def needs_index(self) -> bool:
        """Whether a plain task cannot hold them."""
        return (
            self.priority is not None
            or self.expired > 0
            or any(group.status is not Status.COMPLETED for group in self.groups)
        )

    def part(self, start: int, end: int) -> Self:
        """Return some of the groups; what was filtered goes with the first."""
        if start == 0 and end >= len(self.groups):
            return self
        return replace(
            self,
            groups=self.groups[start:end],
            newest=None if self.newest is None else self.newest[start:end],
            tags=None if self.tags is None else self.tags[start:end],
            filtered=self.filtered if start == 0 else 0,
            expired=self.expired if start == 0 else 0,
        )

    def as_sent(self, payloads: Sequence[memoryview]) -> Self:
        """Return the groups with these bytes."""
        groups = [
            group._replace(parts=(payload,))
            for group, payload in zip(self.groups, payloads, strict=True)
        ]
        return replace(self, groups=groups)


@dataclass(frozen=True, slots=True)
class Indexer:
    """Describes groups to an indexed task.

    Attributes:
        order: The task's order; None where it is somebody's own.
        names: Its declared tags.
    """

    order: Order | None
    names: Sequence[str]

    @property
    def order_name(self) -> str:
        """Name of the order that the scores are of."""
        return "" if self.order is None else self.order.name

    def facts(self, batch: Batch) -> list[str]:
        """Return the facts of each group, as `redrb/lua/include/index.lua` reads them."""
        if self.order is None:
            raise ConfigError(
                "this task has an order of somebody's own: give the same Order object to put here."
            )
        score, priority = self.order.score, batch.priority
        newest = batch.newest or [None] * len(batch)
        told = "-" if priority is None else repr(float(priority))
        facts = []
        for group, token in zip(batch.groups, newest, strict=True):
            version, status = group.policy_version, group.status
            own = score(GroupFacts(version, priority, group.samples, group.nbytes, status))
            check_score(self.order, own)
            facts.append(
                f"{group.nbytes} {status.value} {own} {told} {'-' if version is None else version} "
                f"{'-' if token is None else token} 0 {group.samples}"
            )
        return facts

    def tags(self, batch: Batch) -> str:
        """Return names and values of the tags of all groups as JSON; "" where there are none.

        None, too, where the groups were prepared before the task declared tags: it refuses them.
        """
        if not self.names or (batch.tags is None and len(batch)):
            return ""
        return json.dumps([list(self.names), *(batch.tags or ())])

    def by_token(self, batch: Batch) -> int:
        """Return 1 where the newest token of each group was looked at, as some tasks ask for."""
        return int(batch.newest is not None or not len(batch))
