"""The calls of the scripts in `redrb/lua/saving`: tasks are read, and built in a restore area.

Every call may be repeated as it is when a connection breaks, and is.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from redrb.lua.calls import Call
from redrb.stream.saving.records import Change, Need
from redrb.stream.task.entries import Count

PartKind: TypeAlias = Literal["task", "entries", "dead", "puts", "sources", "refreshed", "end"]
"""Kinds of the records of a part, as `redrb/lua/saving/restore.lua` lists them."""


class ReadGroup(msgspec.Struct, frozen=True):
    """A consumer group of a task that is saved.

    Attributes:
        leased: Groups that it leases.
        staleness: As in `ConsumerGroup`.
    """

    name: str
    counters: dict[str, Change]
    leased: Count
    staleness: dict[str, Change] = {}


class TaskReply(msgspec.Struct, frozen=True):
    """A task without its groups.

    Attributes:
        fields: Its settings and counters.
        newest_letter: Id of the last dead letter; "": there is none.
    """

    exists: bool
    fields: dict[str, str] = {}
    newest_letter: str = ""
    groups: list[ReadGroup] = []


class ReadTask(Call[TaskReply], frozen=True):
    """Read a task without its groups; writes nothing."""

    script: ClassVar = "saving/snapshot"


class Records(msgspec.Struct, frozen=True):
    """Records of groups; their facts come behind it, b"" of those that were deleted meanwhile.

    Attributes:
        last: Newest id of the task; -1: there is no such task.
        needs: Of each group, as in `GroupRecord`.
    """

    last: int
    needs: list[tuple[Need, ...]] = []


class ReadRecords(Call[Records], frozen=True):
    """Read the records of groups whose entries were read just before; writes nothing.

    Attributes:
        seqs: Ids of the groups, as texts.
    """

    script: ClassVar = "saving/records"
    groups: list[str]
    seqs: list[str]


class Found(msgspec.Struct, frozen=True):
    """Whether a task was restored from a file before, and what it holds.

    Attributes:
        how: "unchanged": from this file, and nothing was put or taken since; "restored": from this
            file; "other".
        put: Groups that were ever put into it.
        stored: Groups, dead letters, and groups of which some parts wait.
    """

    how: Literal["unchanged", "restored", "other"]
    put: int
    stored: int


class FindRestored(Call[Found], frozen=True):
    """Look whether a task was restored from a file before; writes nothing.

    Attributes:
        checksum: Of the file.
        put: Groups that were ever put into the saved task.
        whole: Numbers by which a task is recognized that holds what the file holds: `entries`, and
            the `members` of the pools of each consumer group.
    """

    script: ClassVar = "saving/restore_look"
    checksum: str
    put: int
    whole: dict[str, Any]


class Begun(msgspec.Struct, frozen=True):
    """The reply to the begin of an attempt.

    Attributes:
        outcome: "begun"; "used": the task holds something, or something was put into it since;
            "overtaken": an attempt with a larger number has begun; "given up".
    """

    outcome: Literal["begun", "used", "overtaken", "given up"]
    fields: dict[str, str] = {}
    groups: tuple[str, ...] = ()


class BeginRestore(Call[Begun], frozen=True):
    """Begin to restore a task, or give up; the restore area of an earlier attempt is deleted.

    Attributes:
        token: Name of this attempt, "<number>-<random>"; a number of 0 is never overtaken.
        ttl_ms: How long the attempt is known; 0: give it up.
        put: Groups that were ever put into the task that is to be replaced.
    """

    script: ClassVar = "saving/restore_begin"
    token: str
    ttl_ms: int
    put: int


class AddToArea(Call[Literal["ok", "again", "gone"]], frozen=True):
    """Add a part to a restore area: "again": it was added before; "gone": the area has expired.

    Attributes:
        part: Parts are numbered from 1, and come in order.
        ttl_ms: The restore area expires after so long without a further part.
    """

    script: ClassVar = "saving/restore"
    part: int
    ttl_ms: int
    kind: PartKind
    value: Any


class RestoredTask(msgspec.Struct, frozen=True):
    """A task that is complete in its restore area; see `BeginRestore` and `FindRestored`."""

    token: str
    put: int
    whole: dict[str, Any]


class Ended(msgspec.Struct, frozen=True):
    """The reply to the end of a restore.

    Attributes:
        outcome: "ok"; "gone": a restore area is not complete; "used": something was put meanwhile;
            "differs": a task was given other settings meanwhile.
        stream: Of the task that it is about.
        settings: Names of the settings that differ.
    """

    outcome: Literal["ok", "gone", "used", "differs"]
    stream: str = ""
    settings: tuple[str, ...] = ()


class EndRestore(Call[Ended], frozen=True):
    """Replace tasks by their complete restore areas: all or none; KEYS are their streams."""

    script: ClassVar = "saving/restore_end"
    tasks: list[RestoredTask]
