"""The calls of the scripts in `redrb/lua/repair`, which mend what a task has lost."""

from __future__ import annotations

from typing import ClassVar, Literal

from redrb.lua.calls import Call, Found


class RebuildSettings(Call[int], frozen=True):
    """Rebuild the lost settings of a task, as of one that was given none; returns its groups.

    Attributes:
        incarnation: Random name of the task's new incarnation.
        defaults: Settings of a new task.
    """

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
