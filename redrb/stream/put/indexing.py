"""The facts of groups that are put into an indexed task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from redrb.errors import ConfigError
from redrb.orders import GroupFacts, Order, check_score
from redrb.stream.put.batch import PutBatch
from redrb.stream.task.facts import Facts


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

    def facts(self, batch: PutBatch) -> list[bytes]:
        """Return the packed facts of each group."""
        if self.order is None:
            raise ConfigError(
                "this task has an order of somebody's own: give the same Order object to put here."
            )
        score, priority, pack = self.order.score, batch.options.priority, msgpack.Packer().pack
        newest = batch.newest or [None] * len(batch.groups)
        tags = batch.tags if batch.tags and self.names else [()] * len(batch.groups)
        packed = []
        for group, token, values in zip(batch.groups, newest, tags, strict=True):
            version, status = group.policy_version, group.status
            own = score(GroupFacts(version, priority, group.samples, group.nbytes, status))
            check_score(self.order, own)
            facts: Facts = {
                "size": group.nbytes,
                "samples": group.samples,
                "status": status.value,
                "score": own if isinstance(own, str) else float(own),
            }
            if priority is not None:
                facts["priority"] = float(priority)
            if version is not None:
                facts["version"] = version
            if token is not None:
                facts["newest"] = token
            named = zip(self.names, values, strict=False)
            if indexed := {name: value for name, value in named if value is not None}:
                facts["tags"] = indexed  # never an empty one, which Lua would pack as a list
            packed.append(pack(facts))
        return packed

    def tags(self, batch: PutBatch) -> str:
        """Return the names of the tags in the facts, with a space between them.

        None where the groups were prepared before the task declared tags: it refuses them.
        """
        return "" if batch.tags is None and batch.groups else " ".join(self.names)

    def by_token(self, batch: PutBatch) -> int:
        """Return 1 where the newest token of each group was looked at, as some tasks ask for."""
        return int(batch.newest is not None or not batch.groups)
