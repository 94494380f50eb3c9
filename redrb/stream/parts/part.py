"""`Part`: the arguments by which the parts of one group find each other, checked."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

from redrb.checks import check_choice, checked_int
from redrb.codec.wire import MAX_SAMPLES
from redrb.errors import ConfigError
from redrb.stream.arguments import checked_period_ms

OnIncomplete: TypeAlias = Literal["drop", "dead"]

MOST_KEY_BYTES = 256

MOST_PARTS = 4096
"""Default of `most_parts`."""

PART_AGE = "10m"
"""Default of `part_age`."""


class Part(msgspec.Struct, frozen=True):
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
    ) -> Part:
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
