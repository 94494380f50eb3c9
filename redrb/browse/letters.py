"""`read_letters`: dead letters with their bytes, the newest first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from redrb.browse.entries import Entry
from redrb.browse.records import LetterView
from redrb.errors import DecodeError
from redrb.stream.task.dead_letters import DeadLetter, letters_of
from redrb.stream.task.facts import Facts, unpack_facts
from redrb.stream.task.store import TaskStore

_PAGE_BYTES: Final = 4 << 20
_PAGE_LETTERS: Final = 16

Letter = tuple[int, DeadLetter, Entry, bytes | None]
"""Number of the partition, the letter, its group without payload, and its bytes."""


def read_letters(
    stores: Sequence[TaskStore], group: str, counted: Callable[[], bool]
) -> Iterator[Letter]:
    """Yield the dead letters of a consumer group, and groups in parts, the newest first.

    `counted` is called for each letter that is looked at, and says whether to go on.
    """
    parts = [_each(store, number, group, counted) for number, store in enumerate(stores)]
    return iter(heapq.merge(*parts, key=lambda found: found[1].time, reverse=True))


def view_of_letter(letter: DeadLetter) -> LetterView:
    """Return why a group is a dead letter."""
    return LetterView(
        group=letter.group,
        reason=letter.reason,
        exception=letter.exception or "",
        message=letter.message,
        consumer=letter.consumer,
        time=letter.time.isoformat(),
        deliveries=letter.deliveries,
        failed_deliveries=letter.failed_deliveries,
    )


def _each(
    store: TaskStore, number: int, group: str, counted: Callable[[], bool]
) -> Iterator[Letter]:
    newest, count = "+", 1
    while True:
        page = store.client.execute("XREVRANGE", store.keys.dead, newest, "-", "COUNT", count)
        for letter, flat in letters_of(page, decode=False):
            if not counted():
                return
            if letter.group in (group, ""):
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                blob = fields.get(b"g")
                yield number, letter, _entry(number, letter, fields, blob), blob
        if len(page) < count:
            return
        largest = max(sum(map(len, flat)) for _, flat in page)
        count = max(1, min(_PAGE_LETTERS, _PAGE_BYTES // max(largest, 1)))
        newest = f"({page[-1][0].decode()}"


def _entry(
    number: int, letter: DeadLetter, fields: dict[bytes, bytes], blob: bytes | None
) -> Entry:
    facts: Facts | None = None
    damaged = ""
    try:
        packed = fields.get(b"facts")
        facts = unpack_facts(packed) if packed else {"size": 0, "samples": 0, "status": ""}
        facts["size"] = len(blob or b"")
    except DecodeError as error:
        damaged = str(error)
    return Entry(
        place=number,
        seq=letter.id,
        facts=facts,
        damaged=damaged,
        reads=letter.deliveries - letter.failed_deliveries,
        failed=letter.failed_deliveries,
        state="dead" if letter.id else "parts",
        status=fields.get(b"status", b"").decode(errors="replace"),
        lease=None,
        ended=None,
    )
