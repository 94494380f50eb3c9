"""Losses and divergences against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from redrb.algorithms.losses import (
    action_ratio,
    aggregate,
    grpo_loss,
    kl_estimate,
    masked_mean,
    normalised,
    policy_loss,
    truncated_importance,
    value_loss,
)
from redrb.errors import ConfigError

MASK = torch.tensor([[True, True, True], [True, True, False]])
RATIO = torch.tensor([[1.5, 0.5, 1.5], [0.5, 1.0, 77.0]])
ADVANTAGES = torch.tensor([[1.0, 1.0, -1.0], [-1.0, 2.0, 55.0]])
# min(1.5 * 1, 1.2 * 1) = 1.2; min(0.5 * 1, 0.8 * 1) = 0.5; min(1.5 * -1, 1.2 * -1) = -1.5;
# min(0.5 * -1, 0.8 * -1) = -0.8; 1 * 2 = 2; the last is padding


def close(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected))


def test_policy_loss_by_hand():
    close(policy_loss(RATIO, ADVANTAGES, MASK, clip=0.2), -(1.2 + 0.5 - 1.5 - 0.8 + 2.0) / 5)


def test_policy_loss_of_sequences_by_hand():
    # coati's: row means (1.2 + 0.5 - 1.5) / 3 = 0.2 / 3 and (-0.8 + 2) / 2 = 0.6, then their mean
    loss = policy_loss(RATIO, ADVANTAGES, MASK, clip=0.2, aggregation="sequence")
    close(loss, -(0.2 / 3 + 0.6) / 2)


def test_clip_higher_by_hand():
    # only 1.5 at an advantage of 1 meets the upper bound, now 1.28: 1.28 instead of 1.2
    loss = policy_loss(RATIO, ADVANTAGES, MASK, clip=0.2, clip_high=0.28)
    close(loss, -(1.28 + 0.5 - 1.5 - 0.8 + 2.0) / 5)


def test_truncated_importance_by_hand():
    policy = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.1, math.nan]])).requires_grad_()
    maker = torch.log(torch.tensor([[0.25, 0.1, 0.4], [0.9, 0.1, 0.5]]))
    weights = truncated_importance(policy, maker, MASK, cap=2.5)
    # 0.5 / 0.25; 0.3 / 0.1 = 3 is above the cap; 0.2 / 0.4; 1; 1; padding
    close(weights, [[2.0, 2.5, 0.5], [1.0, 1.0, 1.0]])
    assert not weights.requires_grad


def test_truncated_weights_multiply_the_policy_loss_alone():
    one, other = torch.log(RATIO), torch.zeros(2, 3)
    options = {"clip": 0.2, "beta": 0.1, "reference_log_probs": other + 0.5}
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.0, 3.0, 9.0]])
    loss = grpo_loss(one, other, ADVANTAGES, MASK, policy_weights=weights, **options)
    policy = -(1.2 + 6.0) / 5
    divergence = grpo_loss(one, other, 0 * ADVANTAGES, MASK, **options)
    close(loss, policy + divergence.item())


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # of samples: (2 * 0.2 + 0.5 * 1.2) / 5
        ([[2.0], [0.5]], -(2 * 0.2 + 0.5 * 1.2) / 5),
        # of actions: 1.2 * 1 + 0.5 * 0 - 1.5 * 0 - 0.8 * 0 + 2 * 3, and padding's 9 is not seen
        ([[1.0, 0.0, 0.0], [0.0, 3.0, 9.0]], -(1.2 + 6.0) / 5),
    ],
)
def test_importance_weights_multiply_the_losses(weights, expected):
    loss = policy_loss(RATIO, ADVANTAGES, MASK, clip=0.2, weights=torch.tensor(weights))
    close(loss, expected)


def test_value_loss_by_hand():
    # 0.9 is held at 0.7 by the old 0.5: errors 0.01 and 0.09; 0.6 is within: 0.16 twice
    values, old = torch.tensor([[0.9, 0.6]]), torch.tensor([[0.5, 0.5]])
    mask, targets = torch.tensor([[True, True]]), torch.ones(1, 2)
    close(value_loss(values, old, targets, mask, clip=0.2), (0.09 + 0.16) / 4)
    # without clipping: errors 0.01 and 0.16
    close(value_loss(values, old, targets, mask, clip=None), (0.01 + 0.16) / 4)


def test_coatis_value_loss_trains_a_value_a_sample_towards_its_reward():
    # 2.0 is held at 1.4 by the old 1.0: errors (2 - 1.5)^2 = 0.25, (1.4 - 1.5)^2 = 0.01 -> 0.25;
    # 0.1 is within: (0.1 - 1)^2 = 0.81; 0.5 * (0.25 + 0.81) / 2
    values, old = torch.tensor([[2.0], [0.1]]), torch.tensor([[1.0], [0.0]])
    reward = torch.tensor([[1.5], [1.0]])
    loss = value_loss(values, old, reward, torch.ones(2, 1, dtype=torch.bool), clip=0.4)
    close(loss, 0.5 * (0.25 + 0.81) / 2)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # r = reference / policy: 0.25 / 0.5 = 0.5, and 0.5 / 0.4 = 1.25
        ("k1", [-math.log(0.5), -math.log(1.25), 0.0]),
        ("k2", [math.log(0.5) ** 2 / 2, math.log(1.25) ** 2 / 2, 0.0]),
        ("k3", [0.5 - 1 - math.log(0.5), 1.25 - 1 - math.log(1.25), 0.0]),
        # policy / reference: 2 and 0.8
        ("coati", [2 - 1 - math.log(2), 0.8 - 1 - math.log(0.8), 0.0]),
    ],
)
def test_divergence_by_hand(estimator, expected):
    log_probs = torch.tensor([[0.5, 0.4, 1.0]]).log()
    reference = torch.tensor([[0.25, 0.5, 1e-9]]).log()
    mask = torch.tensor([[True, True, False]])
    close(kl_estimate(log_probs, reference, mask, estimator=estimator), [expected])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(estimator):
    # the expectation over all actions of the policy is exact: KL(p || q) = sum p log(p / q)
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    mask = torch.ones(1, 3, dtype=torch.bool)
    each = kl_estimate(policy.log()[None], reference.log()[None], mask, estimator=estimator)
    torch.testing.assert_close(
        (policy * each[0]).sum(), (policy * (policy / reference).log()).sum()
    )


LOG_PROBS = torch.tensor([[0.6, 0.2], [0.3, 0.9]]).log()
OLD = torch.tensor([[0.5, 0.4], [0.2, 0.1]]).log()
REFERENCE = torch.tensor([[0.3, 0.2], [0.6, 0.1]]).log()
OF_TWO = torch.tensor([[True, True], [True, False]])
OF_GROUP = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # ratios 1.2, 0.5; 1.5 (clipped to 1.2 only where that is worse): terms 1.2, 0.5, -1.5
        # k3: r = 0.5, 1, 2 -> -0.5 + log 2, 0, 1 - log 2
        ("token", -(1.2 + 0.5 - 1.5) / 3 + 0.04 * (-0.5 + math.log(2) + 1 - math.log(2)) / 3),
        (
            "sequence",
            -((1.2 + 0.5) / 2 - 1.5) / 2 + 0.04 * ((-0.5 + math.log(2)) / 2 + 1 - math.log(2)) / 2,
        ),
    ],
)
def test_grpo_loss_by_hand(aggregation, expected):
    loss = grpo_loss(
        LOG_PROBS,
        OLD,
        OF_GROUP,
        OF_TWO,
        clip=0.2,
        beta=0.04,
        reference_log_probs=REFERENCE,
        aggregation=aggregation,
    )
    close(loss, expected)


def test_grpo_loss_without_a_reference():
    close(grpo_loss(LOG_PROBS, OLD, OF_GROUP, OF_TWO, clip=0.2), -(1.2 + 0.5 - 1.5) / 3)
    with pytest.raises(ConfigError, match=r"reference_log_probs.*beta=0"):
        grpo_loss(LOG_PROBS, OLD, OF_GROUP, OF_TWO, clip=0.2, beta=0.1)


def test_nan_on_padding_has_no_effect_on_loss_or_gradient():
    def gradient(filler):
        fill = (~OF_TWO, filler)
        new = LOG_PROBS.masked_fill(*fill).requires_grad_()
        loss = grpo_loss(
            new,
            OLD.masked_fill(*fill),
            OF_GROUP.masked_fill(*fill),
            OF_TWO,
            clip=0.2,
            beta=0.1,
            reference_log_probs=REFERENCE.masked_fill(*fill),
        )
        loss = loss + value_loss(
            new, OLD.masked_fill(*fill), OF_GROUP.masked_fill(*fill), OF_TWO, clip=0.1
        )
        loss.backward()
        assert new.grad is not None
        return loss.detach(), new.grad

    for filler in (math.nan, math.inf, -math.inf):
        torch.testing.assert_close(gradient(filler), gradient(0.0))


def test_a_huge_ratio_has_a_finite_gradient():
    new = torch.tensor([[0.0]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    ratio = action_ratio(new, torch.tensor([[-500.0]]), mask)
    policy_loss(ratio, torch.tensor([[1.0]]), mask, clip=0.2).backward()
    assert new.grad.isfinite().all()


def test_advantages_are_normalised_over_what_counts():
    scaled = normalised(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 1e6]]), MASK)
    close(scaled[MASK].mean(), 0.0)
    close(scaled[MASK].square().mean(), 1.0)


def test_nan_on_padding_has_no_effect_on_means():
    close(masked_mean(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, math.nan]]), MASK), 3.0)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_rows_without_actions_change_nothing(aggregation):
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]])
    wider = torch.cat([losses, torch.full((2, 3), 50.0)])
    mask = torch.cat([MASK, torch.zeros(2, 3, dtype=torch.bool)])
    before = aggregate(losses, MASK, aggregation=aggregation)
    close(aggregate(wider, mask, aggregation=aggregation), before.item())
    close(aggregate(losses, torch.zeros_like(MASK), aggregation=aggregation), 0.0)


def test_a_wrong_choice_is_named():
    with pytest.raises(ConfigError, match='aggregation=\'mean\': use "token" or "sequence"'):
        aggregate(RATIO, MASK, aggregation="mean")
    with pytest.raises(ConfigError, match="kl_estimator='k4'"):
        kl_estimate(RATIO, RATIO, MASK, estimator="k4")
