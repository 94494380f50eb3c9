"""Messages between ranks that publish one version together: offers, decisions, staged parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from redrb.errors import DecodeError
from redrb.weights.publishing.staging import StagedPart, StagingPlace
from redrb.weights.wire.layout import Layout
from redrb.weights.wire.manifest import MAX_VERSION, Source
from redrb.weights.wire.tensor_list import list_tensors, read_tensors

BEGIN_AGAIN: Final = "again"
"""As the `error` of a reply: all ranks begin the version again."""

EXPIRE_MS: Final = 3_600_000
"""Milliseconds after the last message until a stream of messages vanishes."""


class BeginAgainError(Exception):
    """The version must be begun again: a rank restarted, or chunks that it needs are gone."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The part that a rank would publish.

    Attributes:
        rank: The rank.
        call: Random id of the rank's attempt.
        chunks: Chunks of its state.
        version: The version that its caller asked for, 0 for the next.
        base: The version that it has a difference to, 0 for none.
    """

    rank: int
    call: str
    chunks: int
    version: int
    base: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What a rank has to stage, and where.

    Attributes:
        place: Where its part goes.
        whole: Whether to stage its whole state.
        delta: Whether to stage its difference.
    """

    place: StagingPlace
    whole: bool
    delta: bool


def pack_decision(decision: Decision) -> dict[str, Any]:
    """Return a decision as a message."""
    place = decision.place
    return {
        "version": place.version,
        "token": place.token,
        "first": place.first,
        "spread": place.spread,
        "whole": decision.whole,
        "delta": decision.delta,
    }


def unpack_decision(message: dict[str, Any]) -> Decision:
    """Return the decision in a message.

    Raises:
        DecodeError: A field is missing.
    """
    try:
        place = StagingPlace(
            message["version"], message["token"], message["first"], message["spread"]
        )
        return Decision(place, bool(message["whole"]), bool(message["delta"]))
    except KeyError as error:
        raise DecodeError(f"rank 0's reply lacks {error}") from error


def unpack_offer(message: dict[str, Any]) -> Offer | None:
    """Return the offer in a message whose sender was checked; None if its numbers are wrong."""
    numbers = [message.get(name) for name in ("chunks", "version", "base")]
    if not all(type(number) is int and 0 <= number <= MAX_VERSION for number in numbers):
        return None
    chunks, version, base = numbers
    return Offer(message["rank"], message["call"], chunks or 0, version or 0, base or 0)


def pack_part(part: StagedPart) -> dict[str, Any]:
    """Return a staged part as a message's value."""
    return {
        "token": part.place.token,
        "tensors": list_tensors(part.layout),
        "nbytes": part.layout.nbytes,
        "chunk_bytes": part.layout.chunk_bytes,
        "checksums": list(part.checksums),
        "sources": [[run.token, run.first, run.count] for run in part.sources],
        "sizes": None if part.sizes is None else list(part.sizes),
        "pieces": list(part.pieces),
    }


def token_of(stored: Any) -> Any:
    """Return the token under which a packed part was staged; None if it names none."""
    return stored.get("token") if isinstance(stored, dict) else None


def unpack_part(stored: Any, place: StagingPlace) -> StagedPart:
    """Return a staged part; further checks follow when the parts of all ranks are joined.

    Raises:
        DecodeError: A field is missing or has another type.
    """
    try:
        sizes = stored["sizes"]
        numbers = [stored["nbytes"], stored["chunk_bytes"], *stored["checksums"], *stored["pieces"]]
        if not all(type(number) is int and number >= 0 for number in [*numbers, *(sizes or [])]):
            raise TypeError("a number is not an integer of at least 0")
        tensors = read_tensors(stored["tensors"], whole=False)
        return StagedPart(
            place=place,
            layout=Layout(tensors, stored["nbytes"], stored["chunk_bytes"]),
            checksums=tuple(stored["checksums"]),
            sources=tuple(Source(*run) for run in stored["sources"]),
            sizes=None if sizes is None else tuple(sizes),
            pieces=tuple(stored["pieces"]),
        )
    except (KeyError, TypeError) as error:
        raise DecodeError(f"a rank's part is damaged: {error!r:.80}") from error
