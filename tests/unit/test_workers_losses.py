"""Advantages and losses against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from workers.advantages import gae, token_rewards
from workers.losses import entropy, masked_mean, normalised, policy_loss, value_loss
from workers.policy import chosen_log_probs

MASK = torch.tensor([[True, True, True], [True, True, False]])


def close(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected))


def test_reward_comes_with_the_last_action_and_kl_is_paid_at_each() -> None:
    kl = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 99.0]])
    rewards = token_rewards(torch.tensor([1.0, 0.5]), kl, MASK, kl_coef=0.1)
    close(rewards, [[-0.1, -0.2, 0.7], [-0.4, 0.0, 0.0]])


def test_reward_finds_the_last_action_after_left_padding() -> None:
    mask = torch.tensor([[False, True, True, False]])
    close(
        token_rewards(torch.tensor([1.0]), torch.zeros(1, 4), mask, kl_coef=0.1), [[0.0, 0, 1, 0]]
    )


def test_gae_by_hand() -> None:
    # row 0, backwards: delta 2 = 1 - 0.6 = 0.4; delta 1 = 0.9 * 0.6 - 0.4 = 0.14;
    # delta 0 = 0.9 * 0.4 - 0.2 = 0.16; each adds 0.9 * 0.5 of the next advantage
    # row 1: delta 1 = 1 - 0.5 = 0.5; delta 0 = 0.9 * 0.5 - 0.1 = 0.35
    values = torch.tensor([[0.2, 0.4, 0.6], [0.1, 0.5, 7.0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    advantages = gae(rewards, values, MASK, gamma=0.9, lam=0.5)
    close(advantages, [[0.16 + 0.45 * 0.32, 0.14 + 0.45 * 0.4, 0.4], [0.35 + 0.45 * 0.5, 0.5, 0.0]])


def test_gae_with_lambda_1_is_return_minus_value() -> None:
    values = torch.tensor([[0.2, 0.4, 0.6]])
    rewards = torch.tensor([[0.1, -0.2, 1.0]])
    advantages = gae(rewards, values, MASK[:1], gamma=1.0, lam=1.0)
    close(advantages + values, [[0.9, 0.8, 1.0]])


def test_policy_loss_by_hand() -> None:
    # min(1.5 * 1, 1.2 * 1) = 1.2; min(0.5 * 1, 0.8 * 1) = 0.5; min(1.5 * -1, 1.2 * -1) = -1.5
    # min(0.5 * -1, 0.8 * -1) = -0.8; 1 * 2 = 2; the last is padding
    ratio = torch.tensor([[1.5, 0.5, 1.5], [0.5, 1.0, 77.0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0], [-1.0, 2.0, 55.0]])
    close(policy_loss(ratio, advantages, MASK, clip=0.2), -(1.2 + 0.5 - 1.5 - 0.8 + 2.0) / 5)


def test_value_loss_by_hand() -> None:
    # 0.9 is held at 0.7 by the old 0.5: errors 0.01 and 0.09; 0.6 is within: 0.16 twice
    values, old = torch.tensor([[0.9, 0.6]]), torch.tensor([[0.5, 0.5]])
    mask = torch.tensor([[True, True]])
    close(value_loss(values, old, torch.tensor([[1.0, 1.0]]), mask, clip=0.2), (0.09 + 0.16) / 4)


def test_entropy_by_hand() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]))
    by_hand = [[math.log(2), -0.9 * math.log(0.9) - 0.1 * math.log(0.1)]]
    close(entropy(logits), by_hand)


def test_chosen_log_probs_belong_to_the_last_tokens() -> None:
    logits = torch.log(torch.tensor([[[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]]]))
    close(chosen_log_probs(logits, torch.tensor([[0, 0, 2, 1]])), [[math.log(0.7), math.log(0.3)]])


def test_advantages_are_normalised_over_what_counts() -> None:
    scaled = normalised(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 1e6]]), MASK)
    close(scaled[MASK].mean(), 0.0)
    close(scaled[MASK].square().mean(), 1.0)


def test_padding_counts_for_nothing_even_if_it_is_not_a_number() -> None:
    close(masked_mean(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, math.nan]]), MASK), 3.0)


def test_a_batch_without_actions_has_no_loss() -> None:
    assert masked_mean(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)) == pytest.approx(0.0)
