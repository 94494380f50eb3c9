"""`RecipeTrainer`: the trainer of a recipe."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from redrb.algorithms.models import evaluating
from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.errors import BatchTimeout, ConfigError
from redrb.experience import Experience
from redrb.recipe.dropped import of_made
from redrb.recipe.job_settings import agreed_settings
from redrb.recipe.maker import seed_everything
from redrb.recipe.recipe import Recipe
from redrb.recipe.task_settings import settings_of_trainer
from redrb.recipe.trainer_report import TrainerReport
from redrb.stream import ExperienceStream
from redrb.train import AccelerateStrategy, Stateful
from redrb.train.checkpoint import DeclaredSettings
from redrb.train.trainer import Trainer, staleness
from redrb.train.world import any_rank, give_all_ranks, rank_here, world_size_here
from redrb.watch.metrics.events import Write
from redrb.weights import WeightPublisher, WeightSubscriber
from redrb.weights.tensors.names import unwrapped
from redrb.words import counted


class RecipeTrainer(Trainer):
    """Trains a recipe's models on the makers' groups, publishes and evaluates them.

    On several ranks of torch.distributed the models are replicated, or with `shard` sharded, and
    each rank trains its part of every batch; the first one publishes, evaluates and reports. Of
    sharded models all ranks evaluate, because all have a part.
    """

    def __init__(self, client: Client, recipe: Recipe, write: Write) -> None:
        """Open the task."""
        self._recipe, self._connection = recipe, client
        ranks = world_size_here()
        if recipe.shard and ranks == 1:
            raise ConfigError(
                "--shard needs several ranks: start the trainer by torchrun --nproc-per-node 2 -m "
                "redrb.cli.processes.trainer, or leave it out."
            )
        self._trains_lora = getattr(recipe, "lora_rank", 0) > 0
        if recipe.shard and self._trains_lora:
            raise ConfigError("--shard and --lora-rank do not go together: leave one of them out.")
        strategy = AccelerateStrategy(
            recipe.device or None,
            mixed_precision=recipe.mixed_precision,  # type: ignore[arg-type]
            gradient_checkpointing=recipe.gradient_checkpointing,
            shard=recipe.shard,
        )
        self._reports = TrainerReport(self, recipe, self._evaluate, write)
        with ExitStack() as undo:
            stream = undo.enter_context(
                ExperienceStream(
                    client,
                    recipe.task_name,
                    namespace=recipe.namespace,
                    lease_ms=recipe.lease_ms,
                    implied=settings_of_trainer(client, recipe),
                )
            )
            super().__init__(
                client,
                stream,
                recipe.groups,
                name=recipe.weights_name,  # by which makers find the trainer
                callbacks=[self._reports],
                device=strategy.device,
                timeout=recipe.idle_timeout,
                checkpoint_dir=recipe.checkpoints or None,
                checkpoint_every=recipe.checkpoint_every,
                rank=rank_here() if ranks > 1 else None,
                world_size=ranks if ranks > 1 else None,
                weights_dtype=recipe.weights_dtype,
                agree=agreed_settings(recipe),
                stop_timeout=recipe.stop_timeout,
                step_limit=recipe.step_limit,
            )
            # it is announced before its models are made, which may take long
            seed_everything(recipe.seed)
            models = recipe.models()
            # shards cannot be initialised one by one: the first rank does it with whole models
            self._whole = copy.deepcopy(models) if recipe.shard and rank_here() == 0 else None
            self._models = {name: strategy.prepare(model) for name, model in models.items()}
            self._optimizers: dict[str, Optimizer] = recipe.optimizers(self._models)
            self._declared = DeclaredSettings(self._optimizers)
            undo.pop_all()

    @property
    def plain_models(self) -> dict[str, nn.Module]:
        """The models without the wrappers of ranks."""
        return {name: unwrapped(model) for name, model in self._models.items()}

    @property
    def steps(self) -> int:
        """Steps trained, those that a checkpoint holds included."""
        return self._reports.steps

    def training_step(self, experience: Experience) -> dict[str, Any]:
        """Take the recipe's step and return its metrics, and how stale the samples are."""
        metrics = self._recipe.step(self._models, self._optimizers, experience)
        made = of_made(experience) if self._recipe.drops_groups else {}
        return {**metrics, **made, **staleness(experience, self.weight_version)}

    def send_weights(self) -> None:
        """Publish the recipe's models, and report the version."""
        began = time.perf_counter()
        self.push_weights(self._models, lora=self._trains_lora)
        self._reports.published(self.published, time.perf_counter() - began)

    def checkpointed(self) -> Mapping[str, Stateful]:
        """Return models and optimizers, and the settings with which the recipe made these."""
        parts: dict[str, Stateful] = {f"models.{name}": m for name, m in self.plain_models.items()}
        parts |= {f"optimizers.{name}": each for name, each in self._optimizers.items()}
        return parts | {"declared": self._declared}  # loaded after the optimizers

    def begin(self) -> None:
        """Go on from the newest checkpoint or published weights, or publish the first ones."""
        published, models = True, self._whole or self.plain_models
        initialised = rank_here() == 0 and self._publish_reference(models)
        resumed = self.resume()
        if rank_here() == 0 and not resumed:
            for model in models.values():
                model.to(self.device)
            published = bool(self.take_over(models))
            if not (published or initialised):
                self._recipe.initialise(models)
        if world_size_here() > 1 and not (resumed and self._recipe.shard):
            give_all_ranks(self.plain_models, models)
        self._whole = None
        self._reports.begin(self._loop.position.step)
        # weights that have reached the target stay the newest, because their reward is known
        reward = self.reward_at_end if rank_here() == 0 else None
        over = any_rank(reward is not None and reward >= self._recipe.target_reward)
        if any_rank(not published) or (resumed and not over):
            with Deadline(budget=self._stop):
                self.send_weights()
        self._reports.measure()

    def _publish_reference(self, models: dict[str, nn.Module]) -> bool:
        """Publish the reference policy if there is none; returns whether `models` are initialised.

        It comes before the weights, so that a trainer that dies between the two leaves no gap.
        Where Redis was emptied, the seed makes the same first weights again, before a checkpoint
        replaces them.
        """
        recipe = self._recipe
        reference, name = recipe.reference(models), recipe.reference_name
        known = WeightSubscriber(self._connection, name, namespace=recipe.namespace)
        if reference is None or known.latest() is not None:
            return False
        for model in models.values():
            model.to(self.device)
        recipe.initialise(models)
        WeightPublisher(self._connection, name, namespace=recipe.namespace).publish(reference)
        return True

    def work(self) -> None:
        """Train until the end; publish and evaluate the last weights.

        Raises:
            BatchTimeout: No full batch came for `idle_timeout` seconds.
            PublisherFenced: Another trainer began to publish under the same name.
        """
        recipe = self._recipe
        over = threading.Timer(
            recipe.max_seconds, self.stop, [f"{recipe.max_seconds:g} s are over,"]
        )
        over.daemon = True
        if recipe.max_seconds:
            over.start()
        try:
            self.fit(None, recipe.publish_every)
        except BatchTimeout:
            self._publish()
            raise
        finally:
            over.cancel()
            self._reports.on_waited()
        with self._stop.on_signals():  # a first SIGTERM does not break this off
            self._publish()
            self._reports.evaluate()

    def end(self) -> str:
        """Announce that the job is over, unless a signal has ended training; returns the reason."""
        reports, version = self._reports, self.weight_version
        if self.stopped in signal.Signals.__members__:
            steps = counted(reports.steps, "step")
            why = f"it was asked to, after {steps} at weight version {version}"
        else:
            why = f"{self.stopped} at weight version {version}"
            if reports.reached and not reports.trained:
                why += (
                    ", before this trainer began: to begin anew, use another --namespace, an empty "
                    "Redis, or `redrb run --fresh`"
                )
        self.end_job(why, reward=reports.reward)
        return why

    @torch.no_grad()
    def _evaluate(self) -> Mapping[str, Any] | None:
        if rank_here() != 0 and not self._recipe.shard:
            return None
        models = self.plain_models
        with evaluating(*models.values()):
            return self._recipe.evaluate(models)

    def _publish(self) -> None:
        if self._reports.unpublished:
            with Deadline(budget=self._stop):
                self.send_weights()
