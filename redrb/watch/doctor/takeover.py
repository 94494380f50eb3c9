"""Repair: dead consumers and makers lose their leases, by heartbeats that `redrb doctor` sends.

Time without any heartbeat counts a third at most, as Redis may have been away: so heartbeats go on
until the deadlines of the dead are over, for a lease at the latest.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable

from redrb.stream.admission.calls import BeatMaker, GiveBack
from redrb.stream.take.calls import Beat, Leave
from redrb.stream.task.store import TaskStore
from redrb.watch.doctor.examination import (
    Examination,
    ExaminedGroup,
    deadlines_of,
    deadlines_over,
    examine,
)
from redrb.watch.state.findings.wording import shown
from redrb.words import counted

MOST_WAIT_S = 60.0
"""Longest time for which a repair waits for the deadlines of the dead."""


def take_over_consumers(task: Examination, group: ExaminedGroup) -> tuple[str, bool]:
    """Requeue what dead consumers lease; returns what was done, and whether this is all.

    A consumer that has sent a heartbeat since it was found is not dead, and keeps its leases.
    """
    store, consumer = task.store, _new_name()
    incarnation = _incarnation(store)
    found = examine(store)  # before a heartbeat sets the task's clock
    groups = found.consumer_groups if found else ()
    now = {name for each in groups if each.name == group.name for name in each.dead}
    text = "let {} of dead consumers of " + shown(group.name) + " wait again"
    dead = sorted(now & group.dead.keys())
    if not dead:
        return text.format(counted(0, "group")), True
    deadlines = _Deadlines(store, f"consumers:{group.name}", dead)

    def beat() -> int:
        return store.call(Beat(group.name, consumer, task.lease_ms, incarnation), b"").taken_over

    try:
        requeued, done = _beat_until(beat, deadlines.remain, task.lease_ms)
    finally:
        list(store.pages(Leave(group.name, consumer)))
    return text.format(counted(requeued, "group")), done


def take_rights_back(task: Examination) -> tuple[str, bool]:
    """Take back the rights of dead makers; returns what was done, and whether this is all."""
    store, maker = task.store, _new_name()
    incarnation = _incarnation(store)
    found = examine(store)
    if found is None or not found.lost_rights:
        return "took 0 rights back", True
    makers, rights = (
        _Deadlines(store, kind, deadlines_over(store, kind, found.now))
        for kind in ("makers", "holds")
    )

    def beat() -> int:
        return store.call(BeatMaker(maker, task.lease_ms, incarnation)).taken_back

    def remain() -> bool:
        return makers.remain() or rights.remain()

    try:
        taken, done = _beat_until(beat, remain, task.lease_ms)
    finally:
        list(store.pages(GiveBack(holder=maker)))
    return f"took {counted(taken, 'right')} back", done


def _beat_until(
    beat: Callable[[], int], remain: Callable[[], bool], lease_ms: int
) -> tuple[int, bool]:
    longest_s = min(1.0 + 1.5 * lease_ms / 1000, MOST_WAIT_S)
    until = time.monotonic() + longest_s
    pause, taken = threading.Event(), 0
    while True:
        found = beat()
        taken += found
        if not remain():
            return taken, True
        if found:
            until = time.monotonic() + longest_s
        elif time.monotonic() >= until:
            return taken, False
        pause.wait(0.0 if found else lease_ms / 6000)


class _Deadlines:
    """Deadlines that were over, until they are renewed or removed.

    They are compared with themselves and not with the clock: the first heartbeat sets the clock
    back, as time without heartbeats counts a third of a lease at most.
    """

    def __init__(self, store: TaskStore, kind: str, names: Iterable[str | bytes]) -> None:
        self._store, self._kind = store, kind
        found = deadlines_of(store, self._kind, list(names))
        self._deadlines = {name: one for name, one in found.items() if one is not None}

    def remain(self) -> bool:
        """Return whether any of the deadlines is as it was."""
        now = deadlines_of(self._store, self._kind, list(self._deadlines))
        self._deadlines = {name: one for name, one in self._deadlines.items() if now[name] == one}
        return bool(self._deadlines)


def _new_name() -> str:
    return f"doctor-{uuid.uuid4().hex}"


def _incarnation(store: TaskStore) -> str:
    return (store.client.execute("HGET", store.keys.task, "incarnation") or b"").decode(
        errors="replace"
    )
