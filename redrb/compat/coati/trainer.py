"""`DetachedTrainer`: ColossalAI's base of trainers."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from redrb.compat.coati.buffer import DetachedReplayBuffer
from redrb.connection import Client
from redrb.connection.connecting import client_for
from redrb.connection.deadline import Deadline
from redrb.connection.stop import STOP_TIMEOUT_S
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Experience
from redrb.keys import check_name
from redrb.train.callbacks import TrainerCallback, refuse_hooks
from redrb.train.fresh_batches import Acknowledge
from redrb.train.trainer import Trainer
from redrb.words import counted

_log = logging.getLogger("redrb")


class DetachedTrainer(Trainer):
    """Base of trainers whose experience is made in other processes.

    Source: `coati.ray.detached_trainer_base`. There it is a Ray actor that makers find by name;
    here it is an object in any process, and makers find its buffer in Redis, as the task of the
    trainer's name. A subclass defines the training step and sends the weights; it may also override
    `_buffer_sample`. Checkpoints hold all attributes of the trainer that have a `state_dict`.

    Args:
        experience_maker_holder_name_list: Makers that get the weights. It may be empty: makers that
            no trainer names can follow this one by themselves.
        train_batch_size: Samples in a batch, of each rank.
        buffer_limit: Most batches that wait; makers wait beyond it. Batches that were taken for
            training do not count. 0: no limit.
        dataloader_pin_memory: Pin batches for the copy to an accelerator.
        debug: Log the metrics of each step.
        client: Result of `redrb.connect`, or a URL; default: REDRB_URL.
        task: Task of the buffer; default: the trainer's name.
        namespace: Keeps experiments on one server apart.
        callbacks, name, device, prefetch: As for `redrb.train.trainer.Trainer`.
        timeout, ack, checkpoint_dir, checkpoint_every: As for it.
        rank, world_size, weights_dtype, agree: As for it.
        stop_timeout, step_limit: As for it; its errors are those of this class.
        stream_options: Further options of `ExperienceStream`. `max_staleness=4` counts from the
            version that this trainer has sent last; makers then wait for the right to begin groups,
            and `fit` sets `groups_per_version` to the groups of `update_steps` batches.

    Examples:
        >>> class MyTrainer(redrb.DetachedTrainer):
        ...     def training_step(self, experience):
        ...         return {"loss": self.step(experience)}
        ...     def _update_remote_makers(self, fully_update=False, **config):
        ...         self.push_weights({"actor": self.actor}, fully_update=fully_update)
        >>> trainer = MyTrainer(["maker_0"], train_batch_size=8, name="trainer_0")
        >>> trainer.sync_models_to_remote_makers()
        >>> trainer.fit(total_steps=1000, update_steps=100, train_epochs=2)
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
        check_name("trainer", name)
        if isinstance(experience_maker_holder_name_list, str):
            raise ConfigError("experience_maker_holder_name_list is a list of names, not one name.")
        if "limit" in stream_options:
            raise ConfigError("give buffer_limit, in batches, instead of limit.")
        opened, self._client_scope = client_for(client)
        with ExitStack() as undo:
            undo.push(self._client_scope)
            self.buffer = DetachedReplayBuffer(
                train_batch_size * (world_size or 1),
                buffer_limit,
                client=opened,
                task=name if task is None else task,
                namespace=namespace,
                **stream_options,
            )
            undo.callback(self.buffer.close)
            super().__init__(
                opened,
                self.buffer.stream,
                train_batch_size,
                name=name,
                makers=experience_maker_holder_name_list,
                callbacks=[*([_StepLog(name)] if debug else []), *callbacks],
                device=device,
                pin_memory=dataloader_pin_memory,
                prefetch=prefetch,
                timeout=timeout,
                ack=ack,
                checkpoint_dir=checkpoint_dir,
                checkpoint_every=checkpoint_every,
                rank=rank,
                world_size=world_size,
                weights_dtype=weights_dtype,
                agree=agree,
                stop_timeout=stop_timeout,
                step_limit=step_limit,
            )
            undo.pop_all()

    @abstractmethod
    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:  # noqa: FBT001
        """Send new weights to the makers: call `push_weights` with the models.

        Args:
            fully_update: Send all weights, not only those of LoRA.
            config: Arguments of `sync_models_to_remote_makers`.
        """

    def send_weights(self) -> None:
        """Call `_update_remote_makers`."""
        self._update_remote_makers()

    def sync_models_to_remote_makers(self, **config: Any) -> None:
        """Send all weights to the makers; makers that wait for their first weights begin."""
        with Deadline(budget=self._stop):
            self.resume()
            self._update_remote_makers(fully_update=True, **config)

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

    def next_batch(self) -> Experience:
        """Call `_buffer_sample`."""
        return self._buffer_sample()

    def _buffer_sample(self) -> Experience:
        """Return a fresh batch, for overrides by the name in coati; see `Trainer.next_batch`."""
        if self._loop.batches.is_taking:
            return super().next_batch()
        return self.buffer.sample(to_device=self.device, timeout=self._loop.batches.timeout)

    def close(self) -> None:
        """Requeue leased batches and close the buffer, and the client if the trainer opened it."""
        with self._client_scope, Deadline(budget=self._stop), self._broadcast:
            self.buffer.close()


class _StepLog(TrainerCallback):
    """Logs the metrics of each step."""

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        samples = counted(len(experience), "sample")
        _log.info("trainer %r trained %s: %s", self._trainer, samples, metrics)
