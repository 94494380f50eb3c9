"""`PutInFlight`: sends a put now and reads its reply later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redrb.errors import ConfigError
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.items import Groups
from redrb.stream.put.options import PutOptions


class UnfinishedPut(Protocol):
    """A put whose groups may not all be stored yet."""

    batch: PutBatch

    @property
    def ids(self) -> Sequence[int]:
        """Ids of the groups that are certainly stored, from the first."""

    @property
    def sent(self) -> object | None:
        """The request that is under way; None if nothing was sent."""


class Puts(Protocol):
    """Stores groups exactly once: `Producer`, or that of a task with partitions."""

    def put(self, batch: PutBatch) -> tuple[int, ...]:
        """Store groups; returns their ids in order."""

    def send(self, batch: PutBatch) -> UnfinishedPut:
        """Send groups without waiting for the reply; `finish` must follow."""

    def finish(self, pending: Any, /) -> tuple[int, ...]:
        """Wait until all groups are stored; may be called again after an error."""

    def abandon(self, pending: Any, /) -> None:
        """End a put."""


class PutInFlight:
    """Sends one put at a time and reads its reply later; belongs to one thread.

    A put that `finish` could not store stays in flight, until a further `finish` or `drop`: an
    attempt that is repeated has the same operation number, so the groups are stored once.

    Attributes:
        prepare: Checks and encodes groups for the task; `refused` of the result has the bad ones.
    """

    def __init__(self, producer: Puts, prepare: Callable[[Groups, PutOptions], PutBatch]) -> None:
        self.prepare = prepare
        self._producer = producer
        self._pending: UnfinishedPut | None = None

    @property
    def stored(self) -> int:
        """Groups of the put in flight, from the first, that are certainly stored."""
        return 0 if self._pending is None else len(self._pending.ids)

    def send(self, batch: PutBatch) -> bool:
        """Take groups over, and send them if they fit one transaction and room is not scarce.

        Returns:
            Whether they were sent; `finish` sends them otherwise.

        Raises:
            ConfigError: The put before is still in flight.
        """
        if self._pending is not None:
            raise ConfigError("the put before is still in flight: finish() or drop() it first.")
        self._pending = self._producer.send(batch)
        return self._pending.sent is not None

    def finish(self) -> tuple[int, ...]:
        """Wait until the put in flight is stored; returns the ids of its groups.

        Raises:
            As `stream.put` does; the put stays in flight.
        """
        if self._pending is None:
            return ()
        ids = self._producer.finish(self._pending)
        self._producer.abandon(self._pending)
        self._pending = None
        return ids

    def drop(self) -> int:
        """Give the put in flight up; an attempt that was interrupted may still arrive, once.

        Returns:
            Groups that are not stored.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return 0
        self._producer.abandon(pending)
        return len(pending.batch.groups) - len(pending.ids)
