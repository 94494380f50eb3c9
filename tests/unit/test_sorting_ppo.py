"""Experience of every field, losses that padding does not change, and learning."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch

from redrb.algorithms import PPOStep
from redrb.errors import RecordError
from redrb.experience import (
    BufferItem,
    Experience,
    make_experience_batch,
    split_experience_batch,
)
from redrb.experience.records import STANDARD_FIELDS
from redrb.recipes.sorting import Sorting, as_prompt
from redrb.recipes.sorting.digits import make_prompt, sample_prompts, show
from redrb.recipes.sorting.policy import Actor, ActorCritic, warm_start

RECIPE = Sorting(worker="maker")


@pytest.fixture(scope="module")
def model() -> ActorCritic:
    return warm_start(0, steps=20)


@pytest.fixture(scope="module")
def reference() -> ActorCritic:
    return warm_start(1, steps=12)


def ppo_step(model: ActorCritic) -> PPOStep:
    """The step that the trainer takes, with one optimizer for both networks."""
    rates = (RECIPE.actor_learning_rate, RECIPE.critic_learning_rate)
    groups = [
        {"params": list(network.parameters()), "lr": rate}
        for network, rate in zip((model.actor, model.critic), rates, strict=True)
    ]
    optimizer = torch.optim.Adam(groups, fused=True)
    networks = {"actor": model.actor, "critic": model.critic}
    return RECIPE.algorithm(networks, {"actor": optimizer, "critic": optimizer})


def make_experience(
    model: ActorCritic,
    reference: Actor,
    prompts: Sequence[torch.Tensor],
    *,
    generator: torch.Generator,
    recipe: Sorting = RECIPE,
    policy_version: int | None = None,
) -> Experience:
    """What a maker makes of prompts."""
    maker = recipe.experience_maker({"actor": model.actor, "critic": model.critic}, reference)
    options = {**recipe.generation(generator), "policy_version": policy_version}
    return maker.make_experience([as_prompt(prompt) for prompt in prompts], **options)


def ppo_losses(model: ActorCritic, experience: Experience) -> dict[str, torch.Tensor]:
    """The losses and measurements of a batch, without a step."""
    step = ppo_step(model)
    of_actor, metrics = step.actor_loss(step.batch(experience, model.actor))
    of_critic, more = step.critic_loss(step.batch(experience, model.critic))
    return {**metrics, **more, "actor_loss": of_actor, "critic_loss": of_critic}


def made(model: ActorCritic, reference: ActorCritic, digits: int, seed: int = 0) -> Experience:
    """Experience of prompts of `digits` digits, by another policy than the one in training."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [make_prompt(torch.randperm(10, generator=generator)[:digits].tolist())] * 2
    return make_experience(
        reference, model.actor, prompts, generator=generator, policy_version=digits
    )


def held_out_reward(model: ActorCritic) -> float:
    found = RECIPE.evaluate({"actor": model.actor})
    assert found is not None
    return found["reward"]


def test_every_field_is_filled(model: ActorCritic, reference: ActorCritic) -> None:
    generator = torch.Generator().manual_seed(0)
    experience = make_experience(
        model, reference.actor, sample_prompts(generator, 8), generator=generator, policy_version=3
    )
    fields = {name: getattr(experience, name) for name in STANDARD_FIELDS}
    samples, length = fields["sequences"].shape
    actions = fields["action_mask"].shape[1]
    assert samples == 8 * RECIPE.group_size
    assert {name: tuple(tensor.shape) for name, tensor in fields.items()} == {
        "sequences": (samples, length),
        "action_log_probs": (samples, actions),
        "values": (samples, actions),
        "reward": (samples,),
        "kl": (samples, actions),
        "advantages": (samples, actions),
        "attention_mask": (samples, length),
        "action_mask": (samples, actions),
    }
    assert fields["sequences"].dtype == fields["attention_mask"].dtype == torch.int64
    assert fields["action_mask"].dtype == torch.bool
    for name in ("action_log_probs", "values", "reward", "kl", "advantages"):
        assert fields[name].dtype == torch.float32
    padding = ~fields["action_mask"]
    assert len(set(padding.sum(1).tolist())) > 1
    for name in ("action_log_probs", "values", "kl", "advantages"):
        assert (fields[name][padding] == 0).all()
    assert (fields["kl"] != 0).any()
    assert experience.policy_version == 3
    items = split_experience_batch(experience)
    size = RECIPE.group_size
    for index, item in enumerate(items):
        assert item.group_id == f"maker-{index // size + 1}"
        digits = item.tags["digits"]
        assert item.tags["maker"] == "maker"
        assert item.sequences is not None
        assert item.extras["text"] in show(item.sequences)
        assert len(item.extras["text"]) == digits + len("[BOS][SEP]")


def test_experience_follows_the_seed(model: ActorCritic, reference: ActorCritic) -> None:
    first, same = (made(model, reference, 5, seed=9) for _ in range(2))
    for name in STANDARD_FIELDS:
        assert torch.equal(getattr(first, name), getattr(same, name))


def test_returns_with_lambda_1_are_reward_minus_kl(
    model: ActorCritic, reference: ActorCritic
) -> None:
    generator = torch.Generator().manual_seed(0)
    recipe = Sorting(lam=1.0, kl_coef=0.1)
    prompts = sample_prompts(generator, 4)
    done = make_experience(reference, model.actor, prompts, generator=generator, recipe=recipe)
    assert done.advantages is not None
    assert done.values is not None
    assert done.reward is not None
    assert done.kl is not None
    returns = (done.advantages + done.values)[:, 0]
    torch.testing.assert_close(returns, done.reward - 0.1 * done.kl.sum(1), atol=1e-5, rtol=1e-4)


def test_losses_do_not_change_when_rows_are_padded_anew(
    model: ActorCritic, reference: ActorCritic
) -> None:
    parts = [made(model, reference, digits) for digits in (4, 5, 6)]
    items = [item for part in parts for item in split_experience_batch(part)]
    random.Random(0).shuffle(items)
    mixed = make_experience_batch(items)
    alone = [make_experience_batch([item]) for item in items]
    assert len({batch.sequences.shape[1] for batch in alone if batch.sequences is not None}) > 1
    of_mixed = ppo_losses(model, mixed)
    of_rows = [ppo_losses(model, batch) for batch in alone]
    counts = torch.tensor([float(_mask(batch).sum()) for batch in alone])
    # the actor loss is left to the next test: it normalises advantages over the whole batch
    for name in ("critic_loss", "entropy", "approx_kl", "clip_fraction"):
        rows = torch.stack([losses[name] for losses in of_rows])
        weighted = (rows * counts).sum() / counts.sum()
        torch.testing.assert_close(of_mixed[name], weighted, atol=1e-5, rtol=1e-4)
    assert of_mixed["clip_fraction"] > 0


def test_losses_do_not_change_in_a_wider_batch(model: ActorCritic, reference: ActorCritic) -> None:
    batch = make_experience_batch(split_experience_batch(made(model, reference, 4)))
    before = ppo_losses(model, batch)
    wide = make_experience_batch([*split_experience_batch(batch), _masked_out(16, 10)])
    assert wide.sequences is not None
    assert wide.sequences.shape[1] == 16
    _close(before, ppo_losses(model, wide))


def test_fresh_experience_has_a_ratio_of_one(model: ActorCritic, reference: ActorCritic) -> None:
    losses = ppo_losses(model, made(reference, model, 5))
    assert losses["clip_fraction"].item() == 0
    assert losses["approx_kl"].item() == pytest.approx(0, abs=1e-6)
    # with a ratio of 1 the policy loss is the mean of the normalised advantages
    assert losses["actor_loss"].item() == pytest.approx(0, abs=1e-4)


def test_masks_may_be_none(model: ActorCritic) -> None:
    batch = make_experience_batch([_full_row(), _full_row()])
    assert batch.attention_mask is None
    assert batch.action_mask is None
    assert ppo_losses(model, batch)["entropy"] > 0


@pytest.mark.parametrize("missing", ["sequences", "action_log_probs", "values", "advantages"])
def test_a_missing_field_is_named(model: ActorCritic, missing: str) -> None:
    batch = make_experience_batch([_full_row()])
    setattr(batch, missing, None)
    with pytest.raises(RecordError, match=missing):
        ppo_losses(model, batch)


def test_a_step_changes_both_networks_and_reports_numbers(
    model: ActorCritic, reference: ActorCritic
) -> None:
    trained = copy.deepcopy(model)
    metrics = ppo_step(trained)(made(model, reference, 6))
    assert all(isinstance(value, float) and value == value for value in metrics.values())
    assert {"actor_loss", "critic_loss", "approx_kl", "clip_fraction", "entropy"} <= set(metrics)
    assert not torch.equal(trained.actor.head.weight, model.actor.head.weight)
    assert not torch.equal(trained.critic.head.weight, model.critic.head.weight)


def test_ppo_learns_from_weights_that_lag_behind() -> None:
    model = warm_start(0)
    reference = copy.deepcopy(model.actor)
    before = held_out_reward(model)
    behaviour, train = copy.deepcopy(model), ppo_step(model)
    generator = torch.Generator().manual_seed(0)
    for step in range(48):
        if step % 3 == 0:
            behaviour.load_state_dict(model.state_dict())
        prompts = sample_prompts(generator, 32)
        experience = make_experience(behaviour, reference, prompts, generator=generator)
        train(experience)
    after = held_out_reward(model)
    assert before < 0.5
    assert after > before + 0.3


def _full_row() -> BufferItem:
    return BufferItem(
        sequences=make_prompt([3, 1, 2]),
        action_log_probs=torch.full((2,), -2.0),
        values=torch.zeros(2),
        reward=torch.tensor(1.0),
        kl=torch.zeros(2),
        advantages=torch.tensor([1.0, -1.0]),
    )


def _masked_out(length: int, actions: int) -> BufferItem:
    """A row of which nothing counts, with numbers that would be noticed."""
    return BufferItem(
        sequences=torch.full((length,), 5),
        action_log_probs=torch.full((actions,), -9.0),
        values=torch.full((actions,), 50.0),
        reward=torch.tensor(0.0),
        kl=torch.zeros(actions),
        advantages=torch.full((actions,), 70.0),
        attention_mask=torch.ones(length, dtype=torch.int64),
        action_mask=torch.zeros(actions, dtype=torch.bool),
    )


def _mask(batch: Experience) -> torch.Tensor:
    assert batch.action_mask is not None
    return batch.action_mask


def _close(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    for name in ("actor_loss", "critic_loss", "entropy", "approx_kl", "clip_fraction"):
        torch.testing.assert_close(before[name], after[name], atol=1e-5, rtol=1e-4)
