"""Repeats a fetch from the newest version if chunks were gone or damaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from redrb.errors import WeightCorrupt, WeightError
from redrb.weights.wire.chunks import ChunkGoneError

T = TypeVar("T")

_ATTEMPTS = 3


def fetch_retrying(name: str, attempt: Callable[[], T], *, forget: Callable[[], None]) -> T:
    """Run an attempt to fetch, three times at most.

    Args:
        name: Name of the weights.
        attempt: Fetches the newest version at the moment of the call.
        forget: Called after a failure, so that the next attempt uses nothing of it.

    Raises:
        WeightError: Chunks were gone each time.
        WeightCorrupt: The last attempt found damaged chunks.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return attempt()
        except (ChunkGoneError, WeightCorrupt):
            forget()
    try:
        return attempt()
    except ChunkGoneError as error:
        forget()
        raise WeightError(
            f"weights {name!r}: chunks were gone {_ATTEMPTS} times while they were fetched. Let "
            "the publisher keep more versions (keep=), and check that the server's "
            "maxmemory-policy is noeviction."
        ) from error
    except WeightCorrupt:
        forget()
        raise
