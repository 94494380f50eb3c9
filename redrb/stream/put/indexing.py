"""The facts of each group as the scripts of an indexed task read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from redrb.errors import ConfigError
from redrb.orders import GroupFacts, Order, check_score
from redrb.stream.put.batch import PutBatch


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

    def facts(self, batch: PutBatch) -> list[str]:
        """Return the facts of each group, as `redrb/lua/include/index.lua` reads them."""
        if self.order is None:
            raise ConfigError(
                "this task has an order of somebody's own: give the same Order object to put here."
            )
        score, priority = self.order.score, batch.options.priority
        newest = batch.newest or [None] * len(batch.groups)
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

    def tags(self, batch: PutBatch) -> str:
        """Return names and values of the tags of all groups as JSON; "" where there are none.

        None, too, where the groups were prepared before the task declared tags: it refuses them.
        """
        if not self.names or (batch.tags is None and batch.groups):
            return ""
        return json.dumps([list(self.names), *(batch.tags or ())])

    def by_token(self, batch: PutBatch) -> int:
        """Return 1 where the newest token of each group was looked at, as some tasks ask for."""
        return int(batch.newest is not None or not batch.groups)
