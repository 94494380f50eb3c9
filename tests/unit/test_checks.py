"""Checks of arguments take numbers of Python, numpy and torch, and name the value they refuse."""

import math

import numpy as np
import pytest
import torch

from redrb.checks import (
    MOST,
    check_choice,
    checked_int,
    checked_int_or_none,
    checked_number,
)
from redrb.connection.deadline import checked_timeout
from redrb.errors import ConfigError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_integers_become_ints(value):
    assert type(checked_int("count", value)) is int
    assert checked_int("count", value) == 3


@pytest.mark.parametrize(
    "value",
    [None, True, np.True_, torch.tensor(True), 1.0, np.float32(1), "1", b"1", [1], -1, MOST + 1],
)
def test_other_values_are_no_integers(value):
    with pytest.raises(ConfigError, match=r"^count=.*: it must be an int, at least 0\.$"):
        checked_int("count", value)


def test_limits_of_an_integer_are_inclusive():
    assert [checked_int("rank", rank, 1, 2) for rank in (1, 2)] == [1, 2]
    for rank in (0, 3):
        with pytest.raises(ConfigError, match="from 1 to 2"):
            checked_int("rank", rank, 1, 2)
    assert checked_int_or_none("rank", None) is None


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.5), torch.tensor(0.5), torch.ones(1)])
def test_numbers_become_floats(value):
    assert type(checked_number("priority", value)) is float


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, np.False_, torch.tensor(True), "1", math.nan, math.inf, 10**400),
        *(torch.ones(2), [1.0]),
    ],
)
def test_other_values_are_no_finite_numbers(value):
    with pytest.raises(ConfigError, match=r"priority=.*finite"):
        checked_number("priority", value)


def test_a_timeout_is_seconds_or_none():
    assert [checked_timeout(each) for each in (None, 0, 1.5, math.inf)] == [None, 0, 1.5, math.inf]
    for value in (-1, math.nan, "5", True):
        with pytest.raises(ConfigError, match="give seconds"):
            checked_timeout(value)


def test_a_choice_is_one_of_the_words():
    check_choice("side", "left", ("left", "right"))
    with pytest.raises(ConfigError, match='side=\'up\': use "left" or "right"'):
        check_choice("side", "up", ("left", "right"))
