"""Limits of groups in parts, and the calls of `redrb/lua/assembly`, which stores and removes parts.

Every call may be repeated as it is when a connection breaks, and is.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias, get_args

import msgspec

from redrb.checks import check_choice, checked_int
from redrb.codec.wire import MAX_SAMPLES
from redrb.connection.client import Request
from redrb.connection.transport import Replication, Reply, packed
from redrb.errors import ConfigError
from redrb.lua.calls import Call
from redrb.stream.arguments import checked_period_ms
from redrb.stream.put.batch import Claim
from redrb.stream.put.calls import transaction_results
from redrb.stream.take.cause import Cause
from redrb.stream.task.store import TaskStore

OnIncomplete: TypeAlias = Literal["drop", "dead"]

MOST_KEY_BYTES = 256
MOST_PARTS = 4096
"""Default of `most_parts`."""

PART_AGE = "10m"
"""Default of `part_age`."""


class GroupPart(msgspec.Struct, frozen=True):
    """One part of a group.

    Attributes:
        key: Name of the group among those that are not complete.
        index: Place of the part in the group.
        least: Fewest parts with which it is delivered at the age limit.
        bury: Whether a group with fewer parts becomes a dead letter; else it is dropped.
        most: Most groups of which some parts wait.
    """

    key: str
    index: int
    of: int
    least: int
    bury: bool
    age_ms: int
    most: int

    @classmethod
    def checked(
        cls,
        key: object,
        index: object,
        of: object,
        least: object,
        part_age: object,
        on_incomplete: OnIncomplete,
        most_parts: object,
    ) -> GroupPart:
        """Return the arguments that users gave; raises ConfigError if one is not usable."""
        nbytes = 0
        if isinstance(key, str) and key.isprintable():  # else it may be no valid Unicode
            nbytes = len(key.encode(errors="ignore"))
        if not isinstance(key, str) or not 0 < nbytes <= MOST_KEY_BYTES:
            raise ConfigError(f"key={key!r:.80}: give a text of 1 to {MOST_KEY_BYTES} bytes.")
        parts = checked_int("of", of, 1, MAX_SAMPLES)
        check_choice("on_incomplete", on_incomplete, get_args(OnIncomplete))
        return cls(
            key,
            checked_int("index", index, 0, parts - 1),
            parts,
            parts if least is None else checked_int("least", least, 1, parts),
            on_incomplete == "dead",
            checked_period_ms("part_age", part_age),
            checked_int("most_parts", most_parts, 1),
        )


class UnfinishedGroup(msgspec.Struct, frozen=True):
    """The parts of a group that are there.

    Attributes:
        of: Number of parts that the group should have.
        least: Fewest with which it is delivered.
        bury: Whether it becomes a dead letter if it cannot be put; else it is dropped.
        have: "1" at the place of each part that is there, "0" at the others.
        kind: Fields and dtypes of the samples; "": not known.
        over: Whether it has reached its age limit.
        tags: Its tags, in place of those of the samples, as JSON.
        right: The right; None: none.
    """

    of: int
    least: int
    bury: bool
    have: str
    kind: str = ""
    key: str = ""
    over: bool = False
    priority: float | None = None
    tags: str | None = None
    series: str = ""
    right: int | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the parts that are there."""
        return tuple(index for index, there in enumerate(self.have) if there == "1")

    def claim(self, outcome: Literal["completed", "delivered", "dropped", "dead"]) -> Claim:
        """Return the claim on these parts."""
        return Claim(self.key, len(self.indices), outcome)


class PartReply(msgspec.Struct, frozen=True):
    """The reply to one part.

    Attributes:
        outcome: "waits": for other parts; "whole": all are there, and the caller puts the group;
            "ended": the key has become a group before, or was removed; "differs": from the earlier
            parts; "full": too many groups wait; "unadmitted": the task's order needs a right, and
            no part has brought one; "gone": the task was deleted, or created anew.
        keeps_right: Whether the group keeps the right that was given.
        due: Whether other groups must be put, or removed; also with "full".
        group: With "ended", the id of the group; None: there is none.
        parts: With "whole" and "differs", the earlier parts.
    """

    outcome: Literal["waits", "whole", "ended", "differs", "full", "unadmitted", "gone"]
    keeps_right: bool = False
    due: bool = False
    group: int | None = None
    parts: UnfinishedGroup | None = None


class AddPart(Call[PartReply], frozen=True):
    """Count the part of a group that the same transaction has just stored, or remove it again.

    Attributes:
        kind: Fields and dtypes of its samples; "" fits all.
        grace_ms: Time after which another process puts a whole group.
        incarnation: Of the task, as this process knows it.
        series, right: A right of admission for the group; "": none.
        tags: Of the group, as JSON.
    """

    script: ClassVar = "assembly/add"
    part: GroupPart
    kind: str
    grace_ms: int
    incarnation: str
    series: str
    right: str
    priority: float | None
    tags: str | None

    def storing(
        self, store: TaskStore, blob: bytes, replication: Replication, *, whole: bool
    ) -> Request[PartReply]:
        """Return the request that stores a part: its bytes go past Lua, in the same transaction.

        Args:
            replication: Lets replicas confirm the part.
            whole: Send the text of the script. Where it is missing all the same, the next attempt
                counts the part that is stored.
        """
        field = blob_field(self.part.index, self.part.key)
        head = packed("HSETNX", store.keys.part_blobs, field)
        made = store.client.transaction(store.keys.none)
        made.add_payload(head, 4, [blob], len(blob))
        self.add_to(made, store.script_keys)
        made.add("EXEC")
        replication.add_to(made)

        def result(replies: list[Reply]) -> PartReply:
            done, confirmed = replication.divide(replies)
            reply = self.read(transaction_results(done)[-1])
            if reply.outcome in ("waits", "whole", "ended"):
                replication.check(confirmed)
            return reply

        return Request(store.client, made.with_texts() if whole else made, result)


class DueParts(msgspec.Struct, frozen=True):
    """Groups that were dropped at their age limit, and one that the caller is to put or to bury."""

    dropped: int
    parts: UnfinishedGroup | None = None


class FindDue(Call[DueParts], frozen=True):
    """Drop groups without enough parts at the age limit, or return one to put or to bury.

    Attributes:
        grace_ms: Time after which another caller gets the same group.
    """

    script: ClassVar = "assembly/due"
    grace_ms: int


class FinishParts(Call[Literal["done", "ended"]], frozen=True):
    """Drop parts, or move them to the dead letters; "ended": they have ended, or others came.

    Beside it go the encoded samples of all parts, b"" if they cannot be encoded as a group.

    Attributes:
        claim: The parts; one with the outcome "dead" moves them.
        consumer: Name of the process that found out.
    """

    script: ClassVar = "assembly/finish"
    claim: Claim
    reason: str
    cause: Cause
    consumer: str


def blob_field(index: int, key: str) -> str:
    """Return the field that holds a part, as `include/parts.lua` names it."""
    return f"{index} {key}"
