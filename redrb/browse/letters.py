"""`read_letters`: dead letters with their bytes, the newest first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from redrb.browse.calls import view_of
from redrb.browse.records import GroupView, LetterView
from redrb.errors import DecodeError
from redrb.stream.task.dead_letters import DeadLetter, letters_of
from redrb.stream.task.facts import unpack_facts
from redrb.stream.task.numbering import Numbering
from redrb.stream.task.store import TaskStore

_PAGE_BYTES: Final = 4 << 20
_PAGE_LETTERS: Final = 16


def read_letters(
    stores: Sequence[TaskStore], group: str, counted: Callable[[], bool]
) -> Iterator[tuple[GroupView, bytes | None]]:
    """Yield the dead letters of a consumer group, and groups in parts, the newest first.

    `counted` is called for each letter that is looked at, and says whether to go on.
    """
    numbering = Numbering(len(stores))

    def each(number: int, store: TaskStore) -> Iterator[tuple[DeadLetter, GroupView, bytes | None]]:
        newest, count = "+", 1
        while True:
            page = store.client.execute("XREVRANGE", store.keys.dead, newest, "-", "COUNT", count)
            for letter, flat in letters_of(page, decode=False):
                if not counted():
                    return
                if letter.group in (group, ""):
                    name = numbering.ids(number, [letter.id])[0] if letter.id else 0
                    fields = dict(zip(flat[::2], flat[1::2], strict=True))
                    yield letter, _view(name, letter, fields), fields.get(b"g")
            if len(page) < count:
                return
            largest = max(sum(map(len, flat)) for _, flat in page)
            count = max(1, min(_PAGE_LETTERS, _PAGE_BYTES // max(largest, 1)))
            newest = f"({page[-1][0].decode()}"

    parts = [each(number, store) for number, store in enumerate(stores)]
    for _, view, blob in heapq.merge(*parts, key=lambda found: found[0].time, reverse=True):
        yield view, blob


def _view(name: int, letter: DeadLetter, fields: dict[bytes, bytes]) -> GroupView:
    facts: dict[str, Any] = {}
    damaged = ""
    try:
        if packed := fields.get(b"facts"):
            facts.update(unpack_facts(packed))
        facts["size"] = len(fields.get(b"g", b""))
    except DecodeError as error:
        damaged = str(error)
    return view_of(
        name,
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
