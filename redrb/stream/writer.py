"""Puts one batch after another, each on its way while the next one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from redrb.experience import Status
from redrb.experience.records import Scalar
from redrb.stream.batch import Batch
from redrb.stream.intake import Given, Items
from redrb.stream.producer import Producer, Putting


class Writer:
    """Puts experience into a task without waiting for each put; made by `stream.writer()`.

    One put is on its way while the next is made and encoded, so memory is bounded by two of them,
    and a put waits as soon as Redis is slower than its caller. Exactly once, like `stream.put`, and
    in order. Belongs to one thread.
    """

    def __init__(self, producer: Producer, prepare: Callable[[Items, Given], Batch]) -> None:
        self._producer = producer
        self._prepare = prepare
        self._pending: Putting | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.flush()
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
        """
        given = Given(policy_version=policy_version, priority=priority, status=status, tags=tags)
        batch = self._prepare(items, given)
        ids = self.flush(timeout=timeout)
        if not batch:
            return ids
        self._pending = self._producer.begin(batch)
        if self._pending is None:
            ids += self._producer.put(batch, timeout)
        return ids

    def flush(self, *, timeout: float | None = None) -> tuple[int, ...]:
        """Wait until everything that was put is in.

        Returns:
            Ids of the groups that are in since the last call.

        Raises:
            As `stream.put` does; a further call tries again.
        """
        if self._pending is None:
            return ()
        ids = self._producer.settle(self._pending, timeout)
        self._producer.abandon(self._pending)
        self._pending = None
        return ids
