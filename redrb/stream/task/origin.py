"""`Origin`: where forwarded groups come from: a task, and a consumer group that has leased them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import msgspec

from redrb.lua.calls import Call
from redrb.stream.task.store import TaskStore


class SourceGroup(NamedTuple):
    """A leased group of another task.

    Attributes:
        seq: Its id there; its first one if it was a dead letter and has another id now.
        digest: Digest of its bytes: after a failover that lost the newest groups, another group may
            get the same id.
    """

    seq: int
    digest: str


class OriginState(msgspec.Struct, frozen=True):
    """What an origin's task says.

    Attributes:
        incarnation: The task's incarnation; "" if there is no task.
        floor: All groups up to this id are deleted for good.
        stored: Whether the group that was asked for is stored, or may come back.
        kept: Groups up to the floor that may come back, as dead letters do.
    """

    incarnation: str
    floor: int
    stored: bool
    kept: tuple[str, ...] = ()


class Look(Call[OriginState], frozen=True):
    """Ask which groups are deleted for good, and whether one is stored."""

    script: ClassVar = "task/floor"
    seq: str


@dataclass(frozen=True, slots=True)
class Origin:
    """A task and a consumer group.

    Attributes:
        incarnation: Incarnation of the task in which the groups were leased.
    """

    store: TaskStore
    group: str
    incarnation: str

    @property
    def name(self) -> str:
        """Name of the origin, unique among all tasks, partitions and consumer groups of a server.

        A name that users choose contains no ":".
        """
        tag = self.store.keys.prefix.removeprefix("redrb:{").removesuffix("}:")
        return f"{tag}:{self.group}"
