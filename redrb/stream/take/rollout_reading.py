"""Groups of a `ReplayBuffer` that a stream takes: converted to samples by a reader, or refused.

Samples of rollouts have the extra `ROLLOUT`, by which they are recognized without being decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from redrb.codec import GroupLayout, decode_items, encode_groups, parse_group
from redrb.errors import ConfigError, EncodeError, RecordError
from redrb.experience import BufferItem

ROLLOUT = "$replay"
"""Name of the extra that samples of rollouts have."""

GroupReader: TypeAlias = Callable[[list[BufferItem]], list[BufferItem]]
"""Returns the samples of a group of rollouts, of which each is stored as a `BufferItem`."""


def as_stored(items: list[BufferItem]) -> list[BufferItem]:
    """Return the samples of rollouts as they are stored: the reader of a `ReplayBuffer`."""
    return items


def is_rollouts(layout: GroupLayout) -> bool:
    """Return whether a group was put by a `ReplayBuffer`."""
    return ROLLOUT in layout.extras[0]


def read_rollouts(
    task: str, seq: int, layout: GroupLayout, reader: GroupReader | None
) -> GroupLayout:
    """Return a group as its reader converts it; else raises ConfigError or RecordError."""
    if reader is as_stored:
        return layout
    if reader is None:
        raise ConfigError(
            f"task {task!r}: group {seq} was put by a ReplayBuffer. Open the stream with a reader, "
            "such as ExperienceStream(..., reader=redrb.compat.xtuner.RolloutReader()), or take it "
            "with ReplayBuffer.get. It stays where it is."
        )
    try:
        (encoded,) = encode_groups([reader(decode_items(layout))])
    except (RecordError, EncodeError) as error:
        raise RecordError(
            f"task {task!r}: the rollouts of group {seq} cannot be read as samples, and stay where "
            f"they are: {error}",
            field=getattr(error, "field", None),
        ) from error
    return parse_group(encoded.blob)
