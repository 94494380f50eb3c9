"""`Entry`: where a group stands, and its facts, as the script `browse/groups` reports them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from redrb.browse.records import GroupView, LeaseView, State
from redrb.connection.transport import Reply
from redrb.damage import Reading
from redrb.errors import RedrbError
from redrb.lua.calls import Call
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


class Browsed(msgspec.Struct, frozen=True):
    """A group as the script reports it.

    Attributes:
        seq: Its number in its partition.
        state: Where it stands.
        reads: Acknowledged deliveries; None if their number is damaged, as `failed`.
        failed: Failed deliveries.
        status: Status in which it waits.
        slot: Slot of its lease, which was delivered `idle_ms` ago.
        ended_ms: When it became history.
    """

    seq: int
    state: State
    reads: int | None = None
    failed: int | None = None
    status: str = ""
    slot: str = ""
    idle_ms: int = 0
    ended_ms: float | None = None


class EntryPage(msgspec.Struct, frozen=True):
    """A page of a partition.

    Attributes:
        indexed: False: the task does not sort groups by version.
        place: Where the next page begins; "" at the end.
        total: Groups of the source.
        version: Newest weight version that the task knows.
        groups: The groups that match.
        facts: Their facts, packed; b"" where there are none.
    """

    indexed: bool = True
    place: str = ""
    looked: int = 0
    total: int = 0
    incarnation: str = ""
    version: int | None = None
    groups: list[Browsed] = []
    facts: list[bytes] = []

    def entries(self, number: int) -> Iterator[Entry]:
        """Yield the groups of a partition with this number."""
        for group, packed in zip(self.groups, self.facts, strict=True):
            yield _entry(number, group, packed)


class Browse(Call[EntryPage], frozen=True):
    """Read where groups stand, for people who look at them: a page.

    Attributes:
        group: Consumer group.
        source: "newest": all stored groups, the newest first; "leased"; "history": the newest
            first; "stalest": completed groups that wait, by oldest policy version; "given"; or a
            status: groups that wait in it, in the task's order.
        place: The place that the last page has returned.
        most: Groups to return, at least, if there are as many; a query returns all that match of
            those that a page looks at.
        where: Query that the groups match, as Redis reads it; "" for any.
        seqs: The groups that are given.
    """

    script: ClassVar = "browse/groups"
    group: str
    source: str
    place: str
    most: int
    where: str
    seqs: list[str]

    def read(self, reply: Reply) -> EntryPage:
        """Return the page of a reply."""
        page = super().read(reply)
        return msgspec.structs.replace(page, facts=reply[1:]) if page.groups else page


def _entry(place: int, group: Browsed, packed: bytes) -> Entry:
    """Return a group; one whose record cannot be read is marked as damaged."""
    entry = Entry(place, group.seq, None, "", 0, 0, "damaged", "", None, None)
    try:
        with Reading("the record of a group"):
            ended = group.ended_ms
            return replace(
                entry,
                facts=unpack_facts(packed) if packed else None,
                reads=_counted(group.reads),
                failed=_counted(group.failed),
                state=group.state,
                status=group.status,
                lease=_lease(group) if group.state == "leased" else None,
                ended=None if ended is None else datetime.fromtimestamp(ended / 1000, UTC),
            )
    except RedrbError as error:
        return replace(entry, damaged=str(error))


def _counted(number: int | None) -> int:
    if number is None:
        raise ValueError("the number of its deliveries is damaged")
    return number


def _lease(group: Browsed) -> LeaseView:
    """Return the lease in a slot, whose name is `<consumer>/<number>`."""
    consumer = group.slot.rpartition("/")[0]
    host, pid = place_of(consumer)
    return LeaseView(consumer, host, pid, group.idle_ms / 1000)


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
