"""Repairs that are safe at any time: they lose no experience, and living processes notice nothing.

Each uses the script that workers use for the same end.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from redrb.connection import Client
from redrb.doctor.examination import Examination, ExaminedGroup, examine
from redrb.doctor.leases import DEAD_CONSUMER, LEASE_WITHOUT_CONSUMER, LOST_RIGHTS, STALE_CONSUMER
from redrb.doctor.registry_names import NAME_WITHOUT_TASK, LeftName, remove_name
from redrb.doctor.storage import ORPHANED_ENTRIES
from redrb.doctor.wording import shown
from redrb.errors import StoreDenied
from redrb.state.findings.weights import EXPIRED_PINS
from redrb.state.findings.wording import counted
from redrb.state.model import State
from redrb.stream.take.scripts import TakeScripts
from redrb.stream.task.store import TaskStore
from redrb.weights.inspection.listing import catalogue_of
from redrb.weights.reading.catalogue import Pin

MOST_WAIT_S = 60.0
"""Longest time for which a repair waits for the deadlines of dead consumers."""

_ROOM_TTL_MS = 1000
_MOST_PAGES = 1000


@dataclass(frozen=True, slots=True)
class Repair:
    """Something that was mended, or could not be.

    Attributes:
        code: Code of the finding.
        subject: What it is about.
        summary: What was done, or why it failed.
        done: Whether it was done.
    """

    code: str
    subject: str
    summary: str
    done: bool = True


def repair(
    client: Client, state: State, examined: Sequence[Examination], names: Sequence[LeftName]
) -> Iterator[Repair]:
    """Mend what is safe to mend; yields each repair when it is done.

    Raises:
        StoreUnavailable: Redis stayed away.
    """
    for task in examined:
        yield from _orphans(task)
        for group in task.consumer_groups:
            yield from _lost(task, group)
        yield from _dead(task)
    for weights in state.weights:
        if weights.readable and weights.expired_pins:
            yield _pins(client, state.namespace, weights.name, weights.expired_pins)
    for left in names:
        done = remove_name(client, state.namespace, left)
        verb = "removed" if done else "could not remove"
        text = f"{verb} the name of {left.kind} {left.name} from the registry"
        yield Repair(NAME_WITHOUT_TASK.code, f"{left.kind} {left.name}", text, done=done)


def _orphans(task: Examination) -> Iterator[Repair]:
    """Remove orphaned entries as a put does that waits for room; it leaves the queue at once."""
    if not task.orphans:
        return
    producer = f"doctor-{uuid.uuid4().hex}"
    before = task.store.client.execute("XLEN", task.store.keys.stream)
    try:
        try:
            left: Examination | None = task
            for _ in range(_MOST_PAGES):
                if left is None or not left.orphans:
                    break
                task.store.run("put/room", [producer, _ROOM_TTL_MS, 0])
                left = examine(task.store)
        finally:
            task.store.run("put/room", [producer, 0, 0])
    except StoreDenied as error:
        yield Repair(ORPHANED_ENTRIES.code, task.subject, str(error), done=False)
        return
    removed = before - task.store.client.execute("XLEN", task.store.keys.stream)
    text = f"removed orphaned entries: {max(removed, task.orphans):,}"
    yield Repair(ORPHANED_ENTRIES.code, task.subject, text)


def _lost(task: Examination, group: ExaminedGroup) -> Iterator[Repair]:
    """Requeue leases whose consumer the task does not know, as the consumer itself would."""
    for consumer, leased in group.lost.items():
        try:
            returned = TakeScripts(task.store).leave(group.name, consumer)
        except StoreDenied as error:
            yield Repair(LEASE_WITHOUT_CONSUMER.code, task.subject, str(error), done=False)
            return
        text = f"let {returned:,} of {counted(leased, 'group')} of {shown(consumer)} wait again"
        done = returned >= leased
        yield Repair(LEASE_WITHOUT_CONSUMER.code, task.subject, text, done=done)


def _dead(task: Examination) -> Iterator[Repair]:
    """Take over from dead consumers and makers, by the heartbeat of a consumer that takes nothing.

    Time without any heartbeat counts a third at most, as Redis may have been away, so dead
    consumers are over after a lease at the latest.
    """
    for group in task.consumer_groups:
        rights = task.lost_rights if group is task.consumer_groups[0] else 0
        if not (group.dead or rights):
            continue
        code = _code_of(group)
        try:
            taken = _take_over(task, group, rights)
        except StoreDenied as error:
            yield Repair(code, task.subject, str(error), done=False)
            continue
        requeued = counted(taken.groups, "group")
        text = f"let {requeued} of dead consumers of {shown(group.name)} wait again"
        if rights:
            text += f", and took {counted(taken.rights, 'right')} back"
        yield Repair(code, task.subject, text, done=taken.all)


def _code_of(group: ExaminedGroup) -> str:
    if any(group.dead.values()):
        return DEAD_CONSUMER.code
    return STALE_CONSUMER.code if group.dead else LOST_RIGHTS.code


@dataclass(slots=True)
class _TakenOver:
    """Groups and rights that were taken over from the dead, and whether these are all."""

    groups: int = 0
    rights: int = 0
    all: bool = False


def _take_over(task: Examination, group: ExaminedGroup, rights: int) -> _TakenOver:
    """Send heartbeats until the dead consumers are forgotten and their rights taken back."""
    store, lease_ms = task.store, task.lease_ms
    scripts, consumer = TakeScripts(store), f"doctor-{uuid.uuid4().hex}"
    incarnation = (store.client.execute("HGET", store.keys.task, "incarnation") or b"").decode()
    lost_before = _lost_rights(store)
    until = time.monotonic() + min(1.0 + 1.5 * lease_ms / 1000, MOST_WAIT_S)
    pause, taken = threading.Event(), _TakenOver()
    try:
        while True:
            _, groups, _ = scripts.heartbeat(group.name, consumer, lease_ms, incarnation)
            taken.groups += groups
            taken.rights = _lost_rights(store) - lost_before
            taken.all = taken.rights >= rights and not _known(store, group)
            if taken.all or time.monotonic() >= until:
                return taken
            pause.wait(0.0 if groups else lease_ms / 6000)
    finally:
        scripts.leave(group.name, consumer)


def _known(store: TaskStore, group: ExaminedGroup) -> bool:
    """Return whether the task still knows one of the dead consumers."""
    if not group.dead:
        return False
    key = f"{store.keys.prefix}consumers:{group.name}"
    return any(score is not None for score in store.client.execute("ZMSCORE", key, *group.dead))


def _lost_rights(store: TaskStore) -> int:
    """Return how many rights were ever taken back from makers."""
    return int(store.client.execute("HGET", f"{store.keys.prefix}admission", "lost") or 0)


def _pins(client: Client, namespace: str, name: str, expired: int) -> Repair:
    """Remove expired pins as a reader does: by a pin, which ends at once."""
    subject = f"weights {name}"
    try:
        with Pin(catalogue_of(client, name, namespace)) as pin:
            pin.route(have=0)
    except StoreDenied as error:
        return Repair(EXPIRED_PINS.code, subject, str(error), done=False)
    return Repair(EXPIRED_PINS.code, subject, f"removed {counted(expired, 'expired pin')}")
