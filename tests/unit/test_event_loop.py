"""Coroutines of recipes: rewards and rollouts compute no gradients."""

from __future__ import annotations

import torch

from redrb.algorithms.event_loop import submit


def test_coroutines_compute_no_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)

    async def scored() -> torch.Tensor:
        return weight * 2

    assert not submit(scored()).result(10).requires_grad
