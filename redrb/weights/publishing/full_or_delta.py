"""Decides whether the next version is stored in full or as a delta."""

from __future__ import annotations

FULL_ABOVE = 0.35
"""Share of the state's bytes; a larger delta is not worth its encoding."""

SAMPLE_MARGIN = 1.5
"""A sample of the chunks may exceed `FULL_ABOVE` by this factor before the rest is encoded too."""


def is_too_large(delta_bytes: int, state_bytes: int, *, sampled: bool = False) -> bool:
    """Return whether a delta is too large to be worth it.

    Args:
        delta_bytes: Bytes of the encoded blocks.
        state_bytes: Bytes of the state that these blocks cover.
        sampled: Whether the blocks are a sample of the chunks.
    """
    most = FULL_ABOVE * (SAMPLE_MARGIN if sampled else 1.0)
    return delta_bytes > most * state_bytes


def is_stored_in_full(*, has_delta: bool, deltas_since_full: int, anchor_every: int) -> bool:
    """Return whether a version is stored in full.

    Args:
        has_delta: Whether a delta from the newest version is known and not too large.
        deltas_since_full: Versions since the last full one, each stored as a delta only.
        anchor_every: A full version, the anchor, is stored at least every so many versions, so that
            readers that join need few deltas.
    """
    return not has_delta or deltas_since_full + 1 >= anchor_every
