"""The training step of the recipe `cartpole`."""

from __future__ import annotations

import torch

from redrb.experience import Experience
from redrb.recipe.examples.cartpole import Cartpole


def batch(advantages: torch.Tensor) -> Experience:
    count = len(advantages)
    return Experience(
        sequences=None,
        action_log_probs=None,
        values=None,
        reward=torch.ones(count),
        kl=None,
        advantages=advantages,
        tensors={
            "state": torch.randn(count, 4),
            "action": torch.zeros(count, dtype=torch.int64),
            "log_prob": torch.full((count,), -0.7),
            "value": torch.zeros(count),
        },
    )


def test_equal_advantages_do_not_move_the_policy():
    """In float32 the mean of 64 times 0.7 is not 0.7, and the division makes the rest large."""
    recipe = Cartpole(entropy_coef=0.0, minibatch=64, epochs=1)
    models = recipe.models()
    before = [each.clone() for each in models["actor"].parameters()]
    metrics = recipe.step(models, recipe.optimizers(models), batch(torch.full((64,), 0.7)))
    assert metrics["actor_loss"] == 0.0
    for each, old in zip(models["actor"].parameters(), before, strict=True):
        assert torch.equal(each, old)


def test_a_last_minibatch_of_one_row_is_a_step_like_others():
    recipe = Cartpole(minibatch=8, epochs=1)
    models = recipe.models()
    recipe.step(models, recipe.optimizers(models), batch(torch.randn(9)))
    for model in models.values():
        assert all(bool(each.isfinite().all()) for each in model.parameters())
