"""The calls of the scripts in `redrb/lua/put`: groups are stored exactly once, or wait for room.

Every call may be repeated as it is when a connection breaks, and is; the headers of the scripts say
why that is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from redrb.codec import EncodedGroup
from redrb.connection.client import Request
from redrb.connection.transport import Replication, Reply, packed, without_errors
from redrb.errors import StoreError
from redrb.lua.calls import Call, Found
from redrb.stream.put.batch import Claim
from redrb.stream.task.entries import ID_BASE
from redrb.stream.task.store import TaskStore

MOST_EVICTED = 32
"""Most groups that one call evicts, unless its put has more: a lowered limit needs several."""

PutOutcome: TypeAlias = Literal[
    "ok", "again", "full", "never", "gone", "changed", "forgotten", "more", "known", "past", "ended"
]


class PutReply(msgspec.Struct, frozen=True):
    """The reply to a put.

    Attributes:
        outcome: "ok"; "again": an earlier attempt was stored; "full"; "never": the groups exceed
            the limits even when nothing is stored; "gone": the task was deleted; "changed": the
            groups were prepared for other settings than the task's, or have another kind;
            "forgotten": the task has no record of the producer, and the put names an old epoch, so
            a repetition would not be recognized; "more": entries of failed puts are being
            removed, and the put is to be sent again; "known": a forwarded group is stored; "past":
            it left its task; "ended": the parts of the group have become another group, or none, or
            there are more of them now.
        last: Id of the last group stored; with "ended", of the group that the parts have become,
            or 0.
        stored: Groups stored; an earlier attempt may have stored another number.
        room: Groups that may still be put; -1 without a limit.
        setting: What leaves no room: "limit", "max_waiting" or "max_bytes"; or "memory": the server
            is at its memory limit.
        expired: Groups that were too stale on arrival.
        epoch: With "forgotten", the epoch of now.
        origin: With "past", SHA-1 of the row of the origin, which may hold any bytes.
    """

    outcome: PutOutcome
    last: int = 0
    stored: int = 0
    room: int = -1
    setting: str = ""
    expired: int = 0
    epoch: int = 0
    origin: str = ""


class Put(Call[PutReply], frozen=True):
    """Count the groups that the same transaction has just added, or take them out again.

    Beside it go the facts of each group, packed; see `redrb/lua/include/facts.lua`.

    Attributes:
        operation: Counts up by one a put of this producer; a repetition has the same one.
        epoch: Of the task when this put was first sent; all its repetitions name the same one.
        samples, nbytes: Of all groups.
        filtered: Groups that a filter dropped.
        expired: Groups that were too stale to be sent.
        revision: Of the settings that the facts were made for; "" fits all.
        status: Status of all groups; "" if they have different ones.
        kind: Fields and dtypes of completed groups; "": any.
        rights: Of admission, see `Rights.record`.
        sources: Of forwarded groups, see `Sources.record`.
        parts: Claim on the parts that the put's one group is made of.
        saved: Of groups of a saved task: see `redrb/stream/saving/resuming.py`.
    """

    script: ClassVar = "put/put"
    producer: str
    operation: int
    epoch: int
    samples: int
    nbytes: int
    filtered: int
    expired: int
    revision: str
    status: str
    kind: str
    rights: dict[str, Any] | None
    sources: dict[str, Any] | None
    parts: Claim | None
    saved: dict[str, Any] | None = None

    def storing(
        self,
        store: TaskStore,
        groups: Sequence[EncodedGroup],
        facts: Sequence[bytes],
        replication: Replication,
        *,
        evict: Evict | None,
        whole: bool,
    ) -> Request[PutReply]:
        """Return the request that stores groups: their bytes go past Lua, in the same transaction.

        Args:
            replication: Lets replicas confirm the put.
            evict: Runs first.
            whole: Send the texts of the scripts. Where one is missing all the same, the next
                attempt removes the entries of this one.
        """
        head = _head(store.keys.stream)
        made = store.client.transaction(store.keys.none)
        if evict is not None:
            evict.add_to(made, store.script_keys)
        for group in groups:
            made.add_payload(head, 6, [group.blob], len(group.blob))
        self.add_to(made, store.script_keys, *facts)
        made.add("EXEC")
        replication.add_to(made)

        def result(replies: list[Reply]) -> PutReply:
            done, confirmed = replication.divide(replies)
            results = transaction_results(done)
            reply = self.read(results[-1])
            counted = f"{ID_BASE}{reply.last}".encode()
            if groups and reply.outcome == "ok" and results[-2] != counted:
                raise StoreError(
                    f"task {store.task!r} counts groups that its stream does not hold, so this put "
                    f"is not stored: run `redrb doctor {store.task} --repair`, and put again."
                )
            if reply.outcome in ("ok", "again", "known", "ended"):
                replication.check(confirmed)
            return reply

        return Request(store.client, made.with_texts() if whole else made, result)


class Evict(Call[Found], frozen=True):
    """Evict waiting groups until a put has room; nothing if the put was stored, or may have been.

    The reply says how many were evicted, and whether another call may evict more. A call that is
    repeated after a broken connection may evict more.

    Attributes:
        producer, operation, epoch: Those of the put.
        groups, nbytes: Groups of the put, and their bytes.
        least: Fewest groups to evict, for a server at its memory limit.
        most: Most groups to evict, unless `groups` or `least` is more.
        stalest: Whether the groups of the lowest policy version go first, not the oldest.
    """

    script: ClassVar = "put/evict"
    producer: str
    operation: int
    epoch: int
    groups: int
    nbytes: int
    least: int
    most: int = MOST_EVICTED
    stalest: bool = False


class RoomReply(msgspec.Struct, frozen=True):
    """How many groups may be put now, and the setting that leaves no room for more, or ""."""

    granted: int
    setting: str


class AskRoom(Call[RoomReply], frozen=True):
    """Queue a producer for room; it is woken when there is some, and asks again.

    Attributes:
        ttl_ms: How long the place in the queue or the granted room is kept; 0: leave the queue.
        sizes: Bytes of each group to put.
    """

    script: ClassVar = "put/room"
    producer: str
    ttl_ms: int
    sizes: Sequence[int] = ()


class Adopt(Call[bool], frozen=True):
    """Replace the row of an origin, unless another process has done so.

    Attributes:
        row: SHA-1 of its row, as a put has returned it.
        incarnation, floor, kept: Of the origin, as its task says now; see `OriginState`.
    """

    script: ClassVar = "put/adopt"
    origin: str
    row: str
    incarnation: str
    floor: int
    kept: tuple[str, ...]


@lru_cache(maxsize=256)
def _head(stream: str) -> bytes:
    """Return what stands before the bytes of each group, of as many tasks as a process puts to."""
    return packed("XADD", stream, "NOMKSTREAM", "*", "g")


def transaction_results(replies: list[Reply]) -> list[Reply]:
    """Return the replies inside a transaction, or raise the error that stopped it."""
    return without_errors(without_errors(replies)[-1])
