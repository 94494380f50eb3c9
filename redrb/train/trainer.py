"""`Trainer`: trains on the groups of a stream, sends makers new weights, and ends the job."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from redrb.checks import checked_int, checked_number
from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.connection.stop import STOP_TIMEOUT_S, Stop, checked_stop_seconds
from redrb.experience import Experience
from redrb.experience.records import per_sample
from redrb.keys import check_name, consumer_key
from redrb.scopes import Closing
from redrb.stream import ExperienceStream
from redrb.train.broadcast import Broadcast
from redrb.train.callbacks import TrainerCallback, together
from redrb.train.checkpoint import Checkpoints, Stateful, stateful_parts
from redrb.train.fresh_batches import Acknowledge, FreshBatches
from redrb.train.training_loop import TrainingLoop
from redrb.train.world import any_rank, default_device
from redrb.weights import WeightVersion
from redrb.words import counted

_log = logging.getLogger("redrb")


def replace_predecessor(client: Client, trainer: str, stream: ExperienceStream) -> None:
    """Requeue at once all groups that an earlier trainer of this name leases.

    Ranks need no such call: the first take of rank 0 requeues.
    """
    key = consumer_key(stream.namespace, trainer)
    client = client.at(key)
    noted = client.execute("GET", key)
    task, _, consumer = (noted or b"").decode(errors="replace").partition(" ")
    if consumer and task == stream.task and consumer != stream.consumer:
        requeued = stream.dismiss(consumer)
        if requeued:
            _log.warning(
                "trainer %r: requeued %s of the trainer before it",
                trainer,
                counted(requeued, "group"),
            )
    note_consumer(client, trainer, stream)


def note_consumer(client: Client, trainer: str, stream: ExperienceStream) -> None:
    """Note the consumer of a trainer for its successor; once more, as Redis may lose its data."""
    key = consumer_key(stream.namespace, trainer)
    client.at(key).execute("SET", key, f"{stream.task} {stream.consumer}")


def staleness(experience: Experience, current_version: int) -> dict[str, float]:
    """Return how many versions the samples are behind, mean and most; empty without versions."""
    versions = per_sample(experience, "policy_version", len(experience))
    behind = [max(0, current_version - version) for version in versions if version is not None]
    if not behind:
        return {}
    return {"staleness_mean": sum(behind) / len(behind), "staleness_max": float(max(behind))}


class Trainer(Closing):
    """Base of trainers whose experience is made in other processes.

    A subclass defines the training step, and sends the weights to the makers, which find the
    trainer by its name; it may also override `next_batch` and `checkpointed`. Delivery is at least
    once: a batch is acknowledged after its step, or after the checkpoint that holds the step.

    Args:
        client: Connection to Redis, for the weights.
        stream: The stream that batches are taken from; `close` closes it.
        batch_size: Groups in a batch, of each rank.
        name: Name under which makers find the trainer. A trainer that is started again under the
            name of a dead one gets the dead one's batches at once.
        makers: Names of makers that get the weights; others may follow the trainer by themselves.
        callbacks: Objects whose hooks are called while `fit` runs.
        device: Device on which batches are trained; default: the accelerator, if there is one.
        pin_memory: Pin batches for the copy to an accelerator.
        prefetch: Batches prepared while a step runs; 0: each is taken when it is needed. A bound of
            staleness holds for prefetched batches too, when their step begins; without a bound,
            and with `rank`, each makes batches one step staler.
        timeout: Seconds that `fit` waits for a full batch. None waits for ever, and logs what is
            missing.
        ack: "step" acknowledges a batch after its step; a resumed run does not train it again.
            "checkpoint" acknowledges it after the checkpoint that holds its step; a resumed run
            trains again all batches after its checkpoint, so no trained sample is lost.
        checkpoint_dir: Directory of the checkpoints; None: none are written.
        checkpoint_every: Episodes between two checkpoints.
        rank: Rank of this process among trainers that share one task; None: it shares no task.
        world_size: Number of trainers that share the task.
        weights_dtype: Dtype in which weights are sent, such as "bfloat16"; default: the models'.
            `take_over` loads the weights as they were sent.
        agree: Settings, by name and as texts, in which makers must agree with this trainer: makers
            that were given others end with `ConfigError`.
        stop_timeout: Seconds that `fit`, the last update of the makers and `close` may spend on
            Redis, all together, after SIGTERM or Ctrl-C. A step or a checkpoint that is under way
            is finished and does not count.
        step_limit: Seconds after which `redrb doctor`, top and the page say that a step hangs; 0:
            ten times the longest step of late, and at least a minute.

    Raises:
        ConfigError: A name, number or option cannot be used, or no file written in checkpoint_dir.
        CheckpointFailed: The disk of checkpoint_dir is full, read-only or failing.
        StoreUnavailable: Redis could not be reached.

    Attributes:
        device: Device on which batches are trained.
    """

    def __init__(
        self,
        client: Client,
        stream: ExperienceStream,
        batch_size: int,
        *,
        name: str = "trainer_0",
        makers: Sequence[str] = (),
        callbacks: Sequence[TrainerCallback] = (),
        device: str | torch.device | None = None,
        pin_memory: bool = True,
        prefetch: int = 1,
        timeout: float | None = None,
        ack: Acknowledge = "step",
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        weights_dtype: str | torch.dtype | None = None,
        agree: Mapping[str, str] | None = None,
        stop_timeout: float = STOP_TIMEOUT_S,
        step_limit: float = 0.0,
    ) -> None:
        self.name = check_name("trainer", name)
        self.device = default_device() if device is None else torch.device(device)
        self._rank, self._stream, self._noted_with = rank, stream, client
        self._stop = Stop(checked_stop_seconds("stop_timeout", stop_timeout))
        hooks = together(callbacks, TrainerCallback)
        batches = FreshBatches(
            stream=stream,
            size=checked_int("batch_size", batch_size, 1) * (world_size or 1),
            stop=self._stop,
            callbacks=hooks,
            ack=ack,
            device=self.device,
            pin_memory=pin_memory,
            prefetch=prefetch,
            timeout=timeout,
            rank=rank,
            world_size=world_size,
        )
        checkpoints = None
        if checkpoint_dir is not None:
            owner = f"trainer {name!r}, task {stream.namespace}:{stream.task}"
            checkpoints = Checkpoints.of_rank(checkpoint_dir, owner, rank)
            checkpoints.check()
        self._loop = TrainingLoop(self, batches, checkpoints, checkpoint_every, hooks)
        worker = stream.worker
        worker.steps.limit_s = checked_stop_seconds("step_limit", step_limit)
        worker.role, worker.label = "trainer", name if rank is None else f"{name}, rank {rank}"
        stream.join_group()  # its ledger counts from now on, not from a first batch
        self._broadcast = Broadcast(
            client,
            stream.namespace,
            name,
            makers,
            publishes=not rank,
            dtype=weights_dtype,
            settings=agree,
        )
        worker.weights_name = name
        worker.begins()
        if rank is None:
            replace_predecessor(client, name, stream)

    @abstractmethod
    def training_step(self, experience: Experience) -> Mapping[str, Any]:
        """Train on one batch and return metrics by name."""

    @abstractmethod
    def send_weights(self) -> None:
        """Send new weights to the makers: call `push_weights` with the models."""

    def next_batch(self) -> Experience:
        """Return a fresh batch; `fit` calls it once for each step of an episode's first epoch.

        An override may change the batch, or call this several times; all batches that it has taken
        are acknowledged with the step.
        """
        return self._loop.batches.next()

    def checkpointed(self) -> Mapping[str, Stateful]:
        """Return the parts of a checkpoint, by name; default: attributes with a `state_dict`."""
        return stateful_parts(self)

    @property
    def weight_version(self) -> int:
        """Version of the weights that were sent last, 0 before the first."""
        return self._broadcast.version

    @property
    def published(self) -> tuple[WeightVersion, ...]:
        """Versions that the last update published: with LoRA weights and an adapter, else one."""
        return self._broadcast.published

    @property
    def wait_for_batch_s(self) -> float:
        """Seconds that `fit` has waited for batches until now."""
        return self._loop.batches.wait_for_batch_s

    @property
    def reward_at_end(self) -> float | None:
        """The reward that an earlier trainer has given to `end_job`.

        None if there was none, or if newer weights were published, or deleted, before this start.
        """
        return self._broadcast.reward_at_end

    @property
    def stopped(self) -> str:
        """Why `fit` was asked to end; "" if it was not."""
        return self._stop.reason

    def fit(self, total_steps: int | None, update_steps: int, train_epochs: int = 1) -> None:
        """Train `total_steps // update_steps` episodes; a resumed run trains the rest of them.

        An episode trains `update_steps` fresh batches as they come, then `train_epochs - 1` times
        the same batches in a new order, then updates the makers. SIGTERM, Ctrl-C and `stop` end it
        after the current step, with a checkpoint if there are any; later calls then train nothing.
        Each call trains this number of episodes; a resumed run leaves out the calls and episodes
        that its checkpoint holds. Ranks of torch.distributed end at the same step.

        Args:
            total_steps: Fresh batches in all; None: train until asked to end.
            update_steps: Fresh batches in an episode.
            train_epochs: Times that each batch is trained.

        Raises:
            ConfigError: A number cannot be used.
            BatchTimeout: No full batch came within the trainer's `timeout`.
            Exception: Any error of `training_step` or of a callback; the batch is requeued then. A
                RecordError that names a `field` which the batch does not have ends `fit` on ranks
                only: the groups without it become dead letters, and the next batch is trained.
        """
        update_steps = checked_int("update_steps", update_steps, 1)
        train_epochs = checked_int("train_epochs", train_epochs, 1)
        episodes = None if total_steps is None else total_steps // update_steps
        self._loop.fit(episodes, update_steps, train_epochs)
        stopped = f", stopped by {self.stopped}" if self.stopped else ""
        steps = counted(self._loop.position.step, "step", "are")
        _log.info("trainer %r: %s done%s", self.name, steps, stopped)

    def stop(self, why: str = "stop() was called") -> None:
        """Ask `fit` to end after the current step; a callback may call it."""
        self._stop.ask(why)

    def end_job(self, why: str = "all steps are trained", *, reward: float | None = None) -> bool:
        """Announce that the job is over: makers that follow this trainer finish and end.

        Call it after the last `fit`; all ranks must call it. After SIGTERM or Ctrl-C it does
        nothing, since the run is to be resumed. A trainer of this name that starts later takes the
        announcement back.

        Args:
            why: The reason, which makers log.
            reward: The evaluated reward for which the job is over, if that is the reason. A later
                trainer of this name has it as `reward_at_end`.

        Returns:
            Whether the job is over.

        Raises:
            ConfigError: The reward is no finite number.
            StoreUnavailable: Redis stayed away; some makers may have learned of it.
        """
        if reward is not None:
            reward = checked_number("reward", reward)
        with Deadline(budget=self._stop):
            if any_rank(self._stop.by_signal):
                return False
            self._broadcast.end_job(why, reward)
        return True

    def resume(self) -> bool:
        """Load the newest checkpoint, if it was not loaded yet; `fit` and updates call it first.

        Returns:
            Whether there was a checkpoint.

        Raises:
            DecodeError, ConfigError: The checkpoint cannot be used; nothing was loaded.
        """
        return self._loop.resume()

    def take_over(self, models: Mapping[str, nn.Module]) -> int:
        """Load the weights that a trainer of this name has published last.

        If that trainer still runs, it can publish no more: it ends with `PublisherFenced`. To go on
        with the same trainer, a checkpoint is better, because it holds the optimizers as well.

        Args:
            models: The models by name, as for `push_weights`.

        Returns:
            The version that was loaded; 0: none was published, or the newest is damaged, which is
            logged, and the models are unchanged.

        Raises:
            WeightMismatch: The weights do not fit the models, which are unchanged.
            StoreUnavailable: As `WeightSubscriber.poll` does.
        """
        return self._broadcast.take_over(models)

    def push_weights(
        self, models: Mapping[str, nn.Module], *, fully_update: bool = False, lora: bool = False
    ) -> int:
        """Publish weights as one version and announce them to the makers.

        All ranks call it: those of a sharded model gather its weights.

        Args:
            models: The models by name, such as `{"actor": ..., "critic": ...}`.
            fully_update: With `lora`, send all weights too.
            lora: Send only `lora_A` and `lora_B`, once the makers have all weights.

        Returns:
            The version. Of ranks only the first publishes.

        Raises:
            PublisherFenced: Another trainer of this name was started after this one.
            StoreUnavailable, StoreFull: As `WeightPublisher.publish` does.
        """
        version = self._broadcast.push(models, fully=fully_update, lora_only=lora)
        if not self._rank:
            self._stream.worker.weight_version = version
            self._stream.advance(version)  # max_staleness counts from it
        if self._rank is None:
            note_consumer(self._noted_with, self.name, self._stream)
        return version

    def close(self) -> None:
        """Requeue leased batches and close the stream."""
        with Deadline(budget=self._stop), self._broadcast:
            self._stream.close()
