"""Dead letters of a task are read, requeued, dropped and changed, some at a time."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from redrb.errors import ConfigError, DecodeError, StoreError
from redrb.stream.task.calls import DropLetters, Requeue
from redrb.stream.task.entries import texts_of
from redrb.stream.task.store import TaskStore
from redrb.unpacking import Reading

if TYPE_CHECKING:
    from redrb.experience import BufferItem

LETTERS_OF_A_CALL = 20
"""Most dead letters that one script call requeues or deletes."""


def requeue(store: TaskStore, group: str, ids: Iterable[int]) -> dict[int, int]:
    """Put dead letters again, by their ids; returns new ids by old.

    Args:
        ids: Their ids; those without a letter, and 0, are left out.

    Raises:
        ConfigError: A letter has no place in the order that the task has now.
    """
    found: dict[int, int] = {}
    for seqs in texts_of(sorted({seq for seq in ids if seq > 0}), LETTERS_OF_A_CALL):
        for page in store.pages(Requeue(group, seqs)):
            if page.unsortable is not None:
                raise _no_place(store.task, *page.unsortable)
            found |= dict(page.ids)
    return found


def drop_letters(store: TaskStore, group: str, ids: Iterable[int]) -> int:
    """Delete dead letters of a task for good; returns how many.

    Args:
        ids: Their ids; 0 stands for all groups in parts that were never put.
    """
    wanted = dict.fromkeys(ids)
    dropped = _drop_unput(store) if 0 in wanted else 0
    pages = texts_of([seq for seq in wanted if seq > 0], LETTERS_OF_A_CALL)
    return dropped + sum(store.call(DropLetters(group, seqs)) for seqs in pages)


def _drop_unput(store: TaskStore) -> int:
    """Delete the dead letters of groups in parts, which no consumer group gave up."""
    entries = [fields[b"entry"].decode() for letter, fields in letters_in(store) if not letter.id]
    pages = texts_of(entries, LETTERS_OF_A_CALL)
    return sum(store.call(DropLetters("", page)) for page in pages)


def _no_place(task: str, order: str, former: str) -> ConfigError:
    """Return the error for dead letters that were given up in another order of the task."""
    given_up = f"in the order {former!r}" if former else "before the order changed"
    return ConfigError(
        f"some of these dead letters of task {task!r} cannot be requeued: their "
        f"groups were given up {given_up}, and Redis cannot compute their scores in the order "
        f"{order!r}. Put their samples as new groups, stream.put(letter.items), and drop the "
        "letters."
    )


LETTERS_OF_A_PAGE = 16
PAGE_BYTES = 4 << 20
"""Bytes of a page to aim at; a single letter may be larger."""

_log = logging.getLogger("redrb")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A group that a consumer group gave up.

    Attributes:
        id: Id that the group had in the task; 0 for a group in parts that was never put.
        group: Consumer group that gave it up; "" for a group in parts.
        reason: The reason given to `reject`, or how many deliveries failed, or why a group in parts
            was not put.
        exception: Name of the class of the exception because of which the last delivery failed, or
            was rejected; None if none was given, as when its process died.
        message: Message of that exception; "" without one.
        consumer: Name of the consumer that had it last.
        host: Host name of that consumer.
        pid: Number of its process there; None if its name does not tell.
        time: When the group was given up, by the server's clock, in UTC.
        deliveries: Deliveries up to then, the last one included.
        failed_deliveries: Those of them that ended without acknowledgement, release or rejection.
        incarnation: Incarnation of the task in which the group had that id.
        items: Samples of the group; None when they cannot be decoded.
    """

    id: int
    group: str
    reason: str
    exception: str | None
    message: str
    consumer: str
    host: str
    pid: int | None
    time: datetime
    deliveries: int
    failed_deliveries: int
    incarnation: str
    items: list[BufferItem] | None


def find_letters(
    store: TaskStore,
    *,
    group: str | None = None,
    text: str = "",
    ids: Collection[int] = (),
    unput: bool = False,
) -> Iterator[DeadLetter]:
    """Yield dead letters, the newest first, without samples.

    Args:
        group: Consumer group that gave them up; None: any.
        text: Text in the reason, or in the message or class of the exception.
        ids: Their ids; none given: any.
        unput: Also those of groups in parts, which no consumer group gave up.
    """
    for letter, _ in letters_in(store):
        told = (letter.reason, letter.message, letter.exception or "")
        if (
            (group in (None, letter.group) or (unput and not letter.group))
            and any(text in one for one in told)
            and (not ids or letter.id in ids)
        ):
            yield letter


def letters_in(store: TaskStore) -> Iterator[tuple[DeadLetter, Mapping[bytes, bytes]]]:
    """Yield all dead letters of a task, newest first, and the fields of each entry.

    They are read in pages, and have no samples. An entry that redrb did not write is passed over,
    and logged. The field `entry` is the id of the entry.
    """
    newest, count = "+", 1
    while True:
        page = store.client.execute("XREVRANGE", store.keys.dead, newest, "-", "COUNT", count)
        for entry_id, flat in page:
            try:
                letter, fields = _parsed(entry_id, flat)
            except StoreError as error:
                _log.warning("dead letter %s is passed over: %s", entry_id.decode(), error)
                continue
            yield letter, fields
        if len(page) < count:
            return
        largest = max(sum(map(len, flat)) for _, flat in page)
        count = max(1, min(LETTERS_OF_A_PAGE, PAGE_BYTES // max(largest, 1)))
        newest = f"({page[-1][0].decode()}"


def with_samples(letter: DeadLetter, fields: Mapping[bytes, bytes]) -> DeadLetter:
    """Return a letter with its samples, from the fields of its entry, if they can be decoded."""
    from redrb.codec import decode_items, parse_group

    try:
        items = decode_items(parse_group(fields[b"g"])) if b"g" in fields else None
    except DecodeError:
        return letter
    return replace(letter, items=items)


@Reading("an entry of the dead-letter stream")
def _parsed(entry_id: bytes, flat: Sequence[bytes]) -> tuple[DeadLetter, Mapping[bytes, bytes]]:
    fields = {b"entry": entry_id, **dict(zip(flat[::2], flat[1::2], strict=True))}
    consumer = fields.get(b"consumer", b"").decode(errors="replace")
    host, pid = place_of(consumer)
    letter = DeadLetter(
        id=int(fields[b"seq"]),
        group=fields[b"group"].decode(),
        reason=fields[b"reason"].decode(errors="replace"),
        exception=fields.get(b"exception", b"").decode(errors="replace") or None,
        message=fields.get(b"message", b"").decode(errors="replace"),
        consumer=consumer,
        host=host,
        pid=pid,
        time=datetime.fromtimestamp(int(entry_id.partition(b"-")[0]) / 1000, UTC),
        deliveries=int(fields[b"deliveries"]),
        failed_deliveries=int(fields[b"failed_deliveries"]),
        incarnation=fields.get(b"incarnation", b"").decode(),
        items=None,
    )
    return letter, fields


def place_of(consumer: str) -> tuple[str, int | None]:
    """Return host and process of a consumer, whose name is `<host>-<pid>-<random>`."""
    host, pid, _ = (consumer.rsplit("-", 2) + ["", ""])[:3]
    return host, int(pid) if pid.isdecimal() and len(pid) < 16 else None
