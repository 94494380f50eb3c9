"""`Turn`: one of several takes at a time collects its batch from the partitions of a task."""

from __future__ import annotations

import logging
import uuid
from typing import ClassVar, Literal

from redrb.connection.deadline import SHORT_OUTAGE_S, Deadline
from redrb.errors import StoreError
from redrb.lua.calls import Call
from redrb.stream.task.store import QUEUE_TTL_MS, TaskStore

TURN_MS = 5000
"""Silence of the take whose turn it is after which the turn passes to the next take."""

_log = logging.getLogger("redrb")


class AskTurn(Call[Literal["turn", "wait", "ended"]], frozen=True):
    """Ask for the turn of a consumer group, keep it, or end it; "wait": another take has it.

    Attributes:
        turn_ms: How long the turn lasts unless the caller asks again; 0: end it, leave the queue.
        queue_ms: How long the caller keeps its place in the queue.
    """

    script: ClassVar = "take/turn"
    group: str
    caller: str
    turn_ms: int
    queue_ms: int


class Turn:
    """The turn of one take, in the first partition; every method may be repeated."""

    def __init__(self, store: TaskStore, group: str) -> None:
        self._store = store
        self._group = group
        self._caller = uuid.uuid4().hex

    def ask(self) -> bool:
        """Ask for the turn, or keep it for `TURN_MS` more; while another take has it, queue."""
        ask = AskTurn(self._group, self._caller, TURN_MS, QUEUE_TTL_MS)
        return self._store.call(ask) == "turn"

    def wait(self) -> None:
        """Block until it may be this take's turn."""
        self._store.wait_for_wake(self._caller)

    def end(self) -> None:
        """End the turn, or leave the queue; while Redis is away both end by themselves, soon."""
        try:
            with Deadline(repeat_s=SHORT_OUTAGE_S):
                self._store.call(AskTurn(self._group, self._caller, 0, 0))
        except StoreError as error:
            _log.warning("a take that is over keeps its turn for %.0f s: %s", TURN_MS / 1000, error)
