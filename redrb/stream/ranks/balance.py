"""Parts of a batch that cost about the same: as many groups each, and about as many tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from redrb.codec import GroupLayout


def dealt(count: int, parts: int) -> list[list[int]]:
    """Deal places 0 to `count - 1` like cards, so that every part has its share of the first."""
    return [list(range(part, count, parts)) for part in range(parts)]


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Split places into parts of equal number whose weights differ as little as is cheap to find.

    Heaviest first into the lightest part that has room (Graham 1969, with room as in Dell'Amico and
    Martello 2001), then the heaviest part swaps with others as long as that makes it lighter. The
    same weights give the same parts.

    Args:
        weights: Of each place; their number is a multiple of `parts`.
        parts: How many.

    Returns:
        The places of each part, ascending.
    """
    room = len(weights) // parts
    own: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for place in sorted(range(len(weights)), key=lambda place: (-weights[place], place)):
        part = min((sums[at], at) for at in range(parts) if len(own[at]) < room)[1]
        own[part].append((weights[place], place))
        sums[part] += weights[place]
    for pairs in own:
        pairs.sort()
    for _ in range(2 * len(weights)):
        if not _swap(own, sums):
            break
    return [sorted(place for _, place in pairs) for pairs in own]


def tokens_of(layout: GroupLayout) -> int:
    """Return a group's tokens: those that its attention mask lets through, as far as it tells.

    Zeros at the start and the end of a mask are known without decoding it; without a mask a sample
    has as many tokens as its sequence.
    """
    columns = {
        field.name: pieces for field, pieces in zip(layout.fields, layout.pieces, strict=True)
    }
    masks = columns.get("attention_mask")
    sequences = columns.get("sequences")
    total = 0
    for sample in range(layout.samples):
        piece = (masks and masks[sample]) or (sequences and sequences[sample])
        if piece:
            _, stored, lead, lead_value, trail, trail_value, *_ = piece
            total += stored + (lead if lead_value else 0) + (trail if trail_value else 0)
    return total


def _swap(own: list[list[tuple[int, int]]], sums: list[int]) -> bool:
    """Make the heaviest part lighter by one swap with another; False when none does.

    Each part is sorted, so the best partner of an entry is found by bisection.
    """
    heavy = max(range(len(sums)), key=lambda part: (sums[part], -part))
    best = (sums[heavy], 0, 0, 0)
    for other, pairs in enumerate(own):
        gap = sums[heavy] - sums[other]
        if gap < 2:
            continue
        for index, (weight, _) in enumerate(own[heavy]):
            at = bisect_left(pairs, (weight - gap // 2, -1))
            for partner in (at - 1, at):
                if 0 <= partner < len(pairs):
                    moved = weight - pairs[partner][0]
                    heavier = max(sums[heavy] - moved, sums[other] + moved)
                    best = min(best, (heavier, other, index, partner))
    heavier, other, index, partner = best
    if heavier == sums[heavy]:
        return False
    one, another = own[heavy].pop(index), own[other].pop(partner)
    own[heavy].append(another)
    own[other].append(one)
    own[heavy].sort()
    own[other].sort()
    sums[heavy] += another[0] - one[0]
    sums[other] += one[0] - another[0]
    return True
