"""`DetachedTrainer`: trains on what makers put, and sends them new weights."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from redrb.checks import checked_int
from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Experience
from redrb.keys import check_name
from redrb.runtime.broadcast import Broadcast
from redrb.runtime.buffer import DetachedReplayBuffer
from redrb.runtime.callbacks import Callbacks, TrainerCallback
from redrb.runtime.checkpoint import Checkpoints, Position, Stateful, stateful_parts
from redrb.runtime.client import client_for
from redrb.runtime.fresh_batches import FreshBatches
from redrb.runtime.progress import Progress
from redrb.runtime.stopping import StopRequest
from redrb.runtime.training_loop import Acknowledge, LoopConfig, TrainingLoop
from redrb.runtime.world import (
    agreed,
    default_device,
    newest_common,
    rank_here,
    world_size_here,
)
from redrb.stream.feeding import ExperienceLoader
from redrb.stream.ranks.rank_store import MOST_STEPS
from redrb.weights import WeightVersion

_log = logging.getLogger("redrb")


class DetachedTrainer(ABC):
    """Base of trainers whose experience is made in other processes.

    Source: `coati.ray.detached_trainer_base`. There it is a Ray actor that makers find by name;
    here it is an object in any process, and makers find its buffer, the task of its name, in Redis.
    A subclass says what a training step is and what is sent to the makers; its attributes that have
    a `state_dict` are what checkpoints hold. Delivery is at least once: a batch is acknowledged
    after its step, or after the checkpoint that holds it.

    Example:
        >>> class MyTrainer(redrb.DetachedTrainer):
        ...     def training_step(self, experience):
        ...         return {"loss": self.step(experience)}
        ...     def _update_remote_makers(self, fully_update=False, **config):
        ...         self.push_weights({"actor": self.actor}, fully_update=fully_update)
        >>> trainer = MyTrainer(["maker_0"], train_batch_size=8, name="trainer_0")
        >>> trainer.sync_models_to_remote_makers()
        >>> trainer.fit(total_steps=1000, update_steps=100, train_epochs=2)

    Attributes:
        name: Name of the trainer.
        buffer: Its buffer.
        device: Where batches are trained.
        weight_version: Version of the weights that makers were sent last, 0 before the first.
        wait_for_batch_s: Seconds that `fit` has waited for batches.
    """

    def __init__(
        self,
        experience_maker_holder_name_list: Sequence[str],
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        dataloader_pin_memory: bool = True,  # noqa: FBT001 (a place of coati's)
        callbacks: Sequence[TrainerCallback] = (),
        debug: bool = False,  # noqa: FBT001 (a place of coati's)
        *,
        name: str = "trainer_0",
        client: Client | str | None = None,
        task: str | None = None,
        namespace: str = "default",
        device: str | torch.device | None = None,
        prefetch: int = 1,
        timeout: float | None = None,
        ack: Acknowledge = "step",
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        weights_dtype: str | torch.dtype | None = None,
        **stream_options: Any,
    ) -> None:
        """Open the trainer's buffer.

        Args:
            experience_maker_holder_name_list: Makers that get its weights; those that nobody names
                find it by themselves, so the list may be empty.
            train_batch_size: Samples in a batch, of each rank.
            buffer_limit: Most batches waiting or being trained; makers wait then. 0: no limit.
            dataloader_pin_memory: Pin batches for the copy to an accelerator.
            callbacks: Told what happens.
            debug: Log the metrics of each step.
            name: Name under which makers find it; one that is started again under it gets at once
                what the one before held.
            client: What `redrb.connect` returned, or a URL; default: REDRB_URL.
            task: Task of its buffer; default: its name.
            namespace: Keeps experiments on one server apart.
            device: Where batches are trained; default: the accelerator, where there is one.
            prefetch: Batches prepared beside the step; each makes what is trained a step staler.
            timeout: Seconds that `fit` waits for a full batch; None waits for ever, and logs what
                is missing.
            ack: "step": what was trained is acknowledged at once, and is not trained again by a
                resumed run. "checkpoint": after the checkpoint that holds it, and a resumed run
                trains again what came after its checkpoint: nothing trained is lost.
            checkpoint_dir: Where checkpoints go; None: there are none.
            checkpoint_every: Episodes between checkpoints.
            rank: This process's number among trainers that share one task; None: it has its own.
            world_size: Number of these trainers.
            weights_dtype: Dtype of the weights that makers are sent, such as "bfloat16"; default:
                the models'. `take_over` goes on from what was sent.
            stream_options: Further options of `ExperienceStream`, such as `max_staleness=4`, which
                counts from the version that this trainer has sent last.

        Raises:
            ConfigError: A name, number or option is not usable.
            StoreUnavailable: Redis could not be reached.
        """
        if isinstance(experience_maker_holder_name_list, str):
            raise ConfigError("experience_maker_holder_name_list is a list of names, not one name.")
        if ack not in ("step", "checkpoint") or (ack == "checkpoint" and checkpoint_dir is None):
            raise ConfigError(
                f'ack={ack!r}: use "step", or "checkpoint" together with a checkpoint_dir.'
            )
        if (rank is None) != (world_size is None):
            raise ConfigError("give rank and world_size, both or none.")
        checkpoint_every = checked_int("checkpoint_every", checkpoint_every, 1)
        if "limit" in stream_options:
            raise ConfigError("give buffer_limit, in batches, and no limit.")
        self.name = check_name("trainer", name)
        self.device = default_device() if device is None else torch.device(device)
        self._stop = StopRequest()
        self._callbacks = Callbacks(callbacks, TrainerCallback)
        self._pin_memory = dataloader_pin_memory
        self._debug = debug
        self._prefetch = prefetch
        self._timeout = timeout
        self._ack: Acknowledge = ack
        self._rank, self._world_size = rank, world_size
        self._checkpoint_every = checkpoint_every
        self._checkpoints = None
        if checkpoint_dir is not None:
            several = world_size_here() > 1 or rank is not None
            own = rank_here() if rank is None else rank
            self._checkpoints = Checkpoints(
                Path(checkpoint_dir) / (f"rank-{own}" if several else ""),
                owner=f"trainer {name!r}, task {namespace}:{name if task is None else task}",
                keep=2 if several else 1,
            )
        self._position: Position | None = None
        self._calls = 0
        self._client, self._owned = client_for(client)
        self._waited_s = 0.0
        self._source: FreshBatches | None = None
        ranks = world_size or 1
        with ExitStack() as undo:
            undo.push(self._owned)
            self.buffer = DetachedReplayBuffer(
                train_batch_size * ranks,
                buffer_limit,
                client=self._client,
                task=name if task is None else task,
                namespace=namespace,
                **stream_options,
            )
            makers = list(experience_maker_holder_name_list) if not rank else []
            self._broadcast = Broadcast(self._client, namespace, name, makers, dtype=weights_dtype)
            if rank is None:
                self._replace_predecessor(namespace)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def training_step(self, experience: Experience) -> Mapping[str, Any]:
        """Train on one batch; returns metrics by name."""

    @abstractmethod
    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:  # noqa: FBT001
        """Send new weights to the makers: call `push_weights` with the models.

        Args:
            fully_update: Send all of the weights, not only those that are trained.
            config: What `sync_models_to_remote_makers` was given.
        """

    @property
    def weight_version(self) -> int:
        """Version of the weights that makers were sent last, 0 before the first."""
        return self._broadcast.version

    @property
    def published(self) -> tuple[WeightVersion, ...]:
        """What the last update published: with LoRA both the weights and an adapter, else one."""
        return self._broadcast.published

    @property
    def wait_for_batch_s(self) -> float:
        """Seconds that `fit` has waited for batches until now."""
        return self._waited_s + (self._source.wait_for_batch_s if self._source else 0.0)

    @property
    def stopped(self) -> str:
        """Why `fit` ended early, "" where it did not."""
        return self._stop.why

    def fit(self, total_steps: int | None, update_steps: int, train_epochs: int = 1) -> None:
        """Train: `total_steps // update_steps` episodes, less what a checkpoint has done of them.

        An episode trains `update_steps` fresh batches as they come, then `train_epochs - 1` times
        the same batches in a new order, then updates the makers. SIGTERM, Ctrl-C and `stop` end it
        in good order: after the step under way, with a checkpoint where there are any; a later call
        then trains nothing. Called several times, each call trains so much; a resumed run leaves
        out what its checkpoint has. Ranks of torch.distributed end at the same step.

        Args:
            total_steps: Fresh batches in all; None: until it is asked to end.
            update_steps: Fresh batches an episode.
            train_epochs: Times that each batch is trained.

        Raises:
            ConfigError: A number is not usable, or the buffer's limit is too small for what is
                trained between two checkpoints.
            BatchTimeout: No full batch came within the trainer's `timeout`.
            Whatever `training_step` or a callback raises; the batch goes back then.
        """
        update_steps = checked_int("update_steps", update_steps, 1)
        train_epochs = checked_int("train_epochs", train_epochs, 1)
        self._check_limit(update_steps)
        self.resume()
        if agreed(bool(self._stop)):
            return
        position = self._position_of_call()
        if position is None:
            _log.info("trainer %r: this call of fit was over before it was resumed", self.name)
            return
        episodes = None if total_steps is None else total_steps // update_steps
        fit = TrainingLoop(self._work(), position, update_steps, train_epochs)
        first = position.taken

        def jump(step: int) -> None:
            nonlocal first
            first = step

        def loader(taken: int, left: int | None) -> ExperienceLoader:
            return ExperienceLoader(
                self.buffer.stream,
                self.buffer.sample_batch_size,
                prefetch=self._prefetch,
                steps=left,
                device=self.device,
                pin_memory=self._pin_memory,
                timeout=self._timeout,
                acknowledge=False,
                **self._ranks(first + taken),
            )

        fresh = steps = None
        if episodes is not None:
            fresh = episodes * update_steps - position.fresh(update_steps)
            steps = episodes * update_steps * train_epochs
        source = self._source = FreshBatches(
            loader,
            # ranks end at the same step: one that is asked to end trains the next batch as well
            self._stop if world_size_here() == 1 else StopRequest(),
            batches=fresh,
            jump=jump if self._ack == "step" else None,
            on_misfits=lambda error: self._callbacks.tell("on_misfits", error),
        )
        progress = Progress("train", steps, done=position.step)
        try:
            with self._stop.on_signals(), source, progress:
                fit.run(episodes, source, progress)
        finally:
            self._waited_s, self._source = self.wait_for_batch_s, None
            fit.release()
        _log.info(
            "trainer %r: %d steps are done%s",
            self.name,
            position.step,
            f", stopped by {self.stopped}" if self.stopped else "",
        )

    def stop(self, why: str = "stop() was called") -> None:
        """Ask `fit` to end after the step under way; may be called by a callback."""
        self._stop.ask(why)

    def resume(self) -> bool:
        """Load the newest checkpoint, unless that was done; `fit` and updates do it first.

        Returns:
            Whether there was one.

        Raises:
            DecodeError, ConfigError: It cannot be used; nothing was loaded.
        """
        if self._position is not None:
            return self._position.step > 0
        position = Position()
        if self._checkpoints is not None:
            parts = self.checkpointed()
            if not parts:
                raise ConfigError(
                    "there is nothing for a checkpoint to hold: modules and optimizers are found "
                    "in the trainer's attributes, and in lists and dicts there; or override "
                    "checkpointed()."
                )
            step = newest_common(self._checkpoints.steps())
            if step is not None:
                position, mark = self._checkpoints.load(step, parts)
                self._checkpoints.forget_after(step)
                if self._rank is None:
                    self.buffer.stream.settle(mark.as_mapping())
                _log.info("trainer %r goes on after step %d", self.name, position.step)
        self._position = position
        return position.step > 0

    def checkpointed(self) -> Mapping[str, Stateful]:
        """Return what checkpoints hold, by name; default: attributes that have a `state_dict`."""
        return stateful_parts(self)

    def sync_models_to_remote_makers(self, **config: Any) -> None:
        """Send all weights to the makers; those that wait for their first ones begin."""
        self.resume()
        self._update_remote_makers(fully_update=True, **config)

    def take_over(self, models: Mapping[str, nn.Module]) -> int:
        """Go on from the weights that a trainer of this name has published last.

        That trainer, if it still runs, may publish no more: it ends with `PublisherFenced`. Where
        the same trainer goes on, a checkpoint is more, since it holds the optimizers as well.

        Args:
            models: As `push_weights` was given them.

        Returns:
            The version that was loaded; 0: there is none, and the models are as they were.

        Raises:
            WeightMismatch: The weights do not fit these models, which keep theirs.
            WeightError, DecodeError, StoreUnavailable: As `WeightSubscriber.poll` does.
        """
        return self._broadcast.take_over(models, fence=not self._rank)

    def push_weights(
        self, models: Mapping[str, nn.Module], *, fully_update: bool = False, lora: bool = False
    ) -> int:
        """Publish weights as one version, and tell the makers.

        Args:
            models: By name, such as `{"actor": ..., "critic": ...}`.
            fully_update: All of the weights, not only those that are trained.
            lora: Of the trained ones only `lora_A` and `lora_B`.

        Returns:
            The version. Of ranks only the first publishes.

        Raises:
            PublisherFenced: Another trainer of this name was started after this one.
            StoreUnavailable, StoreFull: As `WeightPublisher.publish` does.
        """
        if self._rank:
            return self._broadcast.version
        version = self._broadcast.push(models, fully=fully_update, lora_only=lora)
        self.buffer.stream.advance(version)  # what max_staleness is counted from
        return version

    def buffer_get_length(self) -> int:
        """Return the number of full batches that wait; safe while training runs."""
        return self.buffer.get_length()

    def buffer_append(self, experience: Experience) -> None:
        """Put a batch of samples into the buffer; safe while training runs."""
        self.buffer.append(experience)

    def buffer_extend(self, items: Sequence[BufferItem]) -> None:
        """Put samples into the buffer; safe while training runs."""
        self.buffer.extend(items)

    def close(self) -> None:
        """Give back what is leased, and close what was opened here."""
        with self._owned:
            self.buffer.close()

    def _replace_predecessor(self, namespace: str) -> None:
        """Give back at once what a trainer of this name held that died; ranks do it by `take`."""
        stream = self.buffer.stream
        key = f"redrb:{{{namespace}:trainer:{self.name}}}:consumer"
        client = self._client.at(key)
        before = client.execute("GET", key)
        task, _, consumer = (before or b"").decode(errors="replace").partition(" ")
        if consumer and task == stream.task and consumer != stream.consumer:
            held = stream.dismiss(consumer)
            if held:
                _log.warning("trainer %r: the one before held %d groups", self.name, held)
        client.execute("SET", key, f"{stream.task} {stream.consumer}")

    def _position_of_call(self) -> Position | None:
        """Return where this call of `fit` begins; None where the run before has finished it."""
        call, self._calls = self._calls, self._calls + 1
        before = self._position or Position()
        if call < before.fit:
            return None
        if call > before.fit:
            self._position = Position(fit=call, step=before.step, taken=before.taken)
        return self._position

    def _train(self, experience: Experience) -> Mapping[str, Any]:
        metrics = self.training_step(experience)
        if self._debug:
            _log.info("trainer %r trained %d samples: %s", self.name, len(experience), metrics)
        return metrics

    def _work(self) -> LoopConfig:
        return LoopConfig(
            train=self._train,
            update=self._update_remote_makers,
            callbacks=self._callbacks,
            stop=self._stop,
            device=self.device,
            pin_memory=self._pin_memory,
            acknowledge=self._ack,
            checkpoints=self._checkpoints,
            checkpoint_every=self._checkpoint_every,
            parts=self.checkpointed(),
        )

    def _ranks(self, taken: int) -> dict[str, Any]:
        if self._rank is None:
            return {}
        return {"rank": self._rank, "world_size": self._world_size, "first_step": taken}

    def _check_limit(self, update_steps: int) -> None:
        """Refuse to hold more until a checkpoint than the buffer may ever have."""
        held = update_steps * self._checkpoint_every + 1
        if self._ack == "checkpoint" and 0 < self.buffer.limit < held:
            raise ConfigError(
                f"buffer_limit={self.buffer.limit}: what is trained between two checkpoints stays "
                f"leased, so with update_steps={update_steps} and checkpoint_every="
                f"{self._checkpoint_every} at least {held} batches have to fit."
            )
        if (
            self._ack == "checkpoint"
            and self._rank is not None
            and held + self._prefetch > MOST_STEPS
        ):
            raise ConfigError(
                f"ranks hold at most {MOST_STEPS} steps that are not acknowledged, and "
                f"update_steps={update_steps} with checkpoint_every={self._checkpoint_every} holds "
                f"{held + self._prefetch} until a checkpoint: checkpoint more often, with fewer "
                'update_steps, or use ack="step".'
            )
