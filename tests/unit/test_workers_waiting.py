"""Waiting in slices, and names of makers."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from redrb.errors import BatchTimeout, StoreUnavailable, WeightTimeout
from workers.maker import _new_name
from workers.waiting import wait_in_slices


def batch_timeout(seconds: float) -> BatchTimeout:
    return BatchTimeout(task="sort", wanted=32, available=3, waited_s=seconds, blocked=1)


def weight_timeout(seconds: float) -> WeightTimeout:
    return WeightTimeout(name="policy", newer_than=0, newest=None, waited_s=seconds)


def never() -> bool:
    return False


def test_what_comes_in_a_later_slice_is_returned() -> None:
    answers = iter([batch_timeout(1.0), weight_timeout(1.0), None])

    def attempt(seconds: float) -> str:
        if (error := next(answers)) is not None:
            raise error
        return "a lease"

    assert wait_in_slices(attempt, never, timeout=60, retry_s=60) == "a lease"


@pytest.mark.parametrize("make", [batch_timeout, weight_timeout])
def test_the_error_tells_the_whole_time(
    make: Callable[[float], BatchTimeout | WeightTimeout],
) -> None:
    slices = []

    def attempt(seconds: float) -> None:
        slices.append(seconds)
        time.sleep(min(0.05, seconds))
        raise make(seconds)

    with pytest.raises((BatchTimeout, WeightTimeout)) as caught:
        wait_in_slices(attempt, never, timeout=0.2, retry_s=60)
    assert len(slices) >= 4
    assert 0.2 <= caught.value.waited_s < 0.5
    assert isinstance(caught.value, type(make(0)))


def test_nothing_is_tried_when_it_is_to_end() -> None:
    asked = iter([False, False, True])
    tried = []

    def attempt(seconds: float) -> None:
        tried.append(seconds)
        raise batch_timeout(seconds)

    assert wait_in_slices(attempt, lambda: next(asked), timeout=60, retry_s=60) is None
    assert len(tried) == 2


@pytest.mark.parametrize(("retry_s", "endured"), [(60.0, True), (0.0, False)])
def test_an_outage_is_endured_for_as_long_as_the_client_would(
    retry_s: float, endured: bool
) -> None:
    answers = iter([StoreUnavailable("away", where="here"), None])

    def attempt(seconds: float) -> str:
        if (error := next(answers)) is not None:
            raise error
        return "a lease"

    if endured:
        assert wait_in_slices(attempt, never, timeout=60, retry_s=retry_s) == "a lease"
    else:
        with pytest.raises(StoreUnavailable):
            wait_in_slices(attempt, never, timeout=60, retry_s=retry_s)


def test_every_start_of_a_maker_has_a_name_of_its_own() -> None:
    assert len({_new_name() for _ in range(100)}) == 100
