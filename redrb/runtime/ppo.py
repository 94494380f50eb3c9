"""`DetachedPPOTrainer`: PPO on a detached trainer, as in ColossalAI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from redrb.algorithms import PPOStep
from redrb.runtime.algorithm_trainer import AlgorithmTrainer
from redrb.runtime.callbacks import TrainerCallback
from redrb.runtime.model_placement import place_models
from redrb.runtime.strategy import Strategy


class DetachedPPOTrainer(AlgorithmTrainer):
    """Trains an actor and a critic by PPO, and sends both to the makers as one version.

    Source: `coati.ray.detached_trainer_ppo`. Models are any `nn.Module` or causal model of
    transformers; `redrb.algorithms.models` says how they are called.

    Args:
        experience_maker_holder_name_list: Makers that get the weights.
        strategy_fn: Returns the strategy that places the models, such as `AccelerateStrategy`.
        model_fn: Returns actor and critic.
        env_info: Variables of torch.distributed, as for `ExperienceMakerHolder`.
        train_batch_size: Samples in a batch, of each rank.
        buffer_limit: Most batches that wait; makers wait beyond it. 0: no limit.
        eps_clip: Epsilon of PPO's clipped ratio.
        value_clip: How far a value may move from the value that the maker noted.
        dataloader_pin_memory: Pin batches for the copy to an accelerator.
        callbacks: Objects whose hooks are called while `fit` runs.
        eval_performance: Add a `TrainerPerformanceEvaluator`.
        debug: Log the metrics of each step.
        update_lora_weights: Send only `lora_A` and `lora_B` in updates that are not full.
        actor_lr: Learning rate of AdamW for the actor.
        critic_lr: Learning rate of AdamW for the critic.
        device: Device on which batches are trained; default: the strategy's.
        ppo_options: Further options of `redrb.algorithms.PPOStep`.
        trainer_options: Keyword options of `DetachedTrainer`, such as `name` and `client`.

    Example:
        >>> trainer = DetachedPPOTrainer(
        ...     ["maker_0"], Strategy, lambda: (actor, critic), train_batch_size=8
        ... )
        >>> trainer.sync_models_to_remote_makers()
        >>> trainer.fit(total_steps=1000, update_steps=10)
    """

    def __init__(
        self,
        experience_maker_holder_name_list: Sequence[str],
        strategy_fn: Callable[[], Strategy | None],
        model_fn: Callable[[], tuple[nn.Module, nn.Module]],
        env_info: Mapping[str, Any] | None = None,
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        eps_clip: float = 0.2,
        value_clip: float = 0.4,
        dataloader_pin_memory: bool = True,  # noqa: FBT001 (coati has these by position)
        callbacks: Sequence[TrainerCallback] = (),
        eval_performance: bool = False,  # noqa: FBT001
        debug: bool = False,  # noqa: FBT001
        update_lora_weights: bool = False,  # noqa: FBT001
        *,
        actor_lr: float = 1e-6,
        critic_lr: float = 1e-5,
        device: str | torch.device | None = None,
        ppo_options: Mapping[str, Any] | None = None,
        **trainer_options: Any,
    ) -> None:
        placed = place_models(strategy_fn, model_fn, env_info, device=device)
        self.actor, self.critic = placed.models
        self.actor_optim = self.build_optimizer(self.actor, actor_lr)
        self.critic_optim = self.build_optimizer(self.critic, critic_lr)
        networks = (self.actor, self.critic, self.actor_optim, self.critic_optim)
        super().__init__(
            PPOStep(
                *networks,
                clip=eps_clip,
                value_clip=value_clip,
                **(ppo_options or {}),
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
        """Return actor and critic."""
        return {"actor": self.actor, "critic": self.critic}
