"""`RecipeTrainer`: the trainer of a recipe, on `DetachedTrainer`."""

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
from redrb.errors import BatchTimeout, ConfigError
from redrb.metrics.events import Write
from redrb.recipe.job_settings import agreed_settings
from redrb.recipe.maker import seed_everything
from redrb.recipe.recipe import Recipe
from redrb.recipe.task_settings import settings_of_trainer
from redrb.recipe.trainer_report import TrainerReport
from redrb.runtime import AccelerateStrategy, AlgorithmTrainer, Stateful, Strategy
from redrb.runtime.checkpoint import DeclaredSettings
from redrb.runtime.sharded_models import give_all_ranks
from redrb.runtime.strategy import place_models
from redrb.runtime.world import any_rank, rank_here, world_size_here
from redrb.weights import WeightPublisher, WeightSubscriber
from redrb.weights.tensors.wrapping import unwrapped

NOTHING_TO_TRAIN = (
    "before this trainer began: to begin anew, use another --namespace, an empty Redis, or "
    "`redrb run --fresh`"
)


class RecipeTrainer(AlgorithmTrainer):
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
                "redrb.workers.trainer, or leave it out."
            )
        strategy = Strategy(recipe.device or None)
        if ranks > 1 or recipe.mixed_precision != "no" or recipe.gradient_checkpointing:
            strategy = AccelerateStrategy(
                recipe.device or None,
                mixed_precision=recipe.mixed_precision,  # type: ignore[arg-type]
                gradient_checkpointing=recipe.gradient_checkpointing,
                shard=recipe.shard,
            )
        self._device = strategy.device
        self._reports = TrainerReport(self, recipe, write)
        super().__init__(
            lambda batch: dict(recipe.step(self._models, self._optimizers, batch)),
            None,  # it announces itself before the models are made, which may take long
            callbacks=[self._reports],
            device=strategy.device,
            experience_maker_holder_name_list=[],  # makers find the trainer by its name
            train_batch_size=recipe.groups,
            name=recipe.weights_name,
            task=recipe.task_name,
            client=client,
            namespace=recipe.namespace,
            timeout=recipe.idle_timeout,
            lease_ms=recipe.lease_ms,
            checkpoint_dir=recipe.checkpoints or None,
            checkpoint_every=recipe.checkpoint_every,
            rank=rank_here() if ranks > 1 else None,
            world_size=ranks if ranks > 1 else None,
            weights_dtype=recipe.weights_dtype,
            agree=agreed_settings(recipe),
            stop_timeout=recipe.stop_timeout,
            step_limit=recipe.step_limit,
            # the limit is in groups here, and need not be whole batches
            implied=settings_of_trainer(client, recipe),
        )
        with ExitStack() as undo:
            undo.callback(self.close)
            self._place_models(strategy)
            undo.pop_all()

    def _place_models(self, strategy: Strategy) -> None:
        """Make the models and their optimizers."""
        recipe = self._recipe
        seed_everything(recipe.seed)
        models = recipe.models()
        # shards cannot be initialised one by one: the first rank does it with whole models
        self._whole = copy.deepcopy(models) if recipe.shard and rank_here() == 0 else None
        placed = place_models(lambda: strategy, models.values, None)
        self._models: dict[str, nn.Module] = dict(zip(models, placed.models, strict=True))
        self._optimizers: dict[str, Optimizer] = recipe.optimizers(self._models)
        self._declared = DeclaredSettings(self._optimizers)

    @property
    def plain_models(self) -> dict[str, nn.Module]:
        """The models without the wrappers of ranks."""
        return {name: unwrapped(model) for name, model in self._models.items()}

    @property
    def evaluates(self) -> bool:
        """Whether this rank takes part in evaluations."""
        return rank_here() == 0 or self._recipe.shard

    def models_to_send(self) -> dict[str, nn.Module]:
        """Return the recipe's models."""
        return self._models

    def checkpointed(self) -> Mapping[str, Stateful]:
        """Return models and optimizers, and the settings with which the recipe made these."""
        parts: dict[str, Stateful] = {f"models.{name}": m for name, m in self.plain_models.items()}
        parts |= {f"optimizers.{name}": each for name, each in self._optimizers.items()}
        return parts | {"declared": self._declared}  # loaded after the optimizers

    def begin(self) -> None:
        """Go on from the newest checkpoint or published weights, or publish the first ones."""
        resumed = self.resume()
        published, models = True, self._whole or self.plain_models
        if rank_here() == 0:
            for model in models.values():
                model.to(self._device)
            published = self._load_or_initialise(models, resumed=resumed)
        if world_size_here() > 1 and not (resumed and self._recipe.shard):
            give_all_ranks(self.plain_models, models)
        self._whole = None
        # weights that have reached the target stay the newest, because their reward is known
        reward = self.reward_at_end if rank_here() == 0 else None
        over = any_rank(reward is not None and reward >= self._recipe.target_reward)
        if any_rank(not published) or (resumed and not over):
            self.sync_models_to_remote_makers()
        self._reports.begin(self._loop.position.step)

    def work(self) -> None:
        """Train until the end; publish and evaluate the last weights.

        Raises:
            BatchTimeout: No full batch came for `idle_timeout` seconds.
            PublisherFenced: Another trainer began to publish under the same name.
        """
        recipe = self._recipe
        over = threading.Timer(
            recipe.max_seconds, self.stop, [f"{recipe.max_seconds:g} seconds are over,"]
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
        with self._stop.on_signals():  # a first SIGTERM does not break this off
            self._publish()
            self._reports.end()

    def end(self) -> str:
        """Announce that the job is over, unless a signal has ended training; returns the reason."""
        reports, version = self._reports, self.weight_version
        if self.stopped in signal.Signals.__members__:
            why = f"it was asked to, after {reports.steps} steps at weight version {version}"
        else:
            advice = "" if reports.trained or not reports.reached else f", {NOTHING_TO_TRAIN}"
            why = f"{self.stopped} at weight version {version}{advice}"
        self.end_job(why, reward=reports.reward)
        return why

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, Any] | None:
        """Return the recipe's evaluation of the current weights."""
        models = self.plain_models
        with evaluating(*models.values()):
            return self._recipe.evaluate(models)

    def _load_or_initialise(self, models: dict[str, nn.Module], *, resumed: bool) -> bool:
        """Load the published weights, except after a checkpoint; publish a reference policy."""
        recipe = self._recipe
        reference = recipe.reference(models)
        known = WeightSubscriber(
            self._connection, recipe.reference_name, namespace=recipe.namespace
        )
        first = not resumed and known.latest() is None
        if reference is not None and first:
            # before the weights, so that a trainer that dies between the two leaves no gap
            recipe.initialise(models)
            WeightPublisher(
                self._connection, recipe.reference_name, namespace=recipe.namespace
            ).publish(reference)
        if resumed or self.take_over(models):
            return True
        if reference is None or not first:
            recipe.initialise(models)
        return False

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:  # noqa: FBT001
        began = time.perf_counter()
        super()._update_remote_makers(fully_update, **config)
        self._reports.published(self.published, time.perf_counter() - began)

    def _publish(self) -> None:
        """Publish the weights if they were trained since the last version."""
        if self._reports.unpublished:
            self.sync_models_to_remote_makers()
