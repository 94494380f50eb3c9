"""`Entry`: where a group stands, and its facts, as the script `browse/groups` reports them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

from redrb.browse.records import GroupView, LeaseView, State
from redrb.connection.transport import Reply
from redrb.damage import Reading
from redrb.errors import RedrbError
from redrb.stream.task.dead_letters import place_of
from redrb.stream.task.facts import Facts, unpack_facts


@dataclass(frozen=True, slots=True)
class Entry:
    """A group without its payload.

    Attributes:
        place: Number of its partition.
        seq: Its number there.
        status: Status in which it waits; "" if it does not wait.
        ended: When it became history, in UTC; None if it has not.
    """

    place: int
    seq: int
    facts: Facts | None
    damaged: str
    reads: int
    failed: int
    state: State
    status: str
    lease: LeaseView | None
    ended: datetime | None

    @property
    def size(self) -> int:
        """Bytes of its payload, as its facts say; 0 if they do not."""
        size = self.facts.get("size") if self.facts else None
        return max(size, 0) if isinstance(size, int) else 0

    @property
    def version(self) -> int | None:
        """Its oldest policy version."""
        return _whole(self.facts.get("version")) if self.facts else None

    def view(self, group: int, *, newest: int | None) -> GroupView:
        """Return what is known of the group without its payload."""
        facts: dict[str, Any] = dict(self.facts or {})
        version, token = self.version, facts.get("newest")
        return GroupView(
            id=group,
            state=self.state,
            status=self.status or _text(facts.get("status")),
            size=self.size,
            samples_total=_whole(facts.get("samples")) or 0,
            oldest_version=version,
            newest_version=_whole(token),
            staleness=None if newest is None or version is None else newest - version,
            priority=_number(facts.get("priority")),
            tags=_tags(facts.get("tags")),
            reads=self.reads,
            failed_deliveries=self.failed,
            ended="" if self.ended is None else self.ended.isoformat(),
            lease=self.lease,
            damaged=self.damaged,
        )


@dataclass(frozen=True, slots=True)
class EntryPage:
    """A page of a partition.

    Attributes:
        place: Where the next page begins; "" at the end.
        total: Groups of the source.
        version: Newest weight version that the task knows.
    """

    place: str
    looked: int
    total: int
    incarnation: str
    version: int | None
    entries: list[Entry]


def page_of(reply: Reply, task: str, number: int) -> EntryPage | None:
    """Return the page in a reply of `browse/groups`; None if the task has no such index."""
    if reply == [b"unindexed"]:
        return None
    if not reply:
        return EntryPage("", 0, 0, "", None, [])
    with Reading(f"the records of task {task!r}"):
        next_place, looked, total, incarnation, version, *entries = reply
        return EntryPage(
            place=next_place.decode(),
            looked=looked,
            total=total,
            incarnation=incarnation.decode(errors="replace"),
            version=int(version) if version else None,
            entries=[_entry(number, *values) for values in entries],
        )


def _entry(
    place: int, seq: int, packed: bytes, reads: Reply, failed: Reply, state: bytes, *more: Reply
) -> Entry:
    """Return a group; one whose record cannot be read is marked as damaged."""
    entry = Entry(place, seq, None, "", 0, 0, "damaged", "", None, None)
    try:
        with Reading("the record of a group"):
            name = cast(State, state.decode())
            return replace(
                entry,
                facts=unpack_facts(packed) if packed else None,
                reads=int(reads),
                failed=int(failed),
                state=name,
                status=_text(more[0]) if name == "waiting" else "",
                lease=_lease(*more) if name == "leased" else None,
                ended=datetime.fromtimestamp(float(more[0]) / 1000, UTC)
                if name == "history"
                else None,
            )
    except RedrbError as error:
        return replace(entry, damaged=str(error))


def _lease(slot: bytes, idle_ms: int) -> LeaseView:
    """Return the lease in a slot, whose name is `<consumer>/<number>`."""
    consumer = slot.decode(errors="replace").rpartition("/")[0]
    host, pid = place_of(consumer)
    return LeaseView(consumer, host, pid, idle_ms / 1000)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else ""


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _number(value: object) -> float | None:
    """Return a finite number; None for anything else, as JSON has neither infinity nor NaN."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _tags(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {}
    kinds = str | int | bool
    return {
        _text(name): each if isinstance(each, kinds) else _number(each)
        for name, each in value.items()
        if isinstance(each, kinds | float)
    }
