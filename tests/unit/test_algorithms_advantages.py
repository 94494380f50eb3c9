"""Shaped rewards and advantages against numbers computed by hand."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrb.algorithms import (
    GAE,
    Overlong,
    compute_reward,
    gae,
    group_relative_advantages,
    token_rewards,
)
from redrb.algorithms.advantages import advantages_of_groups
from redrb.algorithms.losses import normalised
from redrb.errors import ConfigError, RecordError
from redrb.experience import BufferItem, Experience, make_experience_batch
from redrb.experience.fields import SESSION

MASK = torch.tensor([[True, True, True], [True, True, False]])


def close(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_the_shaped_reward_pays_the_mean_divergence():
    # 1 - 0.1 * (1 + 2 + 3) / 3 = 0.8; 0.5 - 0.1 * (4 + 5) / 2 = 0.05
    kl = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, math.nan]])
    close(compute_reward(torch.tensor([1.0, 0.5]), kl, MASK, kl_coef=0.1), [0.8, 0.05])


def test_reward_comes_with_the_last_action_and_kl_is_paid_at_each():
    kl = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 99.0]])
    rewards = token_rewards(torch.tensor([1.0, 0.5]), kl, MASK, kl_coef=0.1)
    close(rewards, [[-0.1, -0.2, 0.7], [-0.4, 0.0, 0.0]])


def test_reward_finds_the_last_action_after_left_padding():
    mask = torch.tensor([[False, True, True, False]])
    close(
        token_rewards(torch.tensor([1.0]), torch.zeros(1, 4), mask, kl_coef=0.1), [[0.0, 0, 1, 0]]
    )


def test_gae_by_hand():
    # row 0, backwards: delta 2 = 1 - 0.6 = 0.4; delta 1 = 0.9 * 0.6 - 0.4 = 0.14;
    # delta 0 = 0.9 * 0.4 - 0.2 = 0.16; each adds 0.9 * 0.5 of the next advantage
    # row 1: delta 1 = 1 - 0.5 = 0.5; delta 0 = 0.9 * 0.5 - 0.1 = 0.35
    values = torch.tensor([[0.2, 0.4, 0.6], [0.1, 0.5, 7.0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    advantages = gae(rewards, values, MASK, gamma=0.9, lam=0.5)
    close(advantages, [[0.16 + 0.45 * 0.32, 0.14 + 0.45 * 0.4, 0.4], [0.35 + 0.45 * 0.5, 0.5, 0.0]])


def test_gae_with_lambda_1_is_return_minus_value():
    values = torch.tensor([[0.2, 0.4, 0.6]])
    rewards = torch.tensor([[0.1, -0.2, 1.0]])
    advantages = gae(rewards, values, MASK[:1], gamma=1.0, lam=1.0)
    close(advantages + values, [[0.9, 0.8, 1.0]])


@pytest.mark.parametrize("wrong", [{"gamma": 1.1}, {"lam": -0.1}, {"lam": math.nan}])
def test_a_wrong_option_of_gae_is_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GAE(**wrong)


# group 0: mean 1, deviations 1, -1, 0, sample variance 2 / 2 = 1
# group 1: mean 5, deviations -2, 2, 0, sample variance 8 / 2 = 4
REWARD = torch.tensor([2.0, 0.0, 1.0, 3.0, 7.0, 5.0])
SCALED = [1 / 1.0001, -1 / 1.0001, 0.0, -2 / 2.0001, 2 / 2.0001, 0.0]


def test_group_relative_advantages_by_hand():
    advantages = group_relative_advantages(REWARD, group_size=3)
    close(advantages, SCALED)


def test_groups_by_index_may_lie_in_any_order():
    index = torch.tensor([0, 1, 0, 1, 1, 0])
    advantages = group_relative_advantages(REWARD[[0, 3, 1, 4, 5, 2]], group_index=index)
    close(advantages, [SCALED[at] for at in (0, 3, 1, 4, 5, 2)])


def test_without_the_division_by_std():
    advantages = group_relative_advantages(REWARD, group_size=3, scale_by_std=False)
    close(advantages, [1.0, -1.0, 0.0, -2.0, 2.0, 0.0])


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(RecordError, match="6 samples are no whole groups of 4"):
        group_relative_advantages(REWARD, group_size=4)
    with pytest.raises(RecordError, match=r"group_index has shape \[2\], reward \[6\]"):
        group_relative_advantages(REWARD, group_index=torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="either"):
        group_relative_advantages(REWARD)


@pytest.mark.parametrize("value", [0.7, 0.1, 100.1, -1e6, 1 / 3])
@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize("scale_by_std", [True, False])
def test_equal_rewards_have_no_advantage(value, size, scale_by_std):
    """The float32 mean of equal numbers differs from them by a unit of the last place."""
    rewards = torch.cat([torch.full((size,), value), torch.arange(float(size))])
    found = group_relative_advantages(rewards, group_size=size, scale_by_std=scale_by_std)
    assert found[:size].tolist() == [0.0] * size
    assert found[size:].abs().max() > 0.4
    mask = torch.ones(2, size, dtype=torch.bool)
    assert normalised(torch.full((2, size), value), mask).abs().max() == 0


def test_large_rewards_have_the_advantages_of_their_differences():
    rewards = torch.tensor([1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3])
    found = group_relative_advantages(rewards, group_size=4)
    exact = rewards.double()
    expected = (exact - exact.mean()) / (exact.std() + 1e-4)
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=0)


def alone(rewards: list[float], method: str) -> list[float]:
    """Return the advantages of one group, sample by sample, from the text of the papers."""
    found = []
    for number, reward in enumerate(rewards):
        others = rewards[:number] + rewards[number + 1 :]
        if method == "rloo":  # the baseline is the mean of the other samples
            found.append(reward - statistics.fmean(others) if others else 0.0)
        else:  # REINFORCE++ with a baseline; of one sample it has none
            found.append(reward - statistics.fmean(rewards) if others else reward)
    return found


@given(
    groups=st.lists(
        st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9), min_size=1, max_size=5
    ),
    method=st.sampled_from(["rloo", "reinforce++"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_rloo_and_reinforce_are_those_of_each_sample_alone(groups, method, seed):
    expected = torch.tensor([each for group in groups for each in alone(group, method)])
    rewards = torch.tensor([reward for group in groups for reward in group])
    index = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))
    found = group_relative_advantages(
        rewards[order], group_index=index[order] * 7 - 3, method=method
    )
    torch.testing.assert_close(found, expected[order].float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("method", ["rloo", "reinforce++"])
@pytest.mark.parametrize("value", [0.7, 100.1, 1 / 3])
def test_equal_rewards_have_no_advantage_by_any_method(value, method):
    rewards = torch.full((8,), value)
    assert not group_relative_advantages(rewards, group_size=8, method=method).any()


def test_an_unknown_method_is_named():
    with pytest.raises(ConfigError, match="method"):
        group_relative_advantages(REWARD, group_size=3, method="remax")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0.0), (8, 0.0), (9, -0.25), (10, -0.5), (12, -1.0), (13, -1.0)]
)
@pytest.mark.parametrize("most", [1.0, 10.0])
def test_long_completions_are_punished_as_in_dapo(length, expected, most):
    """L_max is 12 and L_cache 4, so the interval of the punishment is 8 to 12."""
    punishment = Overlong(limit=12, cache=4, most=most)
    close(punishment(torch.tensor([length, 1])), [most * expected, 0.0])


@pytest.mark.parametrize(
    "wrong", [{"cache": 0}, {"cache": 13}, {"most": 0.0}, {"most": math.nan}, {"most": math.inf}]
)
def test_a_wrong_option_of_the_punishment_is_named(wrong):
    with pytest.raises(ConfigError, match="Overlong"):
        Overlong(**{"limit": 12, "cache": 4, **wrong})


def of_agents(*samples: tuple[int, object, float]) -> Experience:
    """A batch of samples, each with its group, its session and its reward."""
    items = [
        BufferItem(
            sequences=torch.tensor([1, 2]),
            action_log_probs=torch.zeros(1),
            reward=torch.tensor(reward),
            extras={} if session is None else {SESSION: session},
        )
        for _, session, reward in samples
    ]
    batch = make_experience_batch(items)
    batch.group_index = torch.tensor([group for group, _, _ in samples])
    return batch


def test_rewards_are_compared_within_each_group_of_a_batch():
    batch = of_agents((0, "a", 1.0), (1, "b", 5.0), (0, "c", 3.0), (1, "d", 5.0))
    scale = math.sqrt(2) + 1e-4
    close(advantages_of_groups(batch), [-1 / scale, 0.0, 1 / scale, 0.0])
    close(advantages_of_groups(batch, scale_by_std=False), [-1.0, 0.0, 1.0, 0.0])
    close(advantages_of_groups(batch, method="rloo"), [-2.0, 0.0, 2.0, 0.0])


def test_the_branches_of_a_session_count_once():
    plain = of_agents((0, "a", 1.0), (0, "b", 0.0), (0, "c", 0.0))
    branched = of_agents((0, "b", 0.0), (0, "a", 1.0), (0, "b", 0.0), (0, "c", 0.0), (0, "b", 0.0))
    [high, low, _] = advantages_of_groups(plain).tolist()
    close(advantages_of_groups(branched), [low, high, low, low, low])


@pytest.mark.parametrize("session", [None, 7, ["a"], {"a": 1}])
def test_samples_without_the_id_of_a_session_count_each(session):
    batch = of_agents((0, session, 1.0), (0, session, 1.0), (0, session, 4.0))
    close(advantages_of_groups(batch, scale_by_std=False), [-1.0, -1.0, 2.0])


def test_a_column_of_a_data_set_named_session_changes_no_advantage():
    batch = of_agents((0, None, 1.0), (0, None, 1.0), (0, None, 4.0))
    batch.extras = [{"session": "a conversation"}] * 3
    close(advantages_of_groups(batch, scale_by_std=False), [-1.0, -1.0, 2.0])


def test_a_session_of_two_groups_or_rewards_is_two():
    batch = of_agents((0, "a", 1.0), (0, "a", 3.0), (1, "a", 1.0), (1, "b", 2.0))
    close(advantages_of_groups(batch, scale_by_std=False), [-1.0, 1.0, -0.5, 0.5])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 3)), min_size=1))
@settings(max_examples=50)
def test_any_number_of_branches_changes_no_advantage(drawn):
    sessions = [(group, f"s{at}", float(reward)) for at, (group, reward, _) in enumerate(drawn)]
    expected = advantages_of_groups(of_agents(*sessions)).tolist()
    branches = [count for _, _, count in drawn]
    rows = [at for at, count in enumerate(branches) for _ in range(count)]
    found = advantages_of_groups(of_agents(*(sessions[row] for row in rows)))
    close(found, [expected[row] for row in rows])


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("reward", {"reward": None}),
        ("advantages", {"group_index": None}),
        ("advantages", {"reward": torch.zeros(2, 2)}),
    ],
)
def test_what_cannot_be_compared_is_named(field, changes):
    batch = of_agents((0, "a", 1.0), (0, "b", 0.0))
    for name, value in changes.items():
        setattr(batch, name, value)
    with pytest.raises(RecordError, match="GRPO needs advantages, or else a reward") as caught:
        advantages_of_groups(batch)
    assert caught.value.field == field
