"""What trainers with an algorithm of `redrb.algorithms` share: their step, and its optimizers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from redrb.experience import Experience
from redrb.runtime.trainer import DetachedTrainer


class AlgorithmTrainer(DetachedTrainer):
    """Base of trainers whose training step is one call of an object; a subclass sets `_step`."""

    _step: Callable[[Experience], dict[str, float]]

    def build_optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        """Return the optimizer of a model's trained parameters; override it for another one."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=learning_rate)

    def training_step(self, experience: Experience) -> dict[str, float]:
        """Take one step of the algorithm; returns its metrics, `actor_loss` among them."""
        return self._step(experience)
