"""Deals the batch of a step to its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from redrb.codec import parse_groups
from redrb.errors import DecodeError
from redrb.stream.ranks.balance import balanced, dealt, tokens_of
from redrb.stream.take.lease_part import Draw


def deal(
    ids: Sequence[int],
    weights: Mapping[int, bytes] | None,
    world_size: int,
    payloads: Mapping[int, bytes | None] | None,
) -> list[tuple[str, list[int]]]:
    """Split a batch into a part for each rank.

    Args:
        ids: Groups of the batch; a remainder that does not divide among the ranks is left over.
        weights: Weight by id, and under 0 the total, of an order that draws.
        world_size: Number of ranks.
        payloads: Payload of each group, to balance tokens; None: do not balance.

    Returns:
        Of each rank the weights, as text, and the ids.
    """
    even = ids[: len(ids) // world_size * world_size]
    if payloads is None:
        places = dealt(len(even), world_size)
    else:
        places = balanced(_tokens(even, payloads), world_size)
    parts = []
    for chosen in places:
        part = [even[place] for place in chosen]
        words = weights and [f"{seq}:{weights[seq].decode()}" for seq in [*part, 0]]
        parts.append((" ".join(words or ()), part))
    return parts


def part_draw(text: str) -> Draw | None:
    """Read the weights of a part, as `deal` writes them; None when the order does not draw."""
    if not text:
        return None
    pairs = (word.partition(":") for word in text.split())
    weights = {int(seq): float(weight) for seq, _, weight in pairs}
    total = weights.pop(0)
    return Draw(weights, total)


def _tokens(ids: Sequence[int], payloads: Mapping[int, bytes | None]) -> list[int]:
    """Return the tokens of each group; 0 of groups that cannot be decoded."""
    known = [(seq, blob) for seq in ids if (blob := payloads.get(seq)) is not None]
    layouts = parse_groups(blob for _, blob in known)
    tokens = {
        seq: tokens_of(layout)
        for (seq, _), layout in zip(known, layouts, strict=True)
        if not isinstance(layout, DecodeError)
    }
    return [tokens.get(seq, 0) for seq in ids]
