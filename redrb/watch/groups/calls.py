"""`Browse`: the call of the script that reads where groups stand; views of groups and letters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from redrb.connection.transport import Reply
from redrb.errors import DecodeError, RedrbError
from redrb.lua.calls import Call
from redrb.stream.task.dead_letters import DeadLetter, place_of
from redrb.stream.task.entries import unpack_facts
from redrb.unpacking import Reading
from redrb.watch.groups.records import GroupView, LeaseView, LetterView, State


class Browsed(msgspec.Struct, frozen=True):
    """A group as the script reports it.

    Attributes:
        reads: Acknowledged deliveries; None if their number is damaged, as `failed`.
        slot: Slot of its lease, `<consumer>/<number>`, which was delivered `idle_ms` ago.
    """

    seq: int
    state: State
    reads: int | None = None
    failed: int | None = None
    status: str = ""
    slot: str = ""
    idle_ms: int = 0

    def view(self, packed: bytes) -> GroupView:
        """Return what is known of the group without its payload.

        `packed` are its facts. A record that cannot be read is damage.
        """
        facts: Mapping[str, Any] = {}
        try:
            with Reading("the record of a group"):
                if packed:
                    facts = unpack_facts(packed)
                if self.reads is None or self.failed is None:
                    raise ValueError("the number of its deliveries is damaged")
                return view_of(
                    self.seq,
                    self.state,
                    facts,
                    self.status,
                    reads=self.reads,
                    failed_deliveries=self.failed,
                    lease=self._lease() if self.state == "leased" else None,
                )
        except RedrbError as error:
            return GroupView(self.seq, "damaged", damaged=str(error))

    def _lease(self) -> LeaseView:
        consumer = self.slot.rpartition("/")[0]
        return LeaseView(consumer, *place_of(consumer), self.idle_ms / 1000)


class BrowsedPage(msgspec.Struct, frozen=True):
    """A page of the groups of a task.

    Attributes:
        indexed: False: the task does not sort groups by version.
        place: Where the next page begins; "" at the end.
        version: Newest weight version that the task knows.
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

    def views(self) -> Iterator[GroupView]:
        """Yield the groups."""
        for group, packed in zip(self.groups, self.facts, strict=True):
            yield group.view(packed)


class Browse(Call[BrowsedPage], frozen=True):
    """Read where groups stand, for people who look at them: a page.

    Attributes:
        source: "newest": all stored groups, the newest first; "leased"; "stalest": completed groups
            that wait, by oldest policy version; "given"; or a status: groups that wait in it, in
            the task's order.
        place: The place that the last page has returned.
        most: Groups to return, at least, if there are as many; a query returns all that match of
            those that a page looks at.
        where: Query that the groups match, as Redis reads it; "" for any.
    """

    script: ClassVar = "browse/groups"
    group: str
    source: str
    place: str
    most: int
    where: str
    seqs: list[str]

    def read(self, reply: Reply) -> BrowsedPage:
        """Return the page of a reply."""
        page = super().read(reply)
        return msgspec.structs.replace(page, facts=reply[1:]) if page.groups else page


def view_of(
    group: int, state: State, facts: Mapping[str, Any], status: str, **others: Any
) -> GroupView:
    """Return a view of a group by its facts; `others` are fields of which these say nothing."""
    size, first = facts.get("size"), _whole(facts.get("first"))
    return GroupView(
        group,
        state,
        status or _text(facts.get("status")),
        size=max(size, 0) if isinstance(size, int) else 0,
        samples_total=_whole(facts.get("samples")) or 0,
        oldest_version=_whole(facts.get("version")),
        newest_version=_whole(facts.get("newest")),
        priority=_number(facts.get("priority")),
        tags=_tags(facts.get("tags")),
        notes=() if first is None else (f"it was requeued; its first id was {first}",),
        **others,
    )


def letter_view(letter: DeadLetter, fields: Mapping[bytes, bytes]) -> GroupView:
    """Return a view of a dead letter, by the fields of its entry."""
    facts: dict[str, Any] = {}
    damaged = ""
    try:
        if packed := fields.get(b"facts"):
            facts.update(unpack_facts(packed))
        facts["size"] = len(fields.get(b"g", b""))
    except DecodeError as error:
        damaged = str(error)
    return view_of(
        letter.id,
        "dead" if letter.id else "parts",
        facts,
        fields.get(b"status", b"").decode(errors="replace"),
        reads=letter.deliveries - letter.failed_deliveries,
        failed_deliveries=letter.failed_deliveries,
        damaged=damaged,
        letter=LetterView(
            group=letter.group,
            reason=letter.reason,
            exception=letter.exception or "",
            message=letter.message,
            consumer=letter.consumer,
            time=letter.time.isoformat(),
            deliveries=letter.deliveries,
            failed_deliveries=letter.failed_deliveries,
        ),
    )


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
