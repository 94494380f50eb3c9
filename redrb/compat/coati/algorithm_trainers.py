"""Trainers whose training step is one of `redrb.algorithms`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from redrb.algorithms import GRPOStep, PPOStep
from redrb.compat.coati.performance import TrainerPerformanceEvaluator, parameters_of
from redrb.compat.coati.trainer import DetachedTrainer
from redrb.experience import Experience
from redrb.train.callbacks import TrainerCallback
from redrb.train.checkpoint import DeclaredSettings, stateful_parts
from redrb.train.strategy import Strategy, place_models
from redrb.train.trainer import staleness


class AlgorithmTrainer(DetachedTrainer):
    """Trains by calling a step object, and sends all its models as one version.

    Args:
        step: Trains on a batch and returns metrics.
        models: The models in training, which `eval_performance` counts.
        eval_performance: Add a `TrainerPerformanceEvaluator`.
        update_lora_weights: Send only `lora_A` and `lora_B` in updates that are not full.
        trainer_options: Further arguments of `DetachedTrainer`, such as `callbacks` and `device`.
    """

    def __init__(
        self,
        step: Callable[[Experience], dict[str, float]],
        *models: nn.Module,
        callbacks: Sequence[TrainerCallback] = (),
        eval_performance: bool = False,
        update_lora_weights: bool = False,
        **trainer_options: Any,
    ) -> None:
        parts = stateful_parts(self)
        self._declared = DeclaredSettings(  # a part of checkpoints, loaded after the optimizers
            {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
        )
        self._step = step
        self._update_lora_weights = update_lora_weights
        if eval_performance:
            parameters = sum(map(parameters_of, models))
            callbacks = [*callbacks, TrainerPerformanceEvaluator(parameters)]
        super().__init__(callbacks=callbacks, **trainer_options)

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
        return self._step(experience) | staleness(experience, self.weight_version)

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:  # noqa: FBT001, ARG002
        self.push_weights(
            self.models_to_send(), fully_update=fully_update, lora=self._update_lora_weights
        )


class DetachedPPOTrainer(AlgorithmTrainer):
    """Trains an actor and a critic by PPO, and sends both to the makers as one version.

    Source: `coati.ray.detached_trainer_ppo`. Models are any `nn.Module` or causal model of
    transformers; `redrb.algorithms.models` says how they are called.

    Args:
        experience_maker_holder_name_list, callbacks: As for `DetachedTrainer`.
        train_batch_size, buffer_limit, dataloader_pin_memory, debug: As for `DetachedTrainer`.
        strategy_fn: Returns the strategy that places the models, such as `AccelerateStrategy`.
        model_fn: Returns actor and critic.
        env_info: Variables of torch.distributed, as for `ExperienceMakerHolder`.
        eps_clip: Epsilon of PPO's clipped ratio.
        value_clip: How far a value may move from the value that the maker noted.
        eval_performance: Add a `TrainerPerformanceEvaluator`.
        update_lora_weights: Send only `lora_A` and `lora_B` in updates that are not full.
        actor_lr, critic_lr: Learning rates of AdamW.
        device: Device on which batches are trained; default: the strategy's.
        ppo_options: Further options of `redrb.algorithms.PPOStep`.
        trainer_options: Keyword options of `DetachedTrainer`, such as `name` and `client`.

    Examples:
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
        models, strategy = place_models(strategy_fn, model_fn, env_info, device=device)
        self.actor, self.critic = models
        self.actor_optim = self.build_optimizer(self.actor, actor_lr)
        self.critic_optim = self.build_optimizer(self.critic, critic_lr)
        networks = (self.actor, self.critic, self.actor_optim, self.critic_optim)
        super().__init__(
            PPOStep(*networks, clip=eps_clip, value_clip=value_clip, **(ppo_options or {})),
            *models,
            experience_maker_holder_name_list=experience_maker_holder_name_list,
            train_batch_size=train_batch_size,
            buffer_limit=buffer_limit,
            dataloader_pin_memory=dataloader_pin_memory,
            callbacks=callbacks,
            eval_performance=eval_performance,
            debug=debug,
            update_lora_weights=update_lora_weights,
            device=strategy.device if device is None else device,
            **trainer_options,
        )

    def models_to_send(self) -> dict[str, nn.Module]:
        """Return actor and critic."""
        return {"actor": self.actor, "critic": self.critic}


class DetachedGRPOTrainer(AlgorithmTrainer):
    """Trains an actor by GRPO (Shao et al. 2024, arXiv:2402.03300), without a critic.

    Args are those of `DetachedPPOTrainer`, except:

    Args:
        model_fn: Returns the actor.
        train_batch_size: Groups in a batch: prompts with all their completions.
        grpo_options: Further options of `redrb.algorithms.GRPOStep`, such as `beta`; `beta` above 0
            needs makers with an initial model.
        trainer_options: Keyword options of `AlgorithmTrainer` and `DetachedTrainer`.

    Examples:
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
        *,
        eps_clip: float = 0.2,
        actor_lr: float = 1e-6,
        device: str | torch.device | None = None,
        grpo_options: Mapping[str, Any] | None = None,
        **trainer_options: Any,
    ) -> None:
        [self.actor], strategy = place_models(strategy_fn, model_fn, env_info, device=device)
        self.actor_optim = self.build_optimizer(self.actor, actor_lr)
        super().__init__(
            GRPOStep(self.actor, self.actor_optim, clip=eps_clip, **(grpo_options or {})),
            self.actor,
            experience_maker_holder_name_list=experience_maker_holder_name_list,
            train_batch_size=train_batch_size,
            device=strategy.device if device is None else device,
            **trainer_options,
        )

    def models_to_send(self) -> dict[str, nn.Module]:
        """Return the actor."""
        return {"actor": self.actor}
