"""Training steps: the fields they need, padding on either side, weights, and learning."""

from __future__ import annotations

import copy
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redrb.algorithms import (
    GAE,
    Completions,
    GRPOExperienceMaker,
    GRPOStep,
    NaiveExperienceMaker,
    PPOStep,
    group_relative_advantages,
)
from redrb.errors import ConfigError, RecordError
from redrb.experience import (
    BufferItem,
    Experience,
    make_experience_batch,
    split_experience_batch,
)
from tests.networks import PlainActor, PlainCritic, SampleCritic, seeded

EOS = 3
WANTED = 7


def share(completions: Completions) -> Tensor:
    """The share of a completion's tokens that are the wanted one."""
    rows = range(len(completions))
    return torch.stack([(completions.completion(row) == WANTED).float().mean() for row in rows])


def prompts(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 12, (rows, width), generator=torch.Generator().manual_seed(seed))


def options(seed: int = 0, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"max_new_tokens": 6, "eos_token_id": EOS, "generator": generator, **changes}


def of_ppo(critic: type[nn.Module] = PlainCritic, *, width: int = 3, seed: int = 0) -> Experience:
    """Experience of a policy and critic other than the trained ones."""
    gae = GAE() if critic is PlainCritic else None
    maker = NaiveExperienceMaker(
        seeded(PlainActor, 5), seeded(critic, 6), share, seeded(PlainActor, 7), gae=gae
    )
    return maker.make_experience(prompts(8, width, seed), **options(seed))


def of_grpo(*, width: int = 3, seed: int = 0) -> Experience:
    maker = GRPOExperienceMaker(seeded(PlainActor, 5), share, seeded(PlainActor, 7), group_size=4)
    return maker.make_experience(prompts(2, width, seed), **options(seed))


def ppo(critic: type[nn.Module] = PlainCritic, rate: float = 0.0, **changes: Any) -> PPOStep:
    actor, valuer = seeded(PlainActor), seeded(critic, 1)
    return PPOStep(
        actor,
        valuer,
        torch.optim.SGD(actor.parameters(), lr=rate),
        torch.optim.SGD(valuer.parameters(), lr=rate),
        **changes,
    )


def grpo(rate: float = 0.0, **changes: Any) -> GRPOStep:
    actor = seeded(PlainActor)
    return GRPOStep(actor, torch.optim.SGD(actor.parameters(), lr=rate), **changes)


PPO_VARIANTS = [
    {},
    {"aggregation": "token", "value_target": "returns", "normalise_advantages": True},
    {"clip_high": 0.3, "value_clip": None, "entropy_coef": 0.01},
]
GRPO_VARIANTS = [
    {},
    {"beta": 0.04, "aggregation": "sequence"},
    {"clip_high": 0.28, "max_grad_norm": None},
]


def assert_same(first: dict[str, float], second: dict[str, float]) -> None:
    assert first == pytest.approx(second, abs=1e-5, rel=1e-4)


@pytest.mark.parametrize("variant", PPO_VARIANTS)
@pytest.mark.parametrize("critic", [PlainCritic, SampleCritic])
def test_ppo_reports_numbers_and_changes_both_networks(variant, critic):
    step = ppo(critic, rate=0.1, **variant)
    before = copy.deepcopy((step.actor, step.critic))
    metrics = step(of_ppo(critic))
    assert {"actor_loss", "critic_loss", "approx_kl", "clip_fraction", "entropy", "reward"} <= {
        *metrics
    }
    assert all(math.isfinite(number) for number in metrics.values())
    assert metrics["actor_grad_norm"] > 0
    assert metrics["critic_grad_norm"] > 0
    for old, new in zip(before, (step.actor, step.critic), strict=True):
        assert not torch.equal(old.head.weight, new.head.weight)


@pytest.mark.parametrize("variant", GRPO_VARIANTS)
def test_grpo_reports_numbers_and_changes_the_actor(variant):
    step = grpo(rate=0.1, **variant)
    before = copy.deepcopy(step.actor)
    metrics = step(of_grpo())
    assert {"actor_loss", "approx_kl", "clip_fraction", "entropy", "reward"} <= {*metrics}
    assert ("reference_kl" in metrics) == ("beta" in variant)
    assert all(math.isfinite(number) for number in metrics.values())
    assert not torch.equal(before.head.weight, step.actor.head.weight)


def samples(parts: list[Experience]) -> list[BufferItem]:
    return [item for part in parts for item in split_experience_batch(part)]


def test_a_batch_that_is_padded_on_the_right_is_refused():
    parts = samples([of_grpo(width=width, seed=width) for width in (2, 3)])
    with pytest.raises(RecordError, match="GRPO trains batches that are padded on the left"):
        grpo()(make_experience_batch(parts, side="right"))


def test_a_reference_padded_on_the_other_side_is_refused():
    # split_experience_batch strips the padding of standard fields, not of `tensors`
    right = make_experience_batch(
        samples([of_grpo(width=width, seed=width) for width in (2, 3)]), side="right"
    )
    again = make_experience_batch(split_experience_batch(right))
    with pytest.raises(RecordError, match=r"reference_log_probs.*padded on another side"):
        grpo(beta=0.1)(again)
    shortest = min(split_experience_batch(right), key=lambda item: len(item.action_log_probs))
    with pytest.raises(RecordError, match=r"reference_log_probs holds numbers beyond the \d"):
        grpo(beta=0.1)(make_experience_batch([shortest]))


def test_masks_may_be_none():
    whole = NaiveExperienceMaker(
        seeded(PlainActor, 5), seeded(PlainCritic, 6), share, seeded(PlainActor, 7)
    ).make_experience(prompts(4, 3), **options(eos_token_id=None))
    masked, of_group = ppo()(whole), grpo()(whole)
    whole.attention_mask = whole.action_mask = None
    assert_same(ppo()(whole), masked)
    assert_same(grpo()(whole), of_group)


def test_bool_masks_are_masks():
    batch = of_ppo()
    expected = ppo()(batch)
    batch.attention_mask, batch.action_mask = batch.attention_mask.bool(), batch.action_mask.long()
    assert_same(ppo()(batch), expected)


def test_fresh_experience_has_a_ratio_of_one():
    actor = seeded(PlainActor)
    maker = GRPOExperienceMaker(actor, share, group_size=4)
    batch = maker.make_experience(prompts(3, 3), **options(temperature=0.7))
    metrics = GRPOStep(actor, torch.optim.SGD(actor.parameters()), temperature=0.7)(batch)
    assert metrics["clip_fraction"] == 0
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)


def test_truncated_importance_takes_the_ratio_to_the_actor_before_the_batch():
    parts = samples([of_grpo(width=width, seed=width) for width in (2, 3)])
    experience = make_experience_batch(parts)
    noted = experience.action_log_probs
    assert noted is not None
    step = grpo(rate=0.5, truncated_importance=1.01)
    batch = step.batch(experience, step.actor)
    own = step._forward(batch)[1].detach()
    weights = (own - batch.old_log_probs).exp().clamp(max=1.01)[batch.action_mask]
    first = step(experience)
    assert (first["ratio_mean"], first["ratio_max"]) == (1.0, 1.0)
    assert first["importance_mean"] == pytest.approx(weights.mean().item(), rel=1e-5)
    share = (weights == 1.01).float().mean().item()
    assert 0 < share == pytest.approx(first["truncated_fraction"])
    # the loss by hand: ratios of 1, weights, advantages
    losses = -batch.per_action("advantages")[batch.action_mask] * weights
    assert first["actor_loss"] == pytest.approx(losses.mean().item(), abs=1e-6)
    # a second epoch uses the log-probabilities from before the first
    kept = step.batch(experience, step.actor).padded_as_actions("proximal_log_probs")
    torch.testing.assert_close(kept, own.masked_fill(~batch.action_mask, 0.0))
    second = step(experience)
    assert second["ratio_max"] > 1.01
    assert second["importance_mean"] == first["importance_mean"]
    assert torch.equal(experience.action_log_probs, noted)


def test_answers_of_tools_have_log_probs_of_the_reference_too():
    """Tokens that no policy chose are no padding, whatever the trainer's policy thinks of them."""
    experience = of_grpo()
    experience.action_mask[:, 2] = 0
    experience.action_log_probs[:, 2] = -1.0
    experience.tensors["reference_log_probs"][:, 2] = -2.0
    found = grpo(beta=0.1, truncated_importance=2.0)(copy.deepcopy(experience))
    experience.tensors["reference_log_probs"][:, 2] = -7.0
    assert_same(grpo(beta=0.1, truncated_importance=2.0)(experience), found)


def test_metrics_by_hand():
    experience = of_grpo()
    assert experience.action_log_probs is not None
    step = grpo()
    batch = step.batch(experience, step.actor)
    ratio = (step._forward(batch)[1] - batch.old_log_probs).exp()[batch.action_mask]
    metrics = step(experience)
    lengths = experience.action_mask.sum(1).float()
    assert metrics["length_mean"] == lengths.mean().item()
    assert metrics["length_max"] == lengths.max().item()
    assert metrics["ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert metrics["ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-5)
    assert metrics["approx_kl"] == pytest.approx((ratio - 1 - ratio.log()).mean().item(), rel=1e-4)
    outside = (ratio < 0.8) | (ratio > 1.2)
    assert metrics["clip_fraction"] == pytest.approx(outside.float().mean().item())
    assert metrics["reward"] == pytest.approx(experience.reward.mean().item())
    made = of_ppo()
    assert made.action_mask is not None
    expected = made.kl[made.action_mask].mean().item()
    assert ppo()(made)["reference_kl"] == pytest.approx(expected, rel=1e-5)


def test_coatis_targets_are_the_returns_where_advantages_are_reward_minus_value():
    batch = of_ppo(SampleCritic)
    of_reward = ppo(SampleCritic, value_target="reward")(batch)
    assert_same(of_reward, ppo(SampleCritic, value_target="returns")(batch))


def test_coatis_experience_with_a_column_of_advantages_trains():
    batch = of_ppo(SampleCritic)
    expected = ppo(SampleCritic)(batch)
    batch.advantages = batch.advantages[:, None]
    assert_same(ppo(SampleCritic)(batch), expected)


@pytest.mark.parametrize("critic", [PlainCritic, SampleCritic])
def test_importance_weights_multiply_each_samples_loss(critic):
    items = split_experience_batch(of_ppo(critic))[:2]
    each = [ppo(critic)(make_experience_batch([item])) for item in items]
    batch = make_experience_batch(items)
    batch.tensors["importance_weights"] = torch.tensor([2.0, 0.5])
    both = ppo(critic)(batch)
    for loss in ("actor_loss", "critic_loss"):
        assert both[loss] == pytest.approx((2 * each[0][loss] + 0.5 * each[1][loss]) / 2, rel=1e-4)
    batch.tensors["importance_weights"] = torch.tensor([[2.0], [0.5]]) * batch.action_mask
    assert_same(ppo(critic)(batch), both)


def test_importance_weights_of_grpo():
    items = split_experience_batch(of_grpo())[:2]
    step = {"beta": 0.1, "aggregation": "sequence"}
    each = [grpo(**step)(make_experience_batch([item]))["actor_loss"] for item in items]
    batch = make_experience_batch(items)
    batch.tensors["importance_weights"] = torch.tensor([2.0, 0.5])
    expected = (2 * each[0] + 0.5 * each[1]) / 2
    assert grpo(**step)(batch)["actor_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "missing", ["sequences", "action_log_probs", "values", "reward", "advantages"]
)
def test_a_field_that_ppo_needs_is_named(missing):
    batch = of_ppo()
    setattr(batch, missing, None)
    with pytest.raises(RecordError, match=f"PPO needs {missing}") as caught:
        ppo()(batch)
    assert caught.value.field == missing


@pytest.mark.parametrize("missing", ["sequences", "action_log_probs", "advantages"])
def test_a_field_that_grpo_needs_is_named(missing):
    batch = of_grpo()
    setattr(batch, missing, None)
    with pytest.raises(RecordError, match=f"GRPO needs {missing}"):
        grpo()(batch)


def test_grpo_compares_the_rewards_of_groups_that_have_no_advantages():
    batch = of_grpo()
    batch.group_index = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    given, compared = grpo(0.1), grpo(0.1)
    expected = given(batch)
    batch.advantages = None
    assert compared(batch) == pytest.approx(expected, rel=1e-5)
    assert batch.advantages is None
    weights = zip(given.actor.parameters(), compared.actor.parameters(), strict=True)
    assert all(torch.allclose(one, other) for one, other in weights)
    without = grpo(0.1, scale_by_std=False)(batch)["actor_grad_norm"]
    assert without != pytest.approx(expected["actor_grad_norm"], rel=1e-3)
    batch.reward = None
    before = copy.deepcopy(compared.actor.state_dict())
    with pytest.raises(RecordError, match="GRPO needs advantages, or else a reward") as caught:
        compared(batch)
    assert caught.value.field == "reward"
    after = compared.actor.state_dict()
    assert all(torch.equal(before[name], each) for name, each in after.items())
    with pytest.raises(ConfigError, match="method"):
        grpo(method="none")


def test_grpo_needs_a_reference_only_for_beta():
    batch = of_grpo()
    batch.tensors.clear()
    batch.kl = batch.reward = None
    assert "reward" not in grpo()(batch)
    with pytest.raises(RecordError, match="GRPO needs reference_log_probs"):
        grpo(beta=0.1)(batch)


@pytest.mark.parametrize(
    ("field", "shape", "said"),
    [
        ("values", (8,), r"critic's values have shape .* maker and trainer need the same critic"),
        ("advantages", (8, 2), r"advantages has shape \[8, 2\], not \[8\] or \[8, 6\]"),
        ("action_mask", (8, 5), r"action_mask has shape \[8, 5\], which does not fit"),
        ("action_log_probs", (8, 99), r"action_log_probs has shape \[8, 99\], which does not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_named(field, shape, said):
    batch = of_ppo()
    setattr(batch, field, torch.ones(shape))
    with pytest.raises(RecordError, match=said):
        ppo()(batch)


@pytest.mark.parametrize("field", ["advantages", "reward"])
def test_nan_in_a_field_leaves_the_weights_unchanged(field):
    batch = of_ppo()
    getattr(batch, field)[0] = math.nan
    step = ppo(rate=0.1)
    before = copy.deepcopy(step.actor.state_dict() | step.critic.state_dict())
    with pytest.raises(RecordError, match=r"grad_norm is nan.*weights are as they were"):
        step(batch)
    after = step.actor.state_dict() | step.critic.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0},
        {"clip_high": -1},
        {"temperature": 0.0},
        {"max_grad_norm": 0.0},
        {"aggregation": "mean"},
    ],
)
def test_a_wrong_option_is_named(wrong):
    for build in (ppo, grpo):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            build(**wrong)


def test_options_of_one_algorithm_are_checked_too():
    with pytest.raises(ConfigError, match="beta -1"):
        grpo(beta=-1)
    with pytest.raises(ConfigError, match="value_target='kl'"):
        ppo(value_target="kl")
    with pytest.raises(ConfigError, match="entropy_coef nan"):
        ppo(entropy_coef=math.nan)


def test_one_optimizer_may_serve_both_networks():
    actor, critic = seeded(PlainActor), seeded(PlainCritic, 1)
    both = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
    steps: list[int] = []
    both.register_step_post_hook(lambda *_: steps.append(1))
    shared = PPOStep(actor, critic, both, both)
    apart = ppo(rate=0.1)
    assert_same(shared(of_ppo()), apart(of_ppo()))
    assert steps == [1]
    torch.testing.assert_close(actor.state_dict(), apart.actor.state_dict())
    torch.testing.assert_close(critic.state_dict(), apart.critic.state_dict())


def test_a_subclass_changes_a_part():
    class Doubled(GRPOStep):
        def actor_loss(self, batch):
            loss, metrics = super().actor_loss(batch)
            return 2 * loss, {**metrics, "doubled": 2 * loss}

    actor = seeded(PlainActor)
    metrics = Doubled(actor, torch.optim.SGD(actor.parameters()))(of_grpo())
    assert metrics["doubled"] == pytest.approx(2 * metrics["actor_loss"])


def test_ppo_learns():
    actor, critic = seeded(PlainActor), seeded(PlainCritic, 1)
    maker = NaiveExperienceMaker(
        actor, critic, share, copy.deepcopy(actor), kl_coef=0.01, gae=GAE()
    )
    step = PPOStep(
        actor,
        critic,
        torch.optim.Adam(actor.parameters(), lr=0.02),
        torch.optim.Adam(critic.parameters(), lr=0.02),
        value_target="returns",
        normalise_advantages=True,
    )
    history = []
    for number in range(30):
        batch = maker.make_experience(prompts(32, 3, number), **options(number))
        history.append(step(batch))
    assert history[0]["reward"] < 0.2
    assert history[-1]["reward"] > 0.6
    assert history[-1]["critic_loss"] < history[0]["critic_loss"]


def test_grpo_learns():
    actor = seeded(PlainActor)
    maker = GRPOExperienceMaker(actor, share, copy.deepcopy(actor), group_size=8)
    step = GRPOStep(actor, torch.optim.Adam(actor.parameters(), lr=0.02), beta=0.01)
    history = []
    for number in range(30):
        batch = maker.make_experience(prompts(4, 3, number), **options(number))
        history.append(step(batch)["reward"])
    assert history[0] < 0.2
    assert sum(history[-3:]) / 3 > 0.6


@pytest.mark.parametrize("changes", [{}, {"micro_batch_size": 3}])
def test_reinforce_normalises_over_the_actions_of_the_batch(changes):
    """The reference is computed action by action, in float64."""
    experience = of_grpo()
    assert experience.reward is not None
    experience.advantages = group_relative_advantages(
        experience.reward, group_size=4, method="reinforce++"
    )
    plain = copy.deepcopy(experience)
    mask, advantages = plain.action_mask, plain.advantages
    assert mask is not None
    assert advantages is not None
    counted = [float(advantages[row]) for row, _ in mask.nonzero().tolist()]
    mean, spread = statistics.fmean(counted), statistics.pstdev(counted)
    plain.advantages = ((advantages.double() - mean) / spread).float()
    steps = [grpo(0.1, normalise_advantages=True, **changes), grpo(0.1)]
    for step, each in zip(steps, (experience, plain), strict=True):
        step(each)
    for found, expected in zip(*(step.actor.parameters() for step in steps), strict=True):
        torch.testing.assert_close(found, expected)
