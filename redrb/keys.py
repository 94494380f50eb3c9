"""Names of keys: all keys of a task share one hash tag, so that they live on one node."""

from __future__ import annotations

import re
from dataclasses import dataclass

from redrb.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._/@+-]{1,128}")


def check_name(what: str, name: str) -> str:
    """Return `name`, or raise ConfigError unless it may stand in a key."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} {name!r} is not usable: 1 to 128 of letters, digits and . _ / @ + - are."
        )
    return name


@dataclass(frozen=True, slots=True)
class TaskKeys:
    """Keys of one task.

    Scripts get `stream` and derive the others from its prefix, since consumer groups and waiters
    come and go.
    """

    prefix: str

    @classmethod
    def of(cls, namespace: str, task: str) -> TaskKeys:
        """Return the keys of `task` in `namespace`."""
        check_name("namespace", namespace)
        check_name("task", task)
        return cls(f"redrb:{{{namespace}:{task}}}:")

    @property
    def stream(self) -> str:
        """The groups themselves."""
        return f"{self.prefix}stream"

    @property
    def producers(self) -> str:
        """Last operation of each producer."""
        return f"{self.prefix}producers"

    @property
    def dead(self) -> str:
        """The dead-letter stream."""
        return f"{self.prefix}dead"

    def wake(self, waiter: str) -> str:
        """The list on which `waiter` blocks."""
        return f"{self.prefix}wake:{waiter}"


@dataclass(frozen=True, slots=True)
class WeightKeys:
    """Keys of one published model.

    Scripts get `versions` and derive the fence and the chunks from its prefix.
    """

    prefix: str

    @classmethod
    def of(cls, namespace: str, name: str) -> WeightKeys:
        """Return the keys of the weights `name` in `namespace`."""
        check_name("namespace", namespace)
        check_name("weights", name)
        return cls(f"redrb:{{{namespace}:weights:{name}}}:")

    @property
    def versions(self) -> str:
        """Stream of committed versions; ids are `<version>-0`, entries hold the manifest."""
        return f"{self.prefix}versions"

    @property
    def followers(self) -> str:
        """Set of the streams of tasks that want to know the newest version."""
        return f"{self.prefix}followers"

    def chunk(self, token: int, version: int, index: int) -> str:
        """One chunk of `version` as the publisher with `token` wrote it."""
        return f"{self.prefix}chunk:{token}:{version}:{index}"
