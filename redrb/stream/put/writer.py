"""Puts one batch after another, each on its way while the next one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from redrb.errors import ConfigError, RecordError, RedrbError
from redrb.experience import Status
from redrb.experience.records import Scalar
from redrb.stream.arguments import AnyStatus
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.items import GroupedRows, Groups, Items, groups_of
from redrb.stream.put.options import PutOptions
from redrb.stream.put.producer import PendingPut, Producer

LEAVE_S = 1.0
"""How long a block that raised waits for room for the put before."""


class Writer:
    """Puts experience into a task without waiting for each put; made by `stream.writer()`.

    One put is on its way while the next is made and encoded, so memory is bounded by two of them,
    and a put waits as soon as Redis is slower than its caller. Exactly once, like `stream.put`, and
    in order. Belongs to one thread.
    """

    def __init__(
        self, producer: Producer, prepare: Callable[[Groups, PutOptions], PutBatch]
    ) -> None:
        self._producer = producer
        self._prepare = prepare
        self._pending: PendingPut | None = None
        self._puts = 0
        self._by_put = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.flush()
            else:
                self._flush_after(error)
        finally:
            pending, self._pending = self._pending, None
            if pending is not None:
                self._producer.abandon(pending)

    def put(
        self,
        items: Items,
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: Status | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Send experience; return when the put before it is in.

        Args are those of `stream.put`. The tensors may be changed when this returns.

        Returns:
            Ids of the groups that are in since the last call.

        Raises:
            As `stream.put` does, for this put or the one before. What this call was given was then
            not put; the put before stays with the writer, and the next call tries it again.
            ConfigError: The put before can never be in: its message says which put that is, the
                writer gives it up, and the next call puts again.
        """
        options = PutOptions.checked(policy_version, priority, status, tags)
        batch = self._prepare(groups_of(items), options)
        ids = self.flush(timeout=timeout)
        if not batch:
            return ids
        self._puts, self._by_put = self._puts + 1, True
        self._pending = self._producer.begin(batch)
        if self._pending is None:
            ids += self._producer.put(batch, timeout)
        return ids

    def begin(
        self,
        items: Items | GroupedRows,
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
    ) -> int:
        """Take experience over, and send it where nothing hinders that; `flush` sees that it is in.

        Unlike `put` this never fails for Redis' sake: what `flush` cannot put stays with the
        writer, whatever the reason, until a further `flush` puts it or `drop` gives it up.

        Returns:
            Groups that passed the filters.

        Raises:
            RecordError, EncodeError: The experience is malformed.
            ConfigError: What was begun before is not in yet: flush first.
            All of them: the writer holds what it held.
        """
        options = PutOptions.checked(policy_version, priority, status, tags)
        batch = self._prepare(groups_of(items), options)
        if self._pending is not None:
            raise ConfigError("the put before is not in yet: flush() it, or drop() it.")
        if batch:
            self._pending = self._producer.begin(batch) or self._producer.hold(batch)
            self._by_put = False
        return len(batch)

    def drop(self) -> int:
        """Give up what is not in yet; an attempt that was interrupted may land late, once.

        Returns:
            Groups given up.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return 0
        pending.identity.interrupted = True
        self._producer.abandon(pending)
        return len(pending.batch) - len(pending.ids)

    def flush(self, *, timeout: float | None = None) -> tuple[int, ...]:
        """Wait until everything that was put is in.

        Returns:
            Ids of the groups that are in since the last call.

        Raises:
            As `stream.put` does; a further call tries again.
            ConfigError: What `put` was given can never be in, and is given up.
        """
        if self._pending is None:
            return ()
        try:
            ids = self._producer.settle(self._pending, timeout)
        except (ConfigError, RecordError) as error:
            if not self._by_put:
                raise
            raise self._given_up(error) from error
        self._producer.abandon(self._pending)
        self._pending = None
        return ids

    def _given_up(self, error: ConfigError | RecordError) -> ConfigError:
        """Drop a put that no further attempt can bring in, and return what its caller is told."""
        stored = 0 if self._pending is None else len(self._pending.ids)
        left = self.drop()
        told = ConfigError(
            f"put {self._puts} of this writer is given up, {left} groups of it are not in: {error}"
        )
        told.stored = stored
        return told

    def _flush_after(self, error: BaseException) -> None:
        """Give the put before a moment; note on the block's error when it is not in."""
        try:
            self.flush(timeout=LEAVE_S)
        except RedrbError as failure:
            error.add_note(f"the last put of the writer is not in: {failure}")
