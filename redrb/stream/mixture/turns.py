"""Turns of takes from a mixture, in Redis: one take at a time, and groups that are kept count.

Every method may be repeated with the same arguments when a connection breaks, and is: see the
header of `redrb/lua/mixture/turn.lua`.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from redrb.connection import Client
from redrb.connection.transport import Argument, Reply
from redrb.keys import TaskKeys, check_name
from redrb.stream.mixture.ratio import Ratio
from redrb.stream.mixture.starvation import Shortages, Starvation
from redrb.stream.task.store import TaskStore
from redrb.stream.waiting import QUEUE_TTL_MS

TURN_MS = 5000
"""Silence of the take whose turn it is after which the turn passes to the next take."""


@dataclass(slots=True)
class Operation:
    """One take in Redis; operations of the same caller come one after the other.

    Attributes:
        caller: Name of the caller, also in the queue for the turn.
        number: Number of the operation.
        count: Groups asked for.
        shares: Task -> groups to take from it.
        shortages: Tasks that had too few groups.
    """

    caller: str = field(default_factory=lambda: uuid.uuid4().hex)
    number: int = 0
    count: int = 0
    shares: dict[str, int] = field(default_factory=dict)
    shortages: Shortages = field(default_factory=Shortages)

    def begin(self, count: int) -> None:
        """Become the caller's next operation."""
        self.number += 1
        self.count = count
        self.shares, self.shortages = {}, Shortages()


@dataclass(frozen=True, slots=True)
class TurnReply:
    """The reply to an operation that asked for the turn.

    Attributes:
        granted: Whether it is this operation's turn.
        waits_for: Task that the operation whose turn it is waits for; "" when none.
        need: Groups of that task that it needs.
        shares: Task -> groups to take from it, if it is, or were, this operation's turn.
    """

    granted: bool
    waits_for: str
    need: int
    shares: dict[str, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts of one task of a mixture.

    Attributes:
        taken: Groups taken.
        starvation: How takes have waited for the task.
    """

    taken: int
    starvation: Starvation


class Turns:
    """The turn and the counts of one mixture."""

    def __init__(self, client: Client, namespace: str, group: str, ratio: Ratio) -> None:
        check_name("namespace", namespace)
        check_name("consumer group", group)
        self._ratio = ratio
        keys = TaskKeys.of_mixture(namespace, group, ratio.digest)
        self._store = TaskStore(client, str(ratio), keys)

    def ask(self, operation: Operation, *, queue: bool, retry_s: float | None) -> TurnReply:
        """Ask for the turn; while another operation has it, queue for it, or leave the queue."""
        queue_ms = QUEUE_TTL_MS if queue else 0
        outcome, waits_for, need, *shares = self._run("turn", operation, retry_s, queue_ms=queue_ms)
        split = dict(zip(self._ratio.parts, map(int, shares), strict=True))
        return TurnReply(outcome == b"turn", waits_for.decode(errors="replace"), int(need), split)

    def wait(self, operation: Operation, seconds: float) -> None:
        """Block until the turn may be this operation's, or `seconds` are over."""
        self._store.wait_for_wake(seconds, operation.caller)

    def hold(
        self, operation: Operation, *, waits_for: str = "", retry_s: float | None = None
    ) -> bool:
        """Keep the turn for `TURN_MS` more; False when it has passed on."""
        reply = self._run("hold", operation, retry_s, waits_for=waits_for)
        return bool(reply[0] == b"ok")

    def keep(self, operation: Operation, *, retry_s: float | None) -> bool:
        """Count the shares as taken and end the turn; False when it has passed on."""
        return bool(self._run("keep", operation, retry_s)[0] == b"ok")

    def give(self, operation: Operation, *, retry_s: float | None = None) -> None:
        """End the operation so that nothing of it counts, whether it was kept or not."""
        self._run("give", operation, retry_s)

    def look(self) -> dict[str, Figures]:
        """Return the counts of each task."""
        waits_for, waiting_ms, *counts = self._run("look", Operation(), None)
        figures = {}
        for task, taken, short, waited_ms in zip(
            self._ratio.parts, counts[::3], counts[1::3], counts[2::3], strict=True
        ):
            waiting = waiting_ms / 1000 if task == waits_for.decode(errors="replace") else 0.0
            figures[task] = Figures(taken, Starvation(short, waited_ms / 1000, waiting))
        return figures

    def _run(
        self,
        verb: str,
        operation: Operation,
        retry_s: float | None,
        *,
        queue_ms: int = 0,
        waits_for: str = "",
    ) -> Reply:
        arguments: list[Argument] = [verb, operation.caller, operation.number, TURN_MS, queue_ms]
        arguments += [operation.count, waits_for]
        for task, part in self._ratio.parts.items():
            waited_s = operation.shortages.waited_s
            waited_ms = round(waited_s.get(task, 0.0) * 1000)
            share = operation.shares.get(task, 0)
            arguments += [task, part, share, waited_ms, int(task in waited_s)]
        return self._store.run("mixture/turn", arguments, retry_s=retry_s)
