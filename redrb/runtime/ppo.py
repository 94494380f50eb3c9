"""`DetachedPPOTrainer`: PPO on a detached trainer, as ColossalAI's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from redrb.algorithms import PPOStep
from redrb.runtime.algorithm_trainer import AlgorithmTrainer
from redrb.runtime.callbacks import TrainerCallback
from redrb.runtime.models import parameters_of, set_environment
from redrb.runtime.performance import TrainerPerformanceEvaluator
from redrb.runtime.strategy import Strategy


class DetachedPPOTrainer(AlgorithmTrainer):
    """Trains an actor and a critic by PPO, and sends both to the makers as one version.

    Source: `coati.ray.detached_trainer_ppo`. Models are any `nn.Module` or causal model of
    transformers; `redrb.algorithms.models` says how they are called.

    Example:
        >>> trainer = DetachedPPOTrainer(
        ...     ["maker_0"], redrb.Strategy, lambda: (actor, critic), train_batch_size=8
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
        dataloader_pin_memory: bool = True,  # noqa: FBT001 (places of coati's, from here on)
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
        """Make the models, their optimizers, and the trainer's buffer.

        Args:
            experience_maker_holder_name_list: Makers that get its weights.
            strategy_fn: Returns how models are placed, such as `redrb.DDPStrategy`.
            model_fn: Returns actor and critic.
            env_info: Variables of torch.distributed, as in `ExperienceMakerHolder`.
            train_batch_size: Samples in a batch, of each rank.
            buffer_limit: Most batches waiting or being trained; makers wait then. 0: no limit.
            eps_clip: PPO's epsilon.
            value_clip: How far a value may move from the one that the maker noted.
            dataloader_pin_memory: Pin batches for the copy to an accelerator.
            callbacks: Told what happens.
            eval_performance: Add a `TrainerPerformanceEvaluator`.
            debug: Log the metrics of each step.
            update_lora_weights: Send only `lora_A` and `lora_B` in updates that are not full.
            actor_lr: Learning rate of AdamW for the actor.
            critic_lr: Learning rate of AdamW for the critic.
            device: Where batches are trained; default: the strategy's.
            ppo_options: Further options of `redrb.algorithms.PPOStep`.
            trainer_options: Keyword options of `DetachedTrainer`, such as `name` and `client`.
        """
        set_environment(env_info)
        strategy = strategy_fn() or Strategy(device)
        with strategy.model_init_context():
            actor, critic = model_fn()
        everything = list(callbacks)
        if eval_performance:
            everything.append(
                TrainerPerformanceEvaluator(parameters_of(actor), parameters_of(critic))
            )
        self.actor, self.critic = strategy.prepare(actor), strategy.prepare(critic)
        self.actor_optim = self.build_optimizer(self.actor, actor_lr)
        self.critic_optim = self.build_optimizer(self.critic, critic_lr)
        self._lora = update_lora_weights
        self._step = PPOStep(
            self.actor,
            self.critic,
            self.actor_optim,
            self.critic_optim,
            clip=eps_clip,
            value_clip=value_clip,
            **(ppo_options or {}),
        )
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
        models = {"actor": self.actor, "critic": self.critic}
        self.push_weights(models, fully_update=fully_update, lora=self._lora)
