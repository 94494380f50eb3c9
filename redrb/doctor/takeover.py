"""Takes over from dead consumers and makers, by heartbeats of one that takes and begins nothing.

Time without any heartbeat counts a third at most, as Redis may have been away: so heartbeats go on
until the deadlines of the dead are over, for a lease at the latest.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence

from redrb.doctor.examination import Examination, ExaminedGroup, examine
from redrb.stream.admission.scripts import AdmissionScripts
from redrb.stream.take.scripts import TakeScripts
from redrb.stream.task.store import TaskStore

MOST_WAIT_S = 60.0
"""Longest time for which a repair waits for the deadlines of the dead."""


def take_over_consumers(task: Examination, group: ExaminedGroup) -> tuple[int, bool]:
    """Requeue what dead consumers lease; returns the number of groups, and whether these are all.

    A consumer that has sent a heartbeat since it was found is not dead, and keeps its leases.

    Raises:
        StoreDenied: The user may not send heartbeats.
        StoreUnavailable: Redis stayed away.
    """
    store, scripts, consumer = task.store, TakeScripts(task.store), _new_name()
    incarnation = _incarnation(store)
    dead = _dead_now(store, group)
    if not dead:
        return 0, True
    deadlines = _deadlines(store, group.name, dead)

    def beat() -> int:
        return scripts.heartbeat(group.name, consumer, task.lease_ms, incarnation)[1]

    def is_over(_: int) -> bool:  # all are forgotten, or live again
        now = _deadlines(store, group.name, dead)
        return all(new is None or new != old for new, old in zip(now, deadlines, strict=True))

    try:
        return _beat_until(beat, is_over, task.lease_ms)
    finally:
        scripts.leave(group.name, consumer)


def take_rights_back(task: Examination) -> tuple[int, bool]:
    """Take back the rights of dead makers; returns their number, and whether these are all.

    Raises:
        StoreDenied, StoreUnavailable: As `take_over_consumers`.
    """
    store, scripts, maker = task.store, AdmissionScripts(task.store), _new_name()
    incarnation = _incarnation(store)
    found = examine(store)
    rights = found.lost_rights if found else 0
    if not rights:
        return 0, True

    def beat() -> int:
        return scripts.heartbeat(maker, task.lease_ms, incarnation)[1]

    def is_over(taken: int) -> bool:
        return taken >= rights

    try:
        return _beat_until(beat, is_over, task.lease_ms)
    finally:
        scripts.leave(maker)


def _beat_until(
    beat: Callable[[], int], is_over: Callable[[int], bool], lease_ms: int
) -> tuple[int, bool]:
    until = time.monotonic() + min(1.0 + 1.5 * lease_ms / 1000, MOST_WAIT_S)
    pause, taken = threading.Event(), 0
    while True:
        found = beat()
        taken += found
        if is_over(taken):
            return taken, True
        if time.monotonic() >= until:
            return taken, False
        pause.wait(0.0 if found else lease_ms / 6000)


def _dead_now(store: TaskStore, group: ExaminedGroup) -> list[str]:
    """Return the consumers that are still dead, before a heartbeat sets the task's clock."""
    found = examine(store)
    groups = found.consumer_groups if found else ()
    dead = {name for each in groups if each.name == group.name for name in each.dead}
    return sorted(dead & group.dead.keys())


def _deadlines(store: TaskStore, group: str, consumers: Sequence[str]) -> list[bytes | None]:
    key = f"{store.keys.prefix}consumers:{group}"
    found: list[bytes | None] = store.client.execute("ZMSCORE", key, *consumers)
    return found


def _new_name() -> str:
    return f"doctor-{uuid.uuid4().hex}"


def _incarnation(store: TaskStore) -> str:
    return (store.client.execute("HGET", store.keys.task, "incarnation") or b"").decode(
        errors="replace"
    )
