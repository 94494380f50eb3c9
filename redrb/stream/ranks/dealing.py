"""Deals the batch of a step to the ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from redrb.codec import GroupLayout
from redrb.codec.kernels import Piece


def dealt(count: int, parts: int) -> list[list[int]]:
    """Deal places 0 to `count - 1` round-robin, so that every part has its share of the first."""
    return [list(range(part, count, parts)) for part in range(parts)]


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Split places into parts of equal number and of about equal weight.

    Heaviest first into the lightest part that has room (Graham 1969, with room as in Dell'Amico and
    Martello 2001), then the heaviest part swaps with others as long as that makes it lighter. The
    same weights give the same parts.

    Args:
        weights: Weight of each place; their number is a multiple of `parts`.

    Returns:
        The places of each part, ascending.
    """
    room = len(weights) // parts
    loads: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for place in sorted(range(len(weights)), key=lambda place: (-weights[place], place)):
        part = min((sums[at], at) for at in range(parts) if len(loads[at]) < room)[1]
        loads[part].append((weights[place], place))
        sums[part] += weights[place]
    for pairs in loads:
        pairs.sort()
    for _ in range(2 * len(weights)):
        if not _swap(loads, sums):
            break
    return [sorted(place for _, place in pairs) for pairs in loads]


def tokens_of(layout: GroupLayout) -> int:
    """Return the tokens of a group that its attention masks let through, without decoding them.

    Zeros at the start and the end of a mask are not counted, zeros inside it are; without a mask
    the length of the sequence counts.
    """
    columns = {field.name: index for index, field in enumerate(layout.fields)}
    nothing: list[Piece | None] = [None] * layout.samples
    masks, sequences = (
        layout.group.pieces(columns[name]) if name in columns else nothing
        for name in ("attention_mask", "sequences")
    )
    total = 0
    for mask, sequence in zip(masks, sequences, strict=True):
        piece = mask if mask is not None else sequence
        if piece is not None:
            _, stored, lead, lead_value, trail, trail_value = piece
            total += stored + (lead if lead_value else 0) + (trail if trail_value else 0)
    return total


def _swap(loads: list[list[tuple[int, int]]], sums: list[int]) -> bool:
    """Make the heaviest part lighter by one swap with another part; False when no swap does."""
    heavy = max(range(len(sums)), key=lambda part: (sums[part], -part))
    best = (sums[heavy], 0, 0, 0)
    for other, pairs in enumerate(loads):
        gap = sums[heavy] - sums[other]
        if gap < 2:
            continue
        for index, (weight, _) in enumerate(loads[heavy]):
            # each part is sorted by weight, so bisection finds the best partner
            at = bisect_left(pairs, (weight - gap // 2, -1))
            for partner in (at - 1, at):
                if 0 <= partner < len(pairs):
                    moved = weight - pairs[partner][0]
                    heavier = max(sums[heavy] - moved, sums[other] + moved)
                    best = min(best, (heavier, other, index, partner))
    heavier, other, index, partner = best
    if heavier == sums[heavy]:
        return False
    one, another = loads[heavy].pop(index), loads[other].pop(partner)
    loads[heavy].append(another)
    loads[other].append(one)
    loads[heavy].sort()
    loads[other].sort()
    sums[heavy] += another[0] - one[0]
    sums[other] += one[0] - another[0]
    return True


def deal(
    layouts: Mapping[int, GroupLayout], world_size: int, *, by_tokens: bool
) -> list[list[int]]:
    """Split a batch into parts of equal number, one for each rank; the remainder is left over."""
    even = list(layouts)[: len(layouts) // world_size * world_size]
    if by_tokens:
        places = balanced([tokens_of(layouts[seq]) for seq in even], world_size)
    else:
        places = dealt(len(even), world_size)
    return [[even[place] for place in part] for part in places]
