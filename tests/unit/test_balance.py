"""Parts of a batch have equal numbers of groups and about equal numbers of tokens."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from redrb import BufferItem
from redrb.codec import encode_groups, parse_group
from redrb.stream.ranks.dealing import balanced, dealt, tokens_of
from tests.samples import numbered
from tests.unit.codec_kernels import kernel  # noqa: F401 (used by every test)


def heaviest(weights: list[int], parts: list[list[int]]) -> int:
    return max(sum(weights[place] for place in part) for part in parts)


def best(weights: list[int], parts: int) -> int:
    """Return the heaviest part of the best split, by trying all."""
    room = len(weights) // parts

    def search(left: tuple[int, ...], bound: int) -> int:
        if not left:
            return 0
        first, rest = left[0], left[1:]
        for others in itertools.combinations(rest, room - 1):
            own = weights[first] + sum(weights[place] for place in others)
            if own < bound:
                remaining = tuple(place for place in rest if place not in others)
                bound = min(bound, max(own, search(remaining, bound)))
        return bound

    return search(tuple(range(len(weights))), sum(weights) + 1)


def test_places_are_dealt_like_cards():
    assert dealt(6, 2) == [[0, 2, 4], [1, 3, 5]]
    assert dealt(4, 4) == [[0], [1], [2], [3]]
    assert dealt(0, 2) == [[], []]


@pytest.mark.parametrize(
    ("weights", "parts", "expected"),
    [
        ([5, 5, 5, 5], 2, 10),
        ([8, 1, 1, 8], 2, 9),
        ([9, 5, 4, 2, 2, 2], 2, 13),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4, 9),
        ([0, 0, 0, 0], 2, 0),
        ([7], 1, 7),
    ],
)
def test_parts_are_balanced(weights, parts, expected):
    assert heaviest(weights, balanced(weights, parts)) == expected


def test_every_place_is_in_one_part_and_parts_are_as_large_as_each_other():
    dice = random.Random(1)
    for _ in range(200):
        parts = dice.randint(1, 8)
        weights = [dice.randint(0, 4096) for _ in range(parts * dice.randint(0, 12))]
        split = balanced(weights, parts)
        assert sorted(place for part in split for place in part) == list(range(len(weights)))
        assert {len(part) for part in split} == {len(weights) // parts}
        assert all(part == sorted(part) for part in split)
        assert balanced(weights, parts) == split


def test_small_splits_are_near_the_best_one():
    dice = random.Random(2)
    ratios = []
    for _ in range(150):
        parts, room = dice.choice([(2, 2), (2, 3), (2, 5), (3, 2), (3, 3), (4, 2)])
        weights = [dice.randint(1, 100) for _ in range(parts * room)]
        ratios.append(heaviest(weights, balanced(weights, parts)) / best(weights, parts))
    assert max(ratios) <= 4 / 3
    assert sum(ratios) / len(ratios) <= 1.02


def test_long_tails_are_spread():
    dice = random.Random(3)
    weights = [int(dice.lognormvariate(6, 1)) for _ in range(256)]
    mean = sum(weights) / 8
    assert heaviest(weights, balanced(weights, 8)) <= 1.01 * max(mean, max(weights))


def tokens(*items: BufferItem) -> int:
    (encoded,) = encode_groups([list(items)])
    return tokens_of(parse_group(encoded.blob))


def test_tokens_are_those_that_the_attention_mask_lets_through():
    assert tokens(numbered(1), numbered(2)) == 6
    padded = torch.tensor([0] * 30 + [1] * 50 + [0] * 20)
    item = numbered(1, sequences=torch.arange(100), attention_mask=padded)
    assert tokens(item) == 50
    assert tokens(item, numbered(2, attention_mask=torch.ones(3, dtype=torch.int64))) == 53
