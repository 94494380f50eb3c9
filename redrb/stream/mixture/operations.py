"""The operations of one process in a mixture: begun, kept alive during their turn, ended."""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress

from redrb.errors import StoreError
from redrb.stream.heartbeat import Heartbeat
from redrb.stream.mixture import turns
from redrb.stream.mixture.turns import Operation, Turns
from redrb.stream.waiting import SHORT_OUTAGE_S

_log = logging.getLogger("redrb")


class Operations:
    """Operations of one process; safe among threads.

    An operation that failed is cancelled in Redis. When Redis is away it is cancelled before the
    next operation begins.
    """

    def __init__(self, redis_turns: Turns, mixture: str) -> None:
        """Make the operations of a process; `mixture` is its name in messages."""
        self._turns = redis_turns
        self._mixture = mixture
        self._idle: deque[Operation] = deque()
        self._uncancelled: deque[Operation] = deque()
        self._holding: dict[str, Operation] = {}
        self._lock = threading.Lock()
        self._heartbeat: Heartbeat | None = None

    def begin(self, count: int) -> Operation:
        """Return a new operation of a caller that no other thread uses."""
        self._cancel_all(None)
        try:
            operation = self._idle.pop()
        except IndexError:
            operation = Operation()
        operation.begin(count)
        return operation

    def hold(self, operation: Operation) -> None:
        """Keep the turn of an operation until it ends, however long that takes."""
        self._holding[operation.caller] = operation
        with self._lock:
            if self._heartbeat is None:
                self._heartbeat = Heartbeat(self.beat, turns.TURN_MS, "mixture")

    def beat(self) -> None:
        """Renew the turns that are held."""
        for operation in list(self._holding.values()):
            self._turns.hold(operation, retry_s=SHORT_OUTAGE_S)

    def end(self, operation: Operation, *, kept: bool) -> None:
        """End an operation; if its groups were not kept, nothing of it counts."""
        self._holding.pop(operation.caller, None)
        if kept:
            self._idle.append(operation)
            return
        self._uncancelled.append(operation)
        try:
            self._cancel_all(SHORT_OUTAGE_S)
        except StoreError as error:
            _log.warning(
                "mixture %s: a take that failed counts until Redis is back: %s",
                *(self._mixture, error),
            )

    def close(self) -> None:
        """Stop the heartbeat and cancel the operations that failed."""
        with self._lock:
            heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        with suppress(StoreError):
            self._cancel_all(SHORT_OUTAGE_S)

    def _cancel_all(self, retry_s: float | None) -> None:
        while True:
            try:
                operation = self._uncancelled.popleft()
            except IndexError:
                return
            try:
                self._turns.give(operation, retry_s=retry_s)
            except BaseException:
                self._uncancelled.append(operation)
                raise
            self._idle.append(operation)
