"""Filters keep and drop whole groups; a group gets one value for each declared tag."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from redrb import BufferItem, ConfigError, RecordError
from redrb.stream.put.filters import check_filters, finite_rewards, passing, reward_variance
from redrb.stream.task.tags import MOST_TAGS, declare_tags, tag_values
from tests.samples import numbered


def rewarded(*rewards: float) -> list[BufferItem]:
    return [numbered(0, reward=torch.tensor(reward)) for reward in rewards]


def tagged(*tags: dict[str, Any]) -> list[BufferItem]:
    return [numbered(0, tags=each) for each in tags]


def test_passing_returns_the_indices_of_the_groups_that_are_kept() -> None:
    groups = [rewarded(0, 0), rewarded(0, 1), rewarded(2, 2), rewarded(3)]
    assert passing(groups, [reward_variance()]) == [1, 3]
    assert passing(groups, []) == [0, 1, 2, 3]
    assert passing([], [reward_variance()]) == []


def test_a_group_must_pass_every_filter_and_later_ones_are_not_asked_in_vain() -> None:
    asked = []

    def short(group: Any) -> bool:
        asked.append(len(group))
        return len(group) < 3

    groups = [rewarded(1, 1), rewarded(0, 1), rewarded(0, 1, 2)]
    assert passing(groups, [reward_variance(), short]) == [1]
    assert asked == [2, 3]


def test_what_a_filter_raises_comes_through() -> None:
    def broken(group: Any) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        passing([rewarded(0, 1)], [broken])


def test_a_filter_that_forgets_to_return_is_an_error() -> None:
    def forgetful(group: Any) -> Any:
        len(group)

    with pytest.raises(ConfigError, match="forgetful returned None"):
        passing([rewarded(0, 1)], [forgetful])


def test_filters_are_a_sequence_of_functions() -> None:
    only = reward_variance()
    assert check_filters([only]) == (only,)
    assert check_filters(()) == ()
    with pytest.raises(ConfigError, match="give a list"):
        check_filters(only)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="float"):
        check_filters([0.5])  # type: ignore[list-item]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -1e-8, 1e30])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_are_dropped_however_they_round(reward: float, size: int) -> None:
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
def test_reward_variance_is_the_populations(
    rewards: list[float], minimum: float, kept: bool
) -> None:
    assert reward_variance(minimum)(rewarded(*rewards)) is kept


def test_rewards_of_one_element_count_and_others_are_errors() -> None:
    assert reward_variance()([*rewarded(0), numbered(0, reward=torch.tensor([1.0]))])
    for reward in (None, torch.tensor([1.0, 2.0]), torch.tensor(math.nan)):
        with pytest.raises(RecordError) as caught:
            reward_variance()([*rewarded(0), numbered(0, reward=reward)])
        assert caught.value.field == "reward"


def test_rewards_that_are_not_finite_can_be_dropped() -> None:
    kept = [rewarded(1, 2), rewarded(), [numbered(0, reward=None)]]
    dropped = [rewarded(1, math.nan), rewarded(math.inf), rewarded(-math.inf, 0)]
    filters = check_filters([finite_rewards(), reward_variance()])
    assert passing([*kept, *dropped], filters[:1]) == [0, 1, 2]
    assert passing([*kept[:1], *dropped], filters) == [0]
    with pytest.raises(RecordError, match="give the filter finite_rewards"):
        passing(dropped[2:], filters[1:])


@pytest.mark.parametrize("each", [reward_variance, finite_rewards, dict])
def test_what_makes_a_filter_is_to_be_called(each: Any) -> None:
    with pytest.raises(ConfigError, match=f"call it, filters=.{each.__name__}"):
        check_filters([each])
    with pytest.raises(ConfigError, match="own makes a filter and is none"):
        passing([rewarded(0, 1)], [own])


def own(_: Any) -> Any:
    return reward_variance()


@pytest.mark.parametrize("minimum", [-1.0, math.nan, math.inf, "a"])
def test_the_least_variance_is_a_number(minimum: Any) -> None:
    with pytest.raises(ConfigError, match="minimum"):
        reward_variance(minimum)


def test_declared_tags_have_names_that_may_stand_in_a_key() -> None:
    assert declare_tags(["scores", "a.b/c@d+e-f_1"]) == ("scores", "a.b/c@d+e-f_1")
    assert declare_tags(None) == ()
    several = [f"t{number}" for number in range(MOST_TAGS)]
    assert len(declare_tags(several)) == MOST_TAGS
    wrong: list[Any] = [["a b"], [""], ["a:b"], ["$or"], [1], ["a", "a"], [*several, "x"], "scores"]
    for names in wrong:
        with pytest.raises(ConfigError):
            declare_tags(names)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ([{"t": "math"}, {"t": "math"}], "math"),
        ([{"t": 0.5}, {"t": 0.5}, {"t": 0.5}], 0.5),
        ([{"t": 0.1}] * 3, 0.1),
        ([{"t": 1}, {"t": 2}], 1.5),
        ([{"t": True}, {"t": False}, {"t": False}, {"t": False}], 0.25),
        ([{"t": True}, {"t": True}], 1),
        ([{"t": True}, {"t": 3}], 2.0),
        ([{"t": "math"}, {}], "math"),
        ([{"t": 4}, {"other": 5}], 4),
        ([{}, {}], None),
        ([{"t": 2**53}], 2**53),
        ([{"t": 1.5e200}], 1.5e200),
    ],
)
def test_a_group_gets_its_samples_common_value_or_their_mean(tags: Any, expected: Any) -> None:
    (value,) = tag_values(["t"], tagged(*tags), None)
    assert value == expected
    assert not isinstance(value, bool)


def test_values_come_in_the_order_of_the_declared_names() -> None:
    items = tagged({"a": 1, "b": "x", "ignored": 9}, {"a": 3, "b": "x"})
    assert tag_values(["b", "c", "a"], items, None) == ["x", None, 2.0]


def test_a_value_given_at_put_wins() -> None:
    items = tagged({"a": "x", "b": 1}, {"a": "y", "b": 2})
    assert tag_values(["a", "b", "c"], items, {"a": "z", "b": None, "c": True}) == ["z", None, 1]


@pytest.mark.parametrize("tags", [[{"t": "a"}, {"t": "b"}], [{"t": "a"}, {"t": 1}]])
def test_values_that_cannot_be_one_are_errors_that_say_what_to_do(tags: Any) -> None:
    with pytest.raises(RecordError, match=r"give it at put, tags=\{'t'"):
        tag_values(["t"], tagged(*tags), None)
    assert tag_values(["t"], tagged(*tags), {"t": "c"}) == ["c"]
    assert tag_values(["other"], tagged(*tags), None) == [None]


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e300, 2**53 + 1, "\ud800", "x" * 1025, [1], b"x"]
)
def test_what_cannot_be_indexed_is_an_error(value: Any) -> None:
    with pytest.raises(RecordError, match="'t'"):
        tag_values(["t"], tagged({"t": value}), None)
    with pytest.raises(RecordError, match="'t'"):
        tag_values(["t"], tagged({}), {"t": value})
    assert tag_values(["other"], tagged({"t": value}), None) == [None]


def test_a_tag_given_at_put_must_be_declared() -> None:
    with pytest.raises(ConfigError, match=r"colour.*declares a, b"):
        tag_values(["a", "b"], tagged({}), {"colour": "red"})
