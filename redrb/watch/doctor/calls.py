"""The calls of the scripts in `redrb/lua/doctor` and `repair`: a task is examined and mended."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from redrb.lua.calls import Call, Found


class TaskFigures(msgspec.Struct, frozen=True):
    """What a task counts and stores.

    Attributes:
        groups: Number of its consumer groups.
        facts: Groups of which it holds facts.
        orphans: Entries of failed puts, the first page of them.
        lost_settings: Whether the task's own key is lost, and other keys are not.
        lost_puts: Whether the record of its puts is lost, damaged, or contradicts the stream.
        stuck_puts: Puts in the queue for room whose process does not look any more.
        stuck_admissions: The same in the queue for the right to begin groups.
        late_rights: Rights that are held for too long.
        lease_ms: Silence after which consumers of the task are dead.
        now: The task's clock, in milliseconds: deadlines up to it are over.
    """

    groups: int
    entries: int
    facts: int
    letters: int
    orphans: int
    more_orphans: bool
    lost_settings: bool
    lost_puts: bool
    stuck_puts: int
    stuck_admissions: int
    late_rights: int
    lease_ms: int
    now: int


class GroupFigures(msgspec.Struct, frozen=True):
    """What a consumer group of a task counts.

    Attributes:
        stuck_takes: Takes in its queues whose process does not look any more.
        joining: Whether it joins yet, when its pools are not complete.
        letters: Its dead letters, as its index says.
    """

    name: str
    waiting: int
    leased: int
    stuck_takes: int
    joining: bool
    letters: int


class Examined(msgspec.Struct, frozen=True):
    """A page of consumer groups; with the first one, the figures of the task."""

    groups: list[GroupFigures]
    task: TaskFigures | None = None


class Examine(Call[Examined | None], frozen=True):
    """Read what doctor compares, of groups behind `after` by name; None: there is no task."""

    script: ClassVar = "doctor/examine"
    after: str = ""


class RebuildSettings(Call[int], frozen=True):
    """Rebuild the lost settings of a task, as of one that was given none; returns its groups."""

    script: ClassVar = "repair/task"
    incarnation: str
    defaults: dict[str, str]


class PutsRebuilt(Found, frozen=True):
    """Entries of failed puts that were removed.

    Attributes:
        refused: Why nothing was changed. "groups": entries without facts are groups, or nothing
            says that they are none: their facts are lost; "stream": the stream is lost.
    """

    refused: Literal["", "groups", "stream"] = ""


class RebuildPuts(Call[PutsRebuilt], frozen=True):
    """Rebuild the lost or damaged record of a task's puts."""

    script: ClassVar = "repair/puts"


class RemoveOrphans(Call[Found], frozen=True):
    """Remove entries of failed puts, those that the task does not count; none if one is a group."""

    script: ClassVar = "repair/orphans"


class ReturnLost(Call[Found], frozen=True):
    """Requeue groups that a slot leases, unless the task knows the slot's consumer again."""

    script: ClassVar = "repair/return_lost"
    group: str
    consumer: str
    slot: str
