"""`DetachedGRPOTrainer` and its maker: GRPO in the shape of the detached runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from redrb.algorithms import GRPOExperienceMaker, GRPOStep
from redrb.runtime.algorithm_trainer import AlgorithmTrainer
from redrb.runtime.callbacks import TrainerCallback
from redrb.runtime.maker import ExperienceMaker, ExperienceMakerHolder
from redrb.runtime.models import parameters_of, set_environment
from redrb.runtime.performance import TrainerPerformanceEvaluator
from redrb.runtime.strategy import Strategy


class DetachedGRPOTrainer(AlgorithmTrainer):
    """Trains an actor by GRPO (Shao et al. 2024, arXiv:2402.03300): there is no critic.

    Example:
        >>> trainer = DetachedGRPOTrainer(
        ...     ["maker_0"], redrb.Strategy, lambda: actor, train_batch_size=8
        ... )
    """

    def __init__(
        self,
        experience_maker_holder_name_list: Sequence[str],
        strategy_fn: Callable[[], Strategy | None],
        model_fn: Callable[[], nn.Module],
        env_info: Mapping[str, Any] | None = None,
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        eps_clip: float = 0.2,
        dataloader_pin_memory: bool = True,  # noqa: FBT001 (as in DetachedPPOTrainer)
        callbacks: Sequence[TrainerCallback] = (),
        eval_performance: bool = False,  # noqa: FBT001
        debug: bool = False,  # noqa: FBT001
        update_lora_weights: bool = False,  # noqa: FBT001
        *,
        actor_lr: float = 1e-6,
        device: str | torch.device | None = None,
        grpo_options: Mapping[str, Any] | None = None,
        **trainer_options: Any,
    ) -> None:
        """Make the model, its optimizer, and the trainer's buffer.

        Args are those of `DetachedPPOTrainer`, but `train_batch_size` counts groups (prompts with
        all their completions), `model_fn` returns the actor alone, and `grpo_options` are further
        options of `redrb.algorithms.GRPOStep`, such as `beta`: more than 0 needs makers with an
        initial model.
        """
        set_environment(env_info)
        strategy = strategy_fn() or Strategy(device)
        with strategy.model_init_context():
            actor = model_fn()
        everything = list(callbacks)
        if eval_performance:
            everything.append(TrainerPerformanceEvaluator(parameters_of(actor)))
        self.actor = strategy.prepare(actor)
        self.actor_optim = self.build_optimizer(self.actor, actor_lr)
        self._lora = update_lora_weights
        self._step = GRPOStep(self.actor, self.actor_optim, clip=eps_clip, **(grpo_options or {}))
        super().__init__(
            experience_maker_holder_name_list,
            train_batch_size,
            buffer_limit,
            dataloader_pin_memory,
            everything,
            debug,
            device=strategy.device if device is None else device,
            **trainer_options,
        )

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:  # noqa: FBT001, ARG002
        self.push_weights({"actor": self.actor}, fully_update=fully_update, lora=self._lora)


class GRPOMakerHolder(ExperienceMakerHolder):
    """Makes groups of completions of each prompt, scored against each other.

    `model_fn` returns actor, None, reward model (or a function) and initial model (or None). Args
    are those of `ExperienceMakerHolder`, and:

    Args:
        group_size: Completions of each prompt.
    """

    def __init__(self, *args: Any, group_size: int = 8, **options: Any) -> None:
        self._group_size = group_size
        super().__init__(*args, **options)

    def build_experience_maker(
        self,
        actor: Any,
        critic: Any,  # noqa: ARG002
        reward_model: Any,
        initial_model: Any,
        kl_coef: float,  # noqa: ARG002 (the divergence is a term of the loss: `GRPOStep`'s beta)
    ) -> ExperienceMaker:
        """Return a `GRPOExperienceMaker`."""
        return GRPOExperienceMaker(actor, reward_model, initial_model, group_size=self._group_size)
