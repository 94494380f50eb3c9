"""`DetachedGRPOTrainer` and `GRPOMakerHolder`: GRPO on a detached trainer and its makers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from redrb.algorithms import GRPOExperienceMaker, GRPOStep
from redrb.runtime.algorithm_trainer import AlgorithmTrainer
from redrb.runtime.callbacks import TrainerCallback
from redrb.runtime.experience_maker import ExperienceMaker
from redrb.runtime.maker import ExperienceMakerHolder
from redrb.runtime.model_placement import place_models
from redrb.runtime.strategy import Strategy


class DetachedGRPOTrainer(AlgorithmTrainer):
    """Trains an actor by GRPO (Shao et al. 2024, arXiv:2402.03300), without a critic.

    Args are those of `DetachedPPOTrainer`, except:

    Args:
        model_fn: Returns the actor.
        train_batch_size: Groups in a batch: prompts with all their completions.
        grpo_options: Further options of `redrb.algorithms.GRPOStep`, such as `beta`; `beta` above 0
            needs makers with an initial model.

    Example:
        >>> trainer = DetachedGRPOTrainer(
        ...     ["maker_0"], Strategy, lambda: actor, train_batch_size=8
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
        placed = place_models(strategy_fn, model_fn, env_info, device=device)
        [self.actor] = placed.models
        self.actor_optim = self.build_optimizer(self.actor, actor_lr)
        super().__init__(
            GRPOStep(
                self.actor,
                self.actor_optim,
                clip=eps_clip,
                **(grpo_options or {}),
            ),
            placed,
            experience_maker_holder_name_list=experience_maker_holder_name_list,
            train_batch_size=train_batch_size,
            buffer_limit=buffer_limit,
            dataloader_pin_memory=dataloader_pin_memory,
            callbacks=callbacks,
            eval_performance=eval_performance,
            debug=debug,
            update_lora_weights=update_lora_weights,
            device=device,
            **trainer_options,
        )

    def models_to_send(self) -> dict[str, nn.Module]:
        """Return the actor."""
        return {"actor": self.actor}


class GRPOMakerHolder(ExperienceMakerHolder):
    """Makes groups of completions of each prompt, each scored against its group.

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
