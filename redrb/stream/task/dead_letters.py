"""`dead_letters`: reads the dead-letter stream of a task."""

from __future__ import annotations

from dataclasses import dataclass

from redrb.codec import decode_items, parse_group
from redrb.errors import DecodeError, StoreError
from redrb.experience import BufferItem
from redrb.stream.task.store import TaskStore


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A group that a consumer group gave up.

    Attributes:
        id: Id that the group had in the task.
        group: Consumer group that gave it up.
        reason: The reason given to `reject`, or that deliveries failed.
        failed_deliveries: Deliveries that ended without acknowledgement.
        incarnation: Incarnation of the task in which the group had that id.
        items: Samples of the group; None when they cannot be decoded.
    """

    id: int
    group: str
    reason: str
    failed_deliveries: int
    incarnation: str
    items: list[BufferItem] | None


def dead_letters(store: TaskStore, count: int) -> list[DeadLetter]:
    """Return the newest `count` dead letters of a task, newest first."""
    if not count:
        return []
    reply = store.client.execute("XREVRANGE", store.keys.dead, "+", "-", "COUNT", count)
    return [_dead_letter(dict(zip(flat[::2], flat[1::2], strict=True))) for _, flat in reply]


def _dead_letter(fields: dict[bytes, bytes]) -> DeadLetter:
    try:
        items = decode_items(parse_group(fields[b"g"])) if b"g" in fields else None
    except DecodeError:
        items = None
    try:
        return DeadLetter(
            id=int(fields[b"seq"]),
            group=fields[b"group"].decode(),
            reason=fields[b"reason"].decode(errors="replace"),
            failed_deliveries=int(fields[b"failed_deliveries"]),
            incarnation=fields.get(b"incarnation", b"").decode(),
            items=items,
        )
    except (KeyError, ValueError) as error:
        raise StoreError(
            f"the dead-letter stream holds an entry that redrb did not write: {error}"
        ) from error
