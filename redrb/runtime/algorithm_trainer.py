"""Base of trainers whose training step is one of `redrb.algorithms`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from redrb.experience import Experience
from redrb.experience.records import per_sample
from redrb.runtime.callbacks import TrainerCallback
from redrb.runtime.checkpoint import stateful_parts
from redrb.runtime.declared_settings import DeclaredSettings
from redrb.runtime.model_placement import PlacedModels
from redrb.runtime.performance import TrainerPerformanceEvaluator
from redrb.runtime.trainer import DetachedTrainer


class AlgorithmTrainer(DetachedTrainer):
    """Trains by calling a step object, and sends all its models as one version.

    Args:
        step: Trains on a batch and returns metrics.
        placed: The models in training; None: a subclass makes them later, and gives the device.
        callbacks: As for `DetachedTrainer`.
        eval_performance: Add a `TrainerPerformanceEvaluator`.
        update_lora_weights: Send only `lora_A` and `lora_B` in updates that are not full.
        device: Device on which batches are trained; default: the strategy's.
        trainer_options: Further arguments of `DetachedTrainer`.
    """

    def __init__(
        self,
        step: Callable[[Experience], dict[str, float]],
        placed: PlacedModels | None,
        *,
        callbacks: Sequence[TrainerCallback],
        eval_performance: bool,
        update_lora_weights: bool,
        device: str | torch.device | None,
        **trainer_options: Any,
    ) -> None:
        parts = stateful_parts(self)
        self._declared = DeclaredSettings(  # a part of checkpoints, loaded after the optimizers
            {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
        )
        self._step = step
        self._update_lora_weights = update_lora_weights
        evaluators = []
        if eval_performance and placed is not None:
            evaluators = [TrainerPerformanceEvaluator(sum(placed.parameters))]
        super().__init__(
            callbacks=[*callbacks, *evaluators],
            device=placed.strategy.device if device is None and placed is not None else device,
            **trainer_options,
        )

    @abstractmethod
    def models_to_send(self) -> dict[str, nn.Module]:
        """Return the models that makers get, by name."""

    def build_optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        """Return an optimizer of a model's trainable parameters; override it for another one."""
        trainable = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trainable, lr=learning_rate)

    def training_step(self, experience: Experience) -> dict[str, float]:
        """Take one step of the algorithm and return its metrics, `actor_loss` among them.

        With policy versions, `staleness_mean` and `staleness_max` are the versions that the samples
        are behind this trainer's weights.
        """
        behind = staleness(experience, self.weight_version)
        return self._step(experience) | behind

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:  # noqa: FBT001, ARG002
        self.push_weights(
            self.models_to_send(), fully_update=fully_update, lora=self._update_lora_weights
        )


def staleness(experience: Experience, current_version: int) -> dict[str, float]:
    """Return how many versions the samples are behind, mean and most; empty without versions."""
    versions = per_sample(experience, "policy_version", len(experience))
    behind = [max(0, current_version - version) for version in versions if version is not None]
    if not behind:
        return {}
    return {"staleness_mean": sum(behind) / len(behind), "staleness_max": float(max(behind))}
