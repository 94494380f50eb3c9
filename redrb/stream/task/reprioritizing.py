"""Changes the priority of groups that are stored."""

from __future__ import annotations

from collections.abc import Sequence

from redrb.errors import ConfigError
from redrb.experience import Status
from redrb.orders import GroupFacts, Order, Score, check_score
from redrb.stream.task.entries import member_of
from redrb.stream.task.facts import Facts, unpack_facts
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore

CHUNK = 500
"""Most groups a script call."""


class Reprioritizer:
    """Gives groups new priorities, and the scores that the task's order makes of them."""

    def __init__(self, store: TaskStore, order: Order | None) -> None:
        self._store = store
        self._scripts = TaskScripts(store)
        self._order = order

    def update(self, ids: Sequence[int], priorities: Sequence[float]) -> int | None:
        """Change priorities; returns how many of the groups are stored.

        None: the task was cleared, or is another one by now.

        Raises:
            ConfigError: The task keeps no priorities, or what is given is not usable.
        """
        if self._order is None or self._store.indexer is None:
            raise ConfigError(
                'this task keeps no priorities: open it with order="priority" or "prioritized", or '
                "give its own Order object."
            )
        if len(ids) != len(priorities):
            raise ConfigError(f"{len(ids)} ids and {len(priorities)} priorities: give one each.")
        found = 0
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            changes = self._scored(self._order, part, priorities[start : start + CHUNK])
            changed = self._scripts.rescore(self._order.name, changes)
            if changed is None:
                return None
            found += changed
        return found

    def _scored(
        self, order: Order, ids: Sequence[int], priorities: Sequence[float]
    ) -> list[tuple[int, float, Score]]:
        changes: list[tuple[int, float, Score]] = []
        for seq, priority, facts in zip(ids, priorities, self._facts(ids), strict=True):
            if facts is not None:
                seen = GroupFacts(
                    policy_version=facts.get("version"),
                    priority=priority,
                    samples=facts["samples"],
                    nbytes=facts["size"],
                    status=Status(facts["status"]),
                )
                score = order.score(seen)
                check_score(order, score)
                if isinstance(score, str):
                    raise ConfigError(f"order {order.name!r} does not go by priority.")
                changes.append((seq, float(priority), score))
        return changes

    def _facts(self, ids: Sequence[int]) -> list[Facts | None]:
        key = f"{self._store.keys.prefix}facts"
        found = self._store.client.execute("HMGET", key, *map(member_of, ids))
        return [packed and unpack_facts(packed) for packed in found]
