"""The rights of admission that a put uses: one for each group, or returned with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from redrb.errors import ConfigError
from redrb.words import counted


class RightsSource(ABC):
    """Rights to begin groups, some of which a put may use.

    Attributes:
        task: Name of the task that gave them.
        task_prefix: Prefix of the keys of that task.
    """

    task: str
    task_prefix: str

    @abstractmethod
    def hand_over(self, count: int) -> Rights:
        """Hand over `count` rights, lowest numbers first; raises ConfigError if there are fewer."""

    @abstractmethod
    def hand_back(self, numbers: Sequence[int]) -> None:
        """Return rights to this source that were not used; never blocks."""

    @abstractmethod
    def note_ended(self, numbers: Sequence[int]) -> None:
        """Note that Redis has counted rights as used or returned; never blocks."""


@dataclass(frozen=True, slots=True)
class Rights(RightsSource):
    """The rights of one put.

    Attributes:
        series: Random name of the task's rights.
        numbers: Number of the right of each group.
        returned: Numbers that go back because their groups are not stored.
        source: Gets the rights that are not used.
    """

    task: str = ""
    task_prefix: str = ""
    series: str = ""
    numbers: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    source: RightsSource | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.numbers or self.returned)

    def hand_over(self, count: int) -> Rights:
        """Hand over all rights; those beyond `count` go back to their source."""
        if count > len(self.numbers):
            raise too_few(self.task, count, len(self.numbers))
        self.hand_back(self.numbers[count:])
        return replace(self, numbers=self.numbers[:count])

    def hand_back(self, numbers: Sequence[int]) -> None:
        """Return rights to their source."""
        if self.source is not None and numbers:
            self.source.hand_back(numbers)

    def note_ended(self, numbers: Sequence[int]) -> None:
        """Tell the source that rights have ended."""
        if self.source is not None and numbers:
            self.source.note_ended(numbers)

    def returning_from(self, kept: int) -> Self:
        """Return the rights of a put that stores only its first `kept` groups."""
        returned = (*self.returned, *self.numbers[kept:])
        return replace(self, numbers=self.numbers[:kept], returned=returned)

    def part(self, start: int, end: int) -> Self:
        """Return the rights of some groups; returned ones go with the first part."""
        returned = self.returned if start == 0 else ()
        return replace(self, numbers=self.numbers[start:end], returned=returned)

    def end(self, stored: int, *, counted: bool) -> None:
        """End a put: `stored` of its groups, from the first, are stored.

        Args:
            counted: Whether a part of the put, and with it all returned rights, has taken effect.
        """
        done, left = self.numbers[:stored], self.numbers[stored:]
        if counted:
            self.note_ended((*done, *self.returned))
            self.hand_back(left)
        else:
            self.hand_back((*left, *self.returned))

    def record(self) -> dict[str, Any] | None:
        """Return them as the script `put/put` reads them; None if there are none."""
        if not self:
            return None
        return {"series": self.series, "used": self.numbers, "returned": self.returned}


NO_RIGHTS = Rights()


def too_few(task: str, groups: int, rights: int) -> ConfigError:
    """Return the error for a put of more groups than there are rights."""
    return ConfigError(
        f"task {task!r}: {counted(groups, 'group', 'are')} put, and "
        f"{counted(rights, 'right', 'are')} left: give "
        "each group one right, admit(n) for n groups. Nothing was stored."
    )
