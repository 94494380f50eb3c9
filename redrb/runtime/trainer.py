"""`DetachedTrainer`: trains on experience from makers and sends them new weights."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from redrb.checks import checked_int, checked_number
from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Experience
from redrb.keys import check_name, consumer_key
from redrb.runtime.broadcast import Broadcast
from redrb.runtime.buffer import DetachedReplayBuffer, client_for, implied_limit
from redrb.runtime.callbacks import Callbacks, TrainerCallback, refuse_hooks
from redrb.runtime.checkpoint import Stateful, stateful_parts
from redrb.runtime.fresh_batches import Acknowledge, LoopSettings
from redrb.runtime.sharded_models import whole_tensors
from redrb.runtime.stopping import STOP_TIMEOUT_S, checked_stop_seconds
from redrb.runtime.training_loop import TrainingLoop
from redrb.runtime.world import any_rank, default_device
from redrb.stream import ExperienceStream
from redrb.weights import WeightVersion

_log = logging.getLogger("redrb")


def replace_predecessor(
    client: Client, namespace: str, trainer: str, stream: ExperienceStream
) -> None:
    """Requeue at once all groups that an earlier trainer of this name leases.

    Trainers that share a task as ranks need no such call: `take` requeues for them.
    """
    key = consumer_key(namespace, trainer)
    client = client.at(key)
    noted = client.execute("GET", key)
    task, _, consumer = (noted or b"").decode(errors="replace").partition(" ")
    if consumer and task == stream.task and consumer != stream.consumer:
        requeued = stream.dismiss(consumer)
        if requeued:
            _log.warning(
                "trainer %r: %d groups of the trainer before it were requeued", trainer, requeued
            )
    client.execute("SET", key, f"{stream.task} {stream.consumer}")


class DetachedTrainer(ABC):
    """Base of trainers whose experience is made in other processes.

    Source: `coati.ray.detached_trainer_base`. There it is a Ray actor that makers find by name;
    here it is an object in any process, and makers find its buffer in Redis, as the task of the
    trainer's name. A subclass defines the training step and sends the weights; it may also override
    `_buffer_sample`. Checkpoints hold all attributes of the trainer that have a `state_dict`.
    Delivery is at least once: a batch is acknowledged after its step, or after the checkpoint that
    holds the step.

    Args:
        experience_maker_holder_name_list: Makers that get the weights. It may be empty: makers that
            no trainer names can follow this one by themselves.
        train_batch_size: Samples in a batch, of each rank.
        buffer_limit: Most batches that wait; makers wait beyond it. Batches that were taken for
            training do not count. 0: no limit.
        dataloader_pin_memory: Pin batches for the copy to an accelerator.
        callbacks: Objects whose hooks are called while `fit` runs.
        debug: Log the metrics of each step.
        name: Name under which makers find the trainer. A trainer that is started again under the
            name of a dead one gets the dead one's batches at once.
        client: Result of `redrb.connect`, or a URL; default: REDRB_URL.
        task: Task of the buffer; default: the trainer's name.
        namespace: Keeps experiments on one server apart.
        device: Device on which batches are trained; default: the accelerator, if there is one.
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
            that were given others (`ExperienceMakerHolder(agree=)`) end with `ConfigError`.
        stop_timeout: Seconds that `fit`, the last update of the makers and `close` may spend on
            Redis, all together, after SIGTERM or Ctrl-C. A step or a checkpoint that is under way
            is finished and does not count.
        step_limit: Seconds after which `redrb doctor`, top and the page say that a step hangs; 0:
            ten times the longest step of late, and at least a minute.
        stream_options: Further options of `ExperienceStream`. `max_staleness=4` counts from the
            version that this trainer has sent last; makers then wait for the right to begin groups,
            and `fit` sets `groups_per_version` to the groups of `update_steps` batches.

    Raises:
        ConfigError: A name, number or option cannot be used.
        StoreUnavailable: Redis could not be reached.

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
        buffer: The trainer's buffer.
        device: Device on which batches are trained.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse hooks of coati that would not be called."""
        super().__init_subclass__(**options)
        refuse_hooks(cls, TrainerCallback)

    def __init__(
        self,
        experience_maker_holder_name_list: Sequence[str],
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        dataloader_pin_memory: bool = True,  # noqa: FBT001 (coati has it by position)
        callbacks: Sequence[TrainerCallback] = (),
        debug: bool = False,  # noqa: FBT001 (coati has it by position)
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
        agree: Mapping[str, str] | None = None,
        stop_timeout: float = STOP_TIMEOUT_S,
        step_limit: float = 0.0,
        **stream_options: Any,
    ) -> None:
        self.name = check_name("trainer", name)
        self.device = default_device() if device is None else torch.device(device)
        settings = LoopSettings(
            device=self.device,
            pin_memory=dataloader_pin_memory,
            prefetch=prefetch,
            timeout=timeout,
            rank=rank,
            world_size=world_size,
            ack=ack,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )
        self._rank, task = rank, name if task is None else task
        checkpoints = settings.checkpoints(f"trainer {name!r}, task {namespace}:{task}")
        self._stop = Stop(checked_stop_seconds("stop_timeout", stop_timeout))
        checked = Callbacks(callbacks, TrainerCallback)
        self._loop = TrainingLoop(self, settings, checkpoints, checked, self._stop, debug)
        step_limit = checked_stop_seconds("step_limit", step_limit)
        if isinstance(experience_maker_holder_name_list, str):
            raise ConfigError("experience_maker_holder_name_list is a list of names, not one name.")
        self._client, self._client_scope = client_for(client)
        with ExitStack() as undo:
            undo.push(self._client_scope)
            if "limit" in stream_options:
                raise ConfigError("give buffer_limit, in batches, instead of limit.")
            size, partitions = train_batch_size * (world_size or 1), "partitions" in stream_options
            # a run that goes on with another batch size or buffer_limit has another limit, or none
            implied = implied_limit(max(0, buffer_limit) * size, parted=partitions)
            self.buffer = DetachedReplayBuffer(
                size,
                buffer_limit,
                client=self._client,
                task=task,
                namespace=namespace,
                **{"implied": implied, **stream_options},
            )
            undo.callback(self.buffer.close)
            self.buffer.stream.join_group()  # its ledger counts from now on, not from a first batch
            makers = [] if rank else list(experience_maker_holder_name_list)  # rank 0 publishes
            self._gathered: dict[str, Tensor] = {}  # whole tensors of sharded models
            self._broadcast = Broadcast(
                *(self._client, namespace, name, makers),
                dtype=weights_dtype,
                settings=None if rank else agree,
            )
            worker = self.buffer.stream.worker
            worker.role, worker.label = "trainer", name if rank is None else f"{name}, rank {rank}"
            worker.weights_name, worker.steps.limit_s = name, step_limit
            worker.begins()
            if rank is None:
                replace_predecessor(self._client, namespace, name, self.buffer.stream)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def training_step(self, experience: Experience) -> Mapping[str, Any]:
        """Train on one batch and return metrics by name."""

    @abstractmethod
    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:  # noqa: FBT001
        """Send new weights to the makers: call `push_weights` with the models.

        Args:
            fully_update: Send all weights, not only those of LoRA.
            config: Arguments of `sync_models_to_remote_makers`.
        """

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
        return self._loop.wait_for_batch_s

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
            ConfigError: A number cannot be used, or too many batches lie between two checkpoints
                of ranks.
            BatchTimeout: No full batch came within the trainer's `timeout`.
            Any error of `training_step` or of a callback; the batch is requeued then. A RecordError
                that names a `field` which the batch does not have ends `fit` on ranks only: the
                groups without it become dead letters, and the next batch is trained.
        """
        update_steps = checked_int("update_steps", update_steps, 1)
        train_epochs = checked_int("train_epochs", train_epochs, 1)
        episodes = None if total_steps is None else total_steps // update_steps
        self._loop.fit(episodes, update_steps, train_epochs)
        stopped = f", stopped by {self.stopped}" if self.stopped else ""
        _log.info("trainer %r: %d steps are done%s", self.name, self._loop.position.step, stopped)

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
            if not self._rank:
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

    def checkpointed(self) -> Mapping[str, Stateful]:
        """Return the parts of a checkpoint, by name; default: attributes with a `state_dict`."""
        return stateful_parts(self)

    def sync_models_to_remote_makers(self, **config: Any) -> None:
        """Send all weights to the makers; makers that wait for their first weights begin."""
        with Deadline(budget=self._stop):
            self.resume()
            self._update_remote_makers(fully_update=True, **config)

    def take_over(self, models: Mapping[str, nn.Module]) -> int:
        """Load the weights that a trainer of this name has published last.

        If that trainer still runs, it can publish no more: it ends with `PublisherFenced`. To go on
        with the same trainer, a checkpoint is better, because it holds the optimizers as well.

        Args:
            models: The models by name, as for `push_weights`.

        Returns:
            The version that was loaded; 0: none was published, and the models are unchanged.

        Raises:
            WeightMismatch: The weights do not fit the models, which are unchanged.
            WeightError, DecodeError, StoreUnavailable: As `WeightSubscriber.poll` does.
        """
        return self._broadcast.take_over(models, fence=not self._rank)

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
        state = whole_tensors(models, self._gathered)
        if self._rank:
            return self._broadcast.version
        version = self._broadcast.push(models, tensors=state, fully=fully_update, lora_only=lora)
        self.buffer.stream.worker.weight_version = version
        self.buffer.stream.advance(version)  # max_staleness counts from it
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

    @property
    def detached_replay_buffer(self) -> DetachedReplayBuffer:
        """The trainer's buffer, by its name in coati."""
        return self.buffer

    def _buffer_sample(self) -> Experience:
        """Return a fresh batch; `fit` calls it once for each step of an episode's first epoch.

        An override may change the batch, or call this several times; all batches that it has taken
        are acknowledged with the step.
        """
        return self._loop.next_batch()

    def close(self) -> None:
        """Requeue leased batches and close the buffer, and the client if the trainer opened it."""
        with self._client_scope, Deadline(budget=self._stop):
            self.buffer.close()
