"""`Choice`: which groups to read; `Limits`: how much of each is decoded and shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from redrb.checks import check_choice, checked_int, checked_int_or_none
from redrb.errors import ConfigError
from redrb.experience.status import Status

Rank: TypeAlias = Literal["best", "worst", "stalest"]
RANKS: Final[tuple[Rank, ...]] = ("best", "worst", "stalest")

STATES: Final = (*(status.value for status in Status), "leased", "dead")

MOST_GROUPS: Final = 1_000
"""Most groups that are returned at once."""

MOST_RANKED: Final = 1_000
"""Most groups whose payload is read to find the best or worst."""

MOST_LOOKED: Final = 1_000_000
"""Most groups whose record is read to find those that match."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which groups to read, in which order, and how many.

    Without `ids`, `status` and `rank` these are the newest stored groups.

    Attributes:
        ids: Ids of groups; the order is kept.
        status: A `Status`: groups that wait in it, in the task's order; "leased":
            leased groups; "dead": dead letters, the newest first; None: all stored groups, the
            newest first.
        where: A query over declared tags, as `stream.take(where=)` has it.
        rank: "best" or "worst": by mean reward; "stalest": by oldest policy version.
        looks: Groups to look at, to find those that match or rank first; None: as many as suits
            the choice.
    """

    ids: tuple[int, ...] = ()
    status: str | None = None
    where: Mapping[str, Any] | None = None
    rank: Rank | None = None
    count: int = 10
    looks: int | None = field(default=None)

    def check(self) -> None:
        """Check the choice.

        Raises:
            ConfigError: A value is out of range, or two contradict each other.
        """
        checked_int("count", self.count, 1, MOST_GROUPS)
        checked_int_or_none("looks", self.looks, 1, MOST_LOOKED)
        if self.status is not None:
            check_choice("status", self.status, STATES)
        if self.rank is not None:
            check_choice("rank", self.rank, RANKS)
        if self.ids and (self.status or self.where or self.rank):
            raise ConfigError("ids name the groups: leave status, where and rank out.")
        if len(self.ids) > MOST_GROUPS or not all(0 < each < 2**53 for each in self.ids):
            raise ConfigError(f"give at most {MOST_GROUPS} ids, each at least 1.")
        if self.status == "dead" and (self.where or self.rank):
            raise ConfigError("dead letters have no index: leave where and rank out.")

    @property
    def most_looked(self) -> int:
        """Groups to look at, at most."""
        if self.looks is not None:
            return self.looks
        return 10_000 if self.where or self.rank == "stalest" else MOST_LOOKED

    @property
    def most_ranked(self) -> int:
        """Groups to rank by reward, at most."""
        return min(self.looks or 200, MOST_RANKED)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what is shown of one group; what is beyond is cut, with a note.

    Attributes:
        tensor_bytes: Decoded bytes of one tensor; of a larger one only the shape is shown.
        decoded_bytes: Decoded bytes of all tensors; of those beyond, only the shapes are shown.
        tokens: Tokens of a prompt, and of a response.
        text: Characters of one text; all texts of a group have eight times as many.
        pixels: Pixels of an image; a larger one is made smaller.
    """

    group_bytes: int = 64 << 20
    tensor_bytes: int = 16 << 20
    decoded_bytes: int = 256 << 20
    samples: int = 64
    tokens: int = 16_384
    text: int = 32_768
    entries: int = 1_000
    images: int = 8
    pixels: int = 1 << 20


LIMITS = Limits()
