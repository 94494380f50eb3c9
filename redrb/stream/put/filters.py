"""Filters of puts: they drop groups that are not worth training on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from redrb.errors import ConfigError, RecordError
from redrb.experience.records import BufferItem

Filter: TypeAlias = Callable[[Sequence[BufferItem]], bool]
"""A function of a group's samples that returns True to keep the group."""


def check_filters(filters: object) -> tuple[Filter, ...]:
    """Return the filters of a stream; raises ConfigError unless they are a list of functions."""
    if callable(filters) or isinstance(filters, str) or not isinstance(filters, Iterable):
        raise ConfigError("filters is no list of functions: give a list, filters=[...].")
    checked: tuple[Any, ...] = tuple(filters)
    for each in checked:
        if not callable(each):
            raise ConfigError(
                f"a filter is a {type(each).__name__}: give functions that take a group's "
                "samples and return True to keep the group."
            )
        if isinstance(each, type) or each in (reward_variance, finite_rewards):
            raise _not_called(each)
    return checked


def passing(groups: Sequence[Sequence[BufferItem]], filters: Sequence[Filter]) -> list[int]:
    """Return the indices of the groups that every filter keeps.

    Filters are called in turn until one drops the group. An exception of a filter is not caught:
    then nothing of the put is stored.

    Raises:
        ConfigError: A filter returned None or a function.
    """
    return [
        index for index, group in enumerate(groups) if all(_keeps(each, group) for each in filters)
    ]


def reward_variance(minimum: float = 0.0) -> Filter:
    """Return a filter that drops groups whose rewards are all equal, or vary less than `minimum`.

    Advantages that compare a group's samples with each other, as GRPO's do, are all zero in such a
    group: it costs a training step and teaches nothing. This is the dynamic sampling of DAPO
    (arXiv:2503.14476). A group of one sample is kept: its rewards are not compared with each
    other, and dropping it would leave a trainer of one-sample groups without any.

    Args:
        minimum: Least variance (of the population, divided by n) of a group that is kept.

    Raises:
        ConfigError: `minimum` is negative or not finite.
    """
    if not (isinstance(minimum, int | float) and math.isfinite(minimum) and minimum >= 0):
        raise ConfigError(f"minimum={minimum!r}: the least variance is a number >= 0.")

    def keeps(group: Sequence[BufferItem]) -> bool:
        rewards = [_reward(item) for item in group]
        if len(rewards) < 2:
            return True
        if min(rewards) == max(rewards):  # their mean may be rounded, so this comes first
            return False
        mean = math.fsum(rewards) / len(rewards)
        return math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards) >= minimum

    return keeps


def finite_rewards() -> Filter:
    """Return a filter that drops groups in which a reward is nan or infinite.

    Without this filter such a group is an error, so that a broken reward function is noticed. With
    it the group counts as filtered, and the run goes on. Give it before filters that compare
    rewards.
    """

    def keeps(group: Sequence[BufferItem]) -> bool:
        return all(item.reward is None or bool(item.reward.isfinite().all()) for item in group)

    return keeps


def _keeps(each: Filter, group: Sequence[BufferItem]) -> bool:
    verdict: object = each(group)
    if verdict is None:
        raise ConfigError(f"the filter {_name(each)} returned None: return True to keep the group.")
    if callable(verdict):
        raise _not_called(each)
    return bool(verdict)


def _not_called(each: object) -> ConfigError:
    name = _name(each)
    return ConfigError(
        f"the filter {name} makes a filter and is none: call it, filters=[{name}(...)], when the "
        "stream is opened."
    )


def _name(each: object) -> str:
    return str(getattr(each, "__name__", type(each).__name__))


def _reward(item: BufferItem) -> float:
    if item.reward is None:
        raise RecordError(
            "a sample has no reward, and the filter reward_variance compares rewards: score "
            "samples before they are put, or open the stream without this filter.",
            field="reward",
        )
    if item.reward.numel() != 1:
        raise RecordError(
            f"reward has shape {tuple(item.reward.shape)}, and the filter reward_variance compares "
            "one number a sample: put the sum into reward.",
            field="reward",
        )
    reward = float(item.reward.detach().item())
    if not math.isfinite(reward):
        raise RecordError(
            f"reward is {reward}, which cannot be compared with others: score the sample again, or "
            "give the filter finite_rewards() first, which drops such groups.",
            field="reward",
        )
    return reward
