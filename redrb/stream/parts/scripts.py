"""Runs the scripts of `redrb/lua/parts`: parts of groups are stored, and removed.

Every method may be repeated with the same arguments when a connection breaks, and is: see the
headers of the scripts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgpack

from redrb.connection.request import Request
from redrb.connection.transport import Argument, Pipeline, Reply, packed
from redrb.damage import Reading
from redrb.experience.records import Scalar
from redrb.lua.scripts import add_to, load, scripted_request
from redrb.stream.parts.part import Part
from redrb.stream.put.replication import Replication
from redrb.stream.put.rights import Rights
from redrb.stream.put.scripts import transaction_results
from redrb.stream.take.cause import Cause
from redrb.stream.task.store import TaskStore
from redrb.unpacking import unpack

GRACE_MS = 10_000
"""Time after which another process puts a group whose parts are all there: its maker has died."""

PartOutcome: TypeAlias = Literal["waits", "whole", "ended", "differs", "full", "unadmitted", "gone"]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a group that are there.

    Attributes:
        key: Its key.
        of: Number of parts that it should have.
        least: Fewest with which it is delivered.
        bury: Whether it becomes a dead letter if it cannot be put; else it is dropped.
        over: Whether it has reached its age limit.
        indices: Indices of the parts that are there.
        priority: Priority of the group.
        tags: Its tags, in place of those of the samples.
        series: Of its right of admission.
        right: The right; None: none.
        begun_ns: Time at which the first part was stored, by the server's clock, in ns since 1970;
            0: not known.
    """

    key: str
    of: int
    least: int
    bury: bool
    over: bool
    indices: tuple[int, ...]
    priority: float | None
    tags: Mapping[str, Scalar | None] | None
    series: str
    right: int | None
    begun_ns: int = 0

    def claim(self, outcome: Literal["completed", "delivered", "dropped", "dead"]) -> bytes:
        """Return the claim on these parts, as the scripts read it."""
        claim: bytes = msgpack.packb([self.key, len(self.indices), outcome])
        return claim


@dataclass(frozen=True, slots=True)
class PartReply:
    """The reply to one part.

    Attributes:
        outcome: "waits": for other parts; "whole": all are there, and the caller puts the group;
            "ended": the key has become a group before, or was removed; "differs": from the earlier
            parts; "full": too many groups wait; "unadmitted": a right is missing; "gone": the task
            was deleted, or created anew.
        keeps_right: Whether the group keeps the right that was given.
        due: Whether other groups must be put, or removed; also with "full".
        group: With "ended", the id of the group; None: there is none.
        parts: With "whole", the group.
        agreed: With "differs", what the parts agree on, as a text.
    """

    outcome: PartOutcome
    keeps_right: bool = False
    due: bool = False
    group: int | None = None
    parts: Parts | None = None
    agreed: str = ""


class PartScripts:
    """Runs the scripts for groups in parts of one task."""

    def __init__(self, store: TaskStore, replication: Replication) -> None:
        self._store = store
        self._replication = replication
        self._known = False

    def add(
        self,
        part: Part,
        blob: bytes,
        *,
        kind: str,
        incarnation: str,
        rights: Rights,
        priority: float | None,
        tags: Mapping[str, Scalar | None] | None,
    ) -> PartReply:
        """Store one part.

        Args:
            part: Its place.
            blob: Its encoded samples.
            kind: Their fields and dtypes; "" fits all.
            incarnation: Of the task, as this process knows it.
            rights: At most one right, for the group.
            priority, tags: Of the group.
        """
        arguments: list[Argument] = [part.key, part.index, part.of, part.least, int(part.bury)]
        arguments += [kind, part.age_ms, GRACE_MS, part.most, incarnation]
        arguments += [rights.series, *(rights.numbers or ("",))]
        arguments += ["" if priority is None else repr(float(priority))]
        arguments += [json.dumps(dict(tags)) if tags else ""]
        found: PartReply = self._storing(part, blob, arguments).result()
        return found

    def _storing(self, part: Part, blob: bytes, arguments: list[Argument]) -> Request[PartReply]:
        """Return the request that stores a part: its bytes go past Lua, in the same transaction."""
        store = self._store
        head = packed("HSETNX", store.keys.part_blobs, _field(part.index, part.key))

        def pipeline(*, whole: bool) -> Pipeline:
            made = store.client.transaction(store.keys.none)
            made.add_payload(head, 4, [blob], len(blob))
            add_to(made, load("parts/add"), store.script_keys, arguments, whole=whole)
            made.add("EXEC")
            self._replication.add_to(made)
            return made

        def result(replies: list[Reply]) -> PartReply:
            done, confirmed = self._replication.divide(replies)
            outcome, *fields = transaction_results(done)[-1]
            reply = _part_reply(part.key, outcome.decode(), fields)
            if reply.outcome in ("waits", "whole", "ended"):
                self._replication.check(confirmed)
            return reply

        first, self._known = not self._known, True  # the first one brings the text of the script
        # where a script is missing all the same, the next attempt counts the part that is stored
        return scripted_request(store.client, pipeline, result, whole=first)

    def read(self, parts: Parts) -> tuple[bytes, ...] | None:
        """Return the encoded parts of a group in order; None if it has ended meanwhile."""
        fields = [_field(index, parts.key) for index in parts.indices]
        blobs = self._store.client.execute("HMGET", self._store.keys.part_blobs, *fields)
        return None if None in blobs else tuple(blobs)

    def ended(self, key: str) -> int | None:
        """Return the id of the group that a key has become; None if it is none."""
        client, prefix = self._store.client, self._store.keys.prefix
        stored = client.execute("HGET", f"{prefix}part_ends", key)
        with Reading(f"the end of the group in parts {key!r:.80}"):
            return int(stored or 0) or None

    def due(self) -> tuple[int, Parts | None]:
        """Drop groups at their age limit; returns their number, and a group to put or to bury."""
        dropped, *rest = self._store.run("parts/due", [GRACE_MS])
        if not rest:
            return int(dropped), None
        name, record, over = rest
        return int(dropped), _parts(name.decode(errors="replace"), record, over=bool(over))

    def finish(
        self, claim: bytes, *, reason: str, cause: Cause, consumer: str, group: bytes
    ) -> bool:
        """Drop parts, or with the outcome "dead" move them to the dead letters.

        Args:
            claim: The parts, and the outcome.
            reason: Why they are not put.
            cause: The exception, if there was one.
            consumer: Name of the process that found out.
            group: The encoded samples of all parts; b"" if they cannot be encoded as a group.

        Returns:
            False if they have ended before, or there are more of them now.
        """
        arguments: list[Argument] = [claim, reason, cause.exception, cause.text, consumer, group]
        outcome, *_ = self._store.run("parts/finish", arguments)
        return bool(outcome == b"done")


@Reading("the record of a group in parts")
def _part_reply(key: str, outcome: Any, reply: Sequence[Reply]) -> PartReply:
    if outcome == "differs":
        of, least, bury, kind = reply
        agreed = f"of={of}, least={least}, on_incomplete={'dead' if bury else 'drop'!r}"
        return PartReply(outcome, agreed=f"{agreed}, fields {kind.decode() or 'unknown'}")
    if outcome in ("unadmitted", "gone"):
        return PartReply(outcome)
    keeps, due, *rest = reply
    if outcome == "ended":
        return PartReply(outcome, due=bool(due), group=int(rest[0]) if rest[0] else None)
    parts = _parts(key, rest[0]) if outcome == "whole" else None
    return PartReply(outcome, bool(keeps), bool(due), parts=parts)


def _field(index: int, key: str) -> str:
    """Return the field that holds a part, as `include/parts.lua` names it."""
    return f"{index} {key}"


@Reading("the record of a group in parts")
def _parts(key: str, found: bytes, *, over: bool = False) -> Parts:
    record = unpack(found, "a record of parts")
    priority, tags, right = (record.get(name) for name in ("priority", "tags", "right"))
    return Parts(
        key,
        int(record["of"]),
        int(record["least"]),
        bool(record["bury"]),
        over,
        tuple(index for index, there in enumerate(record["have"]) if there == "1"),
        float(priority) if priority else None,
        json.loads(tags) if tags else None,
        record.get("series", ""),
        int(right) if right else None,
        int(record.get("begun", 0)) * 1_000_000,
    )
