"""What the processes of one dataset tell each other, in the task's keys."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from redis.exceptions import RedisError

from redrb.connection import Client
from redrb.connection.transport import Pipeline, Reply
from redrb.errors import LeaseLost
from redrb.keys import TaskKeys
from redrb.stream.feeding.lease_ref import Ticket
from redrb.stream.take.scripts import Ending, Outcome, TakeScripts
from redrb.stream.task.store import TaskStore

KEPT_S = 7 * 24 * 3600
"""How long a dataset that nobody uses is remembered."""

WAKE_MS = 3000

_CLOSED = "closed"


class Register:
    """Consumers of one dataset, and the leases that they handed out; safe among threads."""

    def __init__(self, client: Client, namespace: str, task: str, group: str, dataset: str) -> None:
        """Address it; nothing is asked.

        Args:
            client: Where the task is.
            namespace, task: Which task.
            group: Consumer group.
            dataset: Name of the dataset, unique.
        """
        keys = TaskKeys.of(namespace, task)
        self._store = TaskStore(client, task, keys)
        self._scripts = TakeScripts(self._store)
        self._group = group
        self._keys = keys
        self._key = f"{keys.prefix}dataset:{dataset}"

    def enter(self, consumer: str) -> None:
        """Note that a consumer hands leases out."""
        self._all(("HSET", self._key, consumer, "1"), ("EXPIRE", self._key, KEPT_S))

    def look(self, leases: Sequence[tuple[str, str]]) -> tuple[list[bool], bool]:
        """Return of each lease whether it goes on, and if the dataset is closed.

        Args:
            leases: Slot and token of each.
        """
        slots = [slot for slot, _ in leases]
        held, closed, _ = self._all(
            ("HMGET", f"{self._keys.prefix}leases:{self._group}", "", *slots),
            ("HEXISTS", self._key, _CLOSED),
            ("EXPIRE", self._key, KEPT_S),
        )
        going_on = [
            told is not None and told.decode() == token
            for told, (_, token) in zip(held[1:], leases, strict=True)
        ]
        return going_on, bool(closed)

    def wait_for_an_end(self, consumer: str, seconds: float) -> None:
        """Block until a lease of this consumer was ended by its ticket, so long at most."""
        self._store.wait_for_wake(seconds, _waiter(consumer))

    def end(self, ticket: Ticket, outcome: Outcome, reason: str) -> None:
        """End the lease of a ticket; the same call again changes nothing.

        Raises:
            LeaseLost: Others have it.
        """
        ending = Ending(
            ticket.slot, ticket.token, outcome, ticket.ids, reason, ticket.samples, ends=True
        )
        held = self._scripts.finish(self._group, ticket.consumer, ending)
        self._wake(ticket.consumer)
        if not held:
            raise LeaseLost(
                task=self._store.task,
                ids=ticket.ids,
                why="its worker process ended, or stopped for longer than lease_ms, and others "
                "took over. Drop what came of it.",
            )

    def close(self) -> int:
        """Give back what any consumer of the dataset holds, unharmed; returns the groups.

        Consumers that live end at their next look.
        """
        told, *_ = self._all(
            ("HKEYS", self._key), ("HSET", self._key, _CLOSED, "1"), ("EXPIRE", self._key, KEPT_S)
        )
        names = [name.decode() for name in told if name.decode() != _CLOSED]
        return sum(self._scripts.leave(self._group, name) for name in names)

    def _wake(self, consumer: str) -> None:
        """Wake a consumer that waits for an end; it looks by itself if this is lost."""
        key = self._keys.wake(_waiter(consumer))
        pipeline = Pipeline()
        pipeline.add("RPUSH", key, 1)
        pipeline.add("LTRIM", key, -1, -1)
        pipeline.add("PEXPIRE", key, WAKE_MS)
        with suppress(RedisError):
            self._store.client.exchange(pipeline)

    def _all(self, *commands: tuple[str | int, ...]) -> list[Reply]:
        pipeline = Pipeline()
        for command in commands:
            pipeline.add(*command)
        return self._store.exchange(pipeline)


def _waiter(consumer: str) -> str:
    return f"{consumer}.ends"
