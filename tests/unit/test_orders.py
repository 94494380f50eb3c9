"""Scores that Redis could not sort by, or whose sum would overflow, are refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from redrb import ConfigError, Status
from redrb.stream.orders import GroupFacts, Prioritized, Stalest, checked_score

FACTS = GroupFacts(policy_version=None, priority=1e90, samples=1, nbytes=9, status=Status.COMPLETED)


@dataclass(frozen=True)
class Given:
    """An order that returns the same for each group."""

    returns: Any
    sampled: bool
    name: str = "given"

    def score(self, _: GroupFacts) -> Any:
        return self.returns


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("score", [True, False, math.nan, "first", None, [1.0], 1j])
def test_no_score(score, *, sampled):
    with pytest.raises(ConfigError, match="returned the score"):
        checked_score(Given(score, sampled), FACTS)


@pytest.mark.parametrize("score", [-1.0, math.inf, 1e308, 1.1e100, 10**400, "arrival"])
def test_no_weight(score):
    with pytest.raises(ConfigError, match=r"between 0 and 1e\+100"):
        checked_score(Given(score, sampled=True), FACTS)


def test_scores_that_are_no_weights():
    for score in (-1.5, math.inf, -math.inf, 1e308, 7, "arrival", "-arrival"):
        assert checked_score(Given(score, sampled=False), FACTS) == score
    assert checked_score(Given(10**400, sampled=False), FACTS) == math.inf
    assert checked_score(Stalest(), FACTS) == math.inf


def test_the_largest_weights():
    assert checked_score(Given(1e100, sampled=True), FACTS) == 1e100
    with pytest.raises(ConfigError):
        checked_score(Prioritized(alpha=2.0), FACTS)
    with pytest.raises(ConfigError, match="alpha=-1"):
        Prioritized(alpha=-1)
