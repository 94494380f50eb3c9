"""`stream.writer()`: sends each put while its caller makes the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from redrb.connection.deadline import Deadline
from redrb.errors import (
    ConfigError,
    OutcomeUnknown,
    RecordError,
    RedrbError,
    StoreUnavailable,
)
from redrb.experience import BufferItem
from redrb.experience.records import Scalar
from redrb.scopes import Entered
from redrb.stream.arguments import AnyStatus
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.options import PutOptions
from redrb.stream.put.preparer import Groups, Items, groups_of, groups_of_many
from redrb.stream.put.rights import RightsSource
from redrb.words import counted


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
    """Stores groups exactly once: `Producer`."""

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


_log = logging.getLogger("redrb")
LEAVE_S = 1.0
"""How long a block that raised waits for room for its last put."""


class Writer(Entered):
    """Puts experience into a task without waiting for each put; made by `stream.writer()`.

    One put is on its way while the next one is made and encoded, so at most two are in memory, and
    a put waits as soon as Redis is slower than its caller. Exactly once, like `stream.put`, and in
    order. Belongs to one thread.

    Attributes:
        in_flight: The put that is on its way; `ExperienceSender` uses it with other rules for
            errors.
    """

    def __init__(self, producer: Puts, prepare: Callable[[Groups, PutOptions], PutBatch]) -> None:
        self.in_flight = PutInFlight(producer, prepare)
        self._puts = 0
        self._stored: tuple[int, ...] = ()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.flush(timeout=None if error is None else LEAVE_S)
        except RedrbError as failure:
            if error is None:
                raise
            error.add_note(f"the last put of the writer is not stored: {failure}")
        finally:
            self.in_flight.drop()

    def put(
        self,
        items: Items,
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        admission: RightsSource | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Send experience; return when the put before it is stored.

        Args are those of `stream.put`. The tensors may be changed when this returns.

        Returns:
            Ids of the groups that were stored since the last call.

        Raises:
            As `stream.put` does, for this put or the one before. The items of this call were then
            not put; the put before stays with the writer, and the next call tries it again. If
            Redis goes away while the put of this call waits for room, it may be stored or not: then
            nothing is raised, the writer keeps it, and the next call tries it again.
            ConfigError: The put before can never be stored; the message names it. The writer drops
                it, and the next call puts again.
            OutcomeUnknown: The same, of a put before that may be stored.
        """
        options = PutOptions.checked(policy_version, priority, status, tags, admission)
        return self._put(groups_of(items), options, timeout)

    def put_many(
        self,
        groups: Sequence[Sequence[BufferItem]],
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        admission: RightsSource | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Send several groups; return when the put before them is stored.

        Args are those of `stream.put_many`; result and errors are those of `put`.
        """
        options = PutOptions.checked(policy_version, priority, status, tags, admission)
        return self._put(groups_of_many(groups), options, timeout)

    def _put(self, groups: Groups, options: PutOptions, timeout: float | None) -> tuple[int, ...]:
        batch = self.in_flight.prepare(groups, options)
        batch.raise_refused()
        with Deadline(timeout):
            try:
                self._finish()
            except BaseException:
                batch.rights.end(0, counted=False)
                raise
            if batch:
                self._puts += 1
                if not self.in_flight.send(batch):
                    self._finish_at_once()
        return self._newly_stored()

    def flush(self, *, timeout: float | None = None) -> tuple[int, ...]:
        """Wait until all puts are stored.

        Returns:
            Ids of the groups that were stored since the last call.

        Raises:
            As `stream.put` does; a further call tries again.
            ConfigError: The last put can never be stored, and is given up.
            OutcomeUnknown: The last put may be stored, and is given up.
        """
        with Deadline(timeout):
            self._finish()
        return self._newly_stored()

    def _finish(self) -> None:
        try:
            self._stored += self.in_flight.finish()
        except (ConfigError, RecordError) as error:
            raise self._given_up(error) from error
        except OutcomeUnknown:
            self.in_flight.drop()
            raise

    def _finish_at_once(self) -> None:
        """Store a put that could not be sent ahead; drop it if it is certainly not stored."""
        try:
            self._stored += self.in_flight.finish()
        except StoreUnavailable as error:
            _log.warning("a writer's put may not be stored, the next call tries again: %s", error)
        except BaseException:
            self.in_flight.drop()
            raise

    def _newly_stored(self) -> tuple[int, ...]:
        ids, self._stored = self._stored, ()
        return ids

    def _given_up(self, error: ConfigError | RecordError) -> ConfigError:
        """Drop a put that no further attempt can store, and return the error to raise."""
        stored = self.in_flight.stored
        left = self.in_flight.drop()
        given_up = ConfigError(
            f"put {self._puts} of this writer is given up, without {counted(left, 'group')} of it: "
            f"{error}"
        )
        given_up.stored = stored
        return given_up
