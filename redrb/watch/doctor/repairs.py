"""Repairs that are safe at any time: they lose no experience, and living processes notice nothing.

What was found is some time old when it is repaired, and workers go on meanwhile. So the scripts
that repair look again before they change anything.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from redrb.connection import Client
from redrb.errors import StoreError, StoreUnavailable
from redrb.lua.calls import Call, Found
from redrb.stream.heartbeat import LONGEST_PERIOD_S
from redrb.stream.task.settings import STORED_DEFAULTS, WIRE_FORMAT
from redrb.watch.doctor.calls import RebuildPuts, RebuildSettings, RemoveOrphans, ReturnLost
from redrb.watch.doctor.examination import Examination, ExaminedGroup
from redrb.watch.doctor.registry_names import LeftName, remove_name
from redrb.watch.doctor.takeover import take_over_consumers, take_rights_back
from redrb.watch.state.findings.wording import shown
from redrb.watch.state.model import State
from redrb.watch.state.weights import read_weights
from redrb.weights.reading.catalogue import Catalogue, Pin
from redrb.words import counted

if TYPE_CHECKING:
    from redrb.watch.doctor.tables import TableExamination

TWO_HEARTBEATS_S = 2 * LONGEST_PERIOD_S
"""Time in which a living consumer whose record was lost sends a heartbeat, and is known again."""

_MOST_PAGES = 1000
_MOST_PINS = 100

_UNREPAIRED: Final = {
    "groups": (
        "nothing was changed: the facts of stored groups are lost, too, so nobody can tell groups "
        "from entries of failed puts. Trainers that run can still take the groups; after that, or "
        "to give them up, delete the task: redrb rm TASK"
    ),
    "stream": (
        "nothing was changed: the stream, which held the groups, is lost, too. Load the data of "
        "the server from a backup, or delete the task: redrb rm TASK"
    ),
}

F = TypeVar("F", bound=Found)

Outcome: TypeAlias = tuple[str, bool]
"""What was done, and whether this is all."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Something that was mended, or could not be."""

    code: str
    subject: str
    summary: str
    done: bool = True


def repair(
    client: Client,
    state: State,
    examined: Sequence[Examination],
    names: Sequence[LeftName],
    tables: Sequence[TableExamination] = (),
) -> Iterator[Repair]:
    """Mend what is safe to mend; yields each repair when it is done, or has failed."""
    for task in examined:
        for code, mend in _of_task(task):
            yield _attempted(code, task.subject, mend)
    for table in tables:
        from redrb.watch.doctor.tables import delete_orphans, delete_trash  # imports numpy

        place = client, state.namespace, table
        if table.orphans:
            yield _attempted("orphaned-values", table.subject, partial(delete_orphans, *place))
        if table.trash:
            yield _attempted("undeleted-values", table.subject, partial(delete_trash, *place))
    for weights in state.weights:
        if weights.readable and weights.expired_pins:
            mend = partial(_remove_pins, client, state.namespace, weights.name)
            yield _attempted("expired-pins", f"weights {weights.name}", mend)
    for left in names:
        mend = partial(remove_name, client, state.namespace, left)
        yield _attempted("name-without-task", f"{left.kind} {left.name}", mend)


def _of_task(task: Examination) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    if task.lost_settings:
        yield "lost-settings", partial(_rebuild_settings, task)
    if task.lost_puts:
        yield "lost-puts", partial(_rebuild_puts, task)
    if task.orphans:
        yield "orphaned-entries", partial(_remove_orphans, task)
    for group in task.consumer_groups:
        if group.lost:
            yield "lease-without-consumer", partial(_return_lost, task, group)
    if task.lost_rights:
        yield "lost-rights", partial(take_rights_back, task)
    for group in task.consumer_groups:
        if group.dead:
            kind = "dead-consumer" if any(group.dead.values()) else "stale-consumer"
            yield kind, partial(take_over_consumers, task, group)


def _attempted(code: str, subject: str, mend: Callable[[], Outcome]) -> Repair:
    try:
        summary, done = mend()
    except StoreUnavailable:
        raise
    except StoreError as error:  # such as a missing permission, or a server at its memory limit
        return Repair(code, subject, shown(str(error), longest=400), done=False)
    return Repair(code, subject, summary, done=done)


def _in_pages(task: Examination, call: Call[F], most: int) -> tuple[int, F]:
    """Run a call until it has no more to do, `most` times at most; returns the sum, and the end."""
    pages = list(islice(task.store.pages(call, all_of_them=False), most))
    return sum(page.found for page in pages), pages[-1]


def _rebuild_settings(task: Examination) -> Outcome:
    defaults = {"format": str(WIRE_FORMAT), **STORED_DEFAULTS}
    groups = task.store.call(RebuildSettings(uuid.uuid4().hex, defaults))
    text = f"kept {counted(groups, 'group')}; open the task with its order, tags and limits again"
    return text, True


def _rebuild_puts(task: Examination) -> Outcome:
    removed, last = _in_pages(task, RebuildPuts(), _MOST_PAGES)
    if last.refused:
        return _UNREPAIRED[last.refused], False
    return f"rebuilt the record of puts, removed orphaned entries: {removed:,}", not last.more


def _remove_orphans(task: Examination) -> Outcome:
    removed, last = _in_pages(task, RemoveOrphans(), _MOST_PAGES)
    return f"removed orphaned entries: {removed:,}", not last.more


def _return_lost(task: Examination, group: ExaminedGroup) -> Outcome:
    """Requeue leases whose consumer the task does not know, unless it shows that it lives."""
    threading.Event().wait(TWO_HEARTBEATS_S)
    texts, done = [], True
    for consumer, slots in group.lost.items():
        returned = 0
        for slot, leased in slots.items():
            # each call but the last requeues at least one group
            found, last = _in_pages(task, ReturnLost(group.name, consumer, slot), leased + 1)
            returned, done = returned + found, done and not last.more
        leased = sum(slots.values())
        texts.append(f"{returned:,} of {counted(leased, 'group')} of {shown(consumer)}")
    return f"let {', '.join(texts)} wait again", done


def _remove_pins(client: Client, namespace: str, name: str) -> Outcome:
    """Remove expired pins as a reader does, some at a time: by a pin, which ends at once."""
    catalogue = Catalogue(client, name, namespace)

    def expired() -> int:
        now_s, _ = map(int, catalogue.client.execute("TIME"))
        found = read_weights(client, namespace, [name], now_s)
        return sum(weights.expired_pins for weights in found)

    before = left = expired()
    with Pin(catalogue) as pin:
        for _ in range(_MOST_PINS):
            if not left:
                break
            pin.route(have=0)
            left = expired()
    return f"removed {counted(before - left, 'expired pin')}", not left
