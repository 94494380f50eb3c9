"""What Redis does for a mixture: calls take turns, and what they keep is counted.

Every function may be repeated with the same arguments when a connection breaks, and is: see the
header of `redrb/lua/mixture/turn.lua`.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from redrb.connection import Client
from redrb.connection.transport import Argument, Reply
from redrb.keys import TaskKeys, check_name
from redrb.lua.scripts import load, run
from redrb.stream.mixture.ratio import Ratio
from redrb.stream.task.store import TaskStore
from redrb.stream.waiting import QUEUE_TTL_MS

TURN_MS = 5000
"""Silence of the call whose turn it is after which the next one has it."""


@dataclass(slots=True)
class Operation:
    """One call as Redis knows it; its caller's operations come one after the other.

    Attributes:
        caller: Who calls; also what it waits as.
        number: Number of the operation.
        count: Groups asked for.
        shares: Task -> groups to take of it.
        waited_s: Task -> seconds waited for it.
        short: Tasks that had too few groups.
    """

    caller: str = field(default_factory=lambda: uuid.uuid4().hex)
    number: int = 0
    count: int = 0
    shares: dict[str, int] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=dict)
    short: set[str] = field(default_factory=set)

    def begin(self, count: int) -> None:
        """Become the caller's next operation."""
        self.number += 1
        self.count = count
        self.shares, self.waited_s, self.short = {}, {}, set()

    def waited(self, task: str, seconds: float) -> None:
        """Note that the operation waited for a task."""
        self.short.add(task)
        self.waited_s[task] = self.waited_s.get(task, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of asking for the turn.

    Attributes:
        granted: Whether it is this operation's turn.
        waits_for: The task that the operation before waits for; "" when none.
        need: How many groups of that task it needs.
        shares: Task -> groups to take of it, if it is, or were, this operation's turn.
    """

    granted: bool
    waits_for: str
    need: int
    shares: dict[str, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a mixture has counted of one task.

    Attributes:
        taken: Groups taken.
        short: Calls that found it short.
        waited_s: Seconds that these waited for it.
        waiting_s: Seconds for which the call whose turn it is has been waiting for it.
    """

    taken: int
    short: int
    waited_s: float
    waiting_s: float


class Turns:
    """The turns and counts of one mixture, in keys of its own."""

    def __init__(self, client: Client, namespace: str, group: str, ratio: Ratio) -> None:
        check_name("namespace", namespace)
        check_name("consumer group", group)
        self._ratio = ratio
        keys = TaskKeys(f"redrb:{{{namespace}:mixture:{group}:{ratio.digest}}}:")
        self._client = client.at(keys.stream)
        self._keys = [keys.stream]
        self._waits = TaskStore(client, str(ratio), keys)

    def ask(self, operation: Operation, *, queue: bool, retry_s: float | None) -> Answer:
        """Ask for the turn; when it is another's, queue for it, or leave the queue."""
        queue_ms = QUEUE_TTL_MS if queue else 0
        outcome, waits_for, need, *shares = self._run("turn", operation, retry_s, queue_ms=queue_ms)
        split = dict(zip(self._ratio.parts, map(int, shares), strict=True))
        return Answer(outcome == b"turn", waits_for.decode(), int(need), split)

    def wait(self, operation: Operation, seconds: float) -> None:
        """Block until the turn may be this operation's, or `seconds` are over."""
        self._waits.wait_for_wake(seconds, operation.caller)

    def hold(
        self, operation: Operation, *, waits_for: str = "", retry_s: float | None = None
    ) -> bool:
        """Keep the turn for `TURN_MS` more; False when it is another's by now."""
        reply = self._run("hold", operation, retry_s, waits_for=waits_for)
        return bool(reply[0] == b"ok")

    def keep(self, operation: Operation, *, retry_s: float | None) -> bool:
        """Count what was taken and end the turn; False when it is another's by now."""
        return bool(self._run("keep", operation, retry_s)[0] == b"ok")

    def give(self, operation: Operation, *, retry_s: float | None = None) -> None:
        """End the operation so that nothing of it counts, whatever has become of it."""
        self._run("give", operation, retry_s)

    def look(self) -> dict[str, Figures]:
        """Return what was counted of each task."""
        waits_for, waiting_ms, *told = self._run("look", Operation(), None)
        figures = {}
        for task, taken, short, waited_ms in zip(
            self._ratio.parts, told[::3], told[1::3], told[2::3], strict=True
        ):
            waiting = waiting_ms / 1000 if task == waits_for.decode() else 0.0
            figures[task] = Figures(taken, short, waited_ms / 1000, waiting)
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
            waited_ms = round(operation.waited_s.get(task, 0.0) * 1000)
            short = int(task in operation.short)
            arguments += [task, part, operation.shares.get(task, 0), waited_ms, short]
        return run(self._client, load("mixture/turn"), self._keys, arguments, retry_s=retry_s)
