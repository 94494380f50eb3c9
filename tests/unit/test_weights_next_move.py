"""What a reader of weights does next, decided without Redis."""

from __future__ import annotations

import pytest

from redrb.weights import WeightVersion
from redrb.weights.reading.standby import Held, Move, next_move


def version(number: int, created_s: float = 0.0) -> WeightVersion:
    return WeightVersion("w", number, "full", 0, 8, 8, None, 1, created_s or float(number))


ONE, TWO, THREE = map(version, (1, 2, 3))
ONE_AGAIN = version(1, created_s=9.0)


@pytest.mark.parametrize(
    ("newest", "held", "move"),
    [
        (None, Held(), "nothing"),
        (None, Held(loaded=ONE), "nothing"),
        (ONE, Held(), "fetch"),
        (ONE, Held(loaded=ONE), "nothing"),
        (TWO, Held(loaded=ONE), "fetch"),
        (None, Held(ready=TWO), "load"),
        (TWO, Held(loaded=ONE, ready=TWO), "load"),
        (THREE, Held(loaded=ONE, ready=TWO), "fetch"),
    ],
)
def test_another_version_than_the_one_that_is_held_is_fetched(
    newest: WeightVersion | None, held: Held, move: Move
) -> None:
    assert next_move(newest, held) == move


@pytest.mark.parametrize("held", [Held(loaded=TWO), Held(loaded=ONE), Held(ONE, ready=ONE)])
def test_versions_that_count_from_1_again_are_other_versions(held: Held) -> None:
    assert next_move(ONE_AGAIN, held) == "fetch"


def test_a_version_whose_load_came_too_early_is_loaded_before_a_newer_one_is_fetched() -> None:
    assert next_move(THREE, Held(loaded=ONE, ready=TWO, missed=True)) == "load"
    assert next_move(THREE, Held(loaded=ONE, missed=True)) == "fetch"
