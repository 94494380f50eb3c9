"""Filters keep and drop whole groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from redrb import BufferItem, ConfigError
from redrb.errors import RecordError
from redrb.stream.put.filters import check_filters, finite_rewards, passing, reward_variance
from tests.samples import numbered


def rewarded(*rewards: float) -> list[BufferItem]:
    return [numbered(0, reward=torch.tensor(reward)) for reward in rewards]


def test_passing_returns_the_indices_of_the_groups_that_are_kept():
    groups = [rewarded(0, 0), rewarded(0, 1), rewarded(2, 2), rewarded(3)]
    assert passing(groups, [reward_variance()]) == [1, 3]
    assert passing(groups, []) == [0, 1, 2, 3]
    assert passing([], [reward_variance()]) == []


def test_a_group_must_pass_every_filter_and_no_filter_is_called_in_vain():
    asked = []

    def short(group):
        asked.append(len(group))
        return len(group) < 3

    groups = [rewarded(1, 1), rewarded(0, 1), rewarded(0, 1, 2)]
    assert passing(groups, [reward_variance(), short]) == [1]
    assert asked == [2, 3]


def test_an_exception_of_a_filter_is_not_caught():
    def broken(group):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        passing([rewarded(0, 1)], [broken])


def test_a_filter_that_forgets_to_return_is_an_error():
    def forgetful(group):
        len(group)

    with pytest.raises(ConfigError, match="forgetful returned None"):
        passing([rewarded(0, 1)], [forgetful])


def test_filters_are_a_sequence_of_functions():
    only = reward_variance()
    assert check_filters([only]) == (only,)
    assert check_filters(()) == ()
    with pytest.raises(ConfigError, match="give a list"):
        check_filters(only)
    with pytest.raises(ConfigError, match="float"):
        check_filters([0.5])


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -1e-8, 1e30])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_are_dropped_however_they_round(reward, size):
    assert not reward_variance()(rewarded(*[reward] * size))


@pytest.mark.parametrize(
    ("rewards", "minimum", "kept"),
    [
        ([0.0, 1.0], 0.25, True),
        ([0.0, 1.0], 0.26, False),
        ([0.0, 0.0, 0.0, 1.0], 0.1875, True),
        ([1e-30, 2e-30], 0.0, True),
        ([5.0], 1.0, True),
        ([], 0.0, True),
    ],
)
def test_reward_variance_is_the_populations(rewards, minimum, kept):
    assert reward_variance(minimum)(rewarded(*rewards)) is kept


def test_rewards_of_one_element_count_and_others_are_errors():
    assert reward_variance()([*rewarded(0), numbered(0, reward=torch.tensor([1.0]))])
    for reward in (None, torch.tensor([1.0, 2.0]), torch.tensor(math.nan)):
        with pytest.raises(RecordError) as caught:
            reward_variance()([*rewarded(0), numbered(0, reward=reward)])
        assert caught.value.field == "reward"


def test_rewards_that_are_not_finite_can_be_dropped():
    kept = [rewarded(1, 2), rewarded(), [numbered(0, reward=None)]]
    dropped = [rewarded(1, math.nan), rewarded(math.inf), rewarded(-math.inf, 0)]
    filters = check_filters([finite_rewards(), reward_variance()])
    assert passing([*kept, *dropped], filters[:1]) == [0, 1, 2]
    assert passing([*kept[:1], *dropped], filters) == [0]
    with pytest.raises(RecordError, match="give the filter finite_rewards"):
        passing(dropped[2:], filters[1:])


@pytest.mark.parametrize("each", [reward_variance, finite_rewards, dict])
def test_a_function_that_makes_a_filter_must_be_called(each):
    with pytest.raises(ConfigError, match=f"call it, filters=.{each.__name__}"):
        check_filters([each])
    with pytest.raises(ConfigError, match="makes_a_filter makes a filter and is none"):
        passing([rewarded(0, 1)], [makes_a_filter])


def makes_a_filter(_: Any) -> Any:
    return reward_variance()


@pytest.mark.parametrize("minimum", [-1.0, math.nan, math.inf, "a"])
def test_the_least_variance_is_a_number(minimum):
    with pytest.raises(ConfigError, match="minimum"):
        reward_variance(minimum)
