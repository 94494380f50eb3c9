"""`TaskRolloutWorker` and `PublishedWeights`: TRL's AsyncGRPOTrainer on a task."""

from __future__ import annotations

import queue
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from redrb.checks import checked_int_or_none
from redrb.compat.trl.held_leases import HeldLeases
from redrb.compat.trl.token_rows import check_group_size, token_row
from redrb.errors import BatchTimeout, ConfigError, RecordError
from redrb.experience import BufferItem
from redrb.stream import ExperienceStream, Lease
from redrb.train.fresh_batches import log_rejected
from redrb.weights import WeightPublisher

_STEPS_UNTIL_TRAINED = 3
"""Optimizer steps after which a sample that was handed over is certainly trained.

The step in which it was handed over may have used earlier samples only; TRL's batcher keeps one
sample for the next forward pass, and Accelerate's loader fetches one pass ahead. With one pass per
step these are two further steps.
"""


class PublishedWeights:
    """Publishes the policy of an AsyncGRPOTrainer; give it as `weight_transfer`.

    The versions hold the parameters, without buffers: makers load them with
    `subscriber.poll(model, strict=False)`.

    Args:
        publisher: Publishes the weights; None on all ranks but rank 0.

    Attributes:
        version: The version that was published last, None before.
    """

    def __init__(self, publisher: WeightPublisher | None) -> None:
        if not isinstance(publisher, WeightPublisher | None):
            raise ConfigError(f"publisher={publisher!r:.80}: give a redrb.WeightPublisher or None.")
        self._publisher = publisher
        self.version: int | None = None

    def init_weight_transfer(self) -> None:
        """Do nothing: makers come and go."""

    def pause(self) -> None:
        """Do nothing: makers go on with their weights while the new ones are sent."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish all tensors as one version.

        Raises:
            ConfigError: This is rank 0, and it has no publisher.
        """
        if self._publisher is None:
            raise ConfigError("rank 0 needs PublishedWeights with a redrb.WeightPublisher.")
        self.version = self._publisher.publish(iterator).version

    def resume(self) -> None:
        """Do nothing: makers load the version when they look for it."""

    def destroy(self) -> None:
        """Do nothing: whoever made the publisher closes it."""


class TaskRolloutWorker(TrainerCallback):  # type: ignore[misc]
    """Feeds an AsyncGRPOTrainer from a task; give it as `rollout_worker` and in `callbacks`.

    The trainer's loss uses the makers' log-probabilities, and advantages of the rewards in each
    group. A group is acknowledged when it is certainly trained: the trainer reads ahead, so this is
    up to three optimizer steps after it was handed over. The last groups of a run are requeued,
    though some of them are trained.

    Groups beyond the trainer's `max_staleness` expire. All members belong to the trainer's thread.

    Args:
        weights: Given to the same trainer as `weight_transfer`: with it samples' weight versions
            are compared with the trainer's.
        group_size: Samples of each group; None accepts any number.

    Attributes:
        rollout_buffer: This object, which the trainer reads like a queue.
        metrics_queue: A queue that stays empty.
    """

    def __init__(
        self,
        stream: ExperienceStream,
        weights: PublishedWeights | None = None,
        *,
        group_size: int | None = None,
    ) -> None:
        if not isinstance(stream, ExperienceStream):
            raise ConfigError(f"stream={stream!r:.80}: give a redrb.ExperienceStream.")
        if not isinstance(weights, PublishedWeights | None):
            raise ConfigError(f"weights={weights!r:.80}: give a PublishedWeights or None.")
        self._stream = stream
        self._weights = weights
        self._group_size = checked_int_or_none("group_size", group_size, 1)
        self._leases = HeldLeases()
        self._handing: Lease | None = None
        self._samples: deque[RolloutSample] = deque()
        self._groups = self._steps = self._model_version = 0
        self._max_staleness: int | None = None
        self._waiting_since: float | None = None
        self._timeout: BatchTimeout | None = None
        self.rollout_buffer = self
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()

    def get(self, timeout: float | None = None) -> RolloutSample:
        """Return the next sample, as `queue.Queue.get` does.

        Raises:
            queue.Empty: No group came in time.
            RecordError: A group has another size; it counts as a failed delivery. Groups without
                tokens or log-probabilities become dead letters, and another one is taken.
        """
        while not self._samples:
            self._take(timeout)
        sample = self._samples.popleft()
        if not self._samples and self._handing is not None:
            self._leases.hold(self._handing, self._steps + _STEPS_UNTIL_TRAINED)
            self._handing = None
        return sample

    def qsize(self) -> int:
        """Return the samples that are taken and not handed over."""
        return len(self._samples)

    def start(self) -> None:
        """Do nothing: makers are other processes."""

    def stop(self) -> None:
        """Requeue the groups that are not acknowledged; the trainer calls this at its end.

        While an exception ends the trainer, they count as failed deliveries.
        """
        self._samples.clear()
        if self._handing is not None:
            self._handing.release()
            self._handing = None
        self._leases.end(sys.exc_info()[1])

    def update_model_version(self, model_version: int) -> None:
        """Note the trainer's number of its current weights."""
        self._model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise BatchTimeout if no group has come for `stale_after_s` seconds."""
        if self._waiting_since is not None:
            waited = time.monotonic() - self._waiting_since
            if waited > stale_after_s and self._timeout is not None:
                raise self._timeout

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        """Note the trainer's bound of staleness, and say how many groups a version trains."""
        self._max_staleness = getattr(args, "max_staleness", None)
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        groups = samples * args.world_size * args.weight_sync_steps // args.num_generations
        self._stream.expect(max(1, groups))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Acknowledge the groups that are certainly trained."""
        self._steps += 1
        self._leases.acknowledge(self._steps)

    def _take(self, timeout: float | None) -> None:
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        try:
            lease = self._stream.take(1, timeout=timeout)
        except BatchTimeout as error:
            self._timeout = error
            raise queue.Empty from error
        self._waiting_since = self._timeout = None
        (group,) = lease.groups()
        version = self._version(group)
        if self._max_staleness is not None and (
            self._model_version - version > self._max_staleness
        ):
            lease.expire()
            return
        try:
            samples = self._of_group(group, version)
        except RecordError as error:
            if error.field is None:
                lease.fail(error)
                raise
            error.ids = lease.ids
            lease.reject(error)
            log_rejected(error, self._stream.task, 1)
            return
        self._samples.extend(samples)
        self._groups += 1
        self._handing = lease

    def _version(self, group: Sequence[BufferItem]) -> int:
        """Return the trainer's number for the oldest weights that made the group."""
        made = [item.policy_version for item in group if item.policy_version is not None]
        published = None if self._weights is None else self._weights.version
        if not made or published is None:
            return self._model_version
        return self._model_version - max(0, published - min(made))

    def _of_group(self, group: Sequence[BufferItem], version: int) -> list[RolloutSample]:
        if self._group_size is not None:
            check_group_size(group, self._group_size)
        nan = float("nan")
        rewards = np.array([nan if each.reward is None else float(each.reward) for each in group])
        advantages, deviation = _advantages(rewards)
        samples = []
        for item, reward, advantage in zip(group, rewards, advantages, strict=True):
            row = token_row(item)
            before = [0] * len(row.prompt)
            mask, log_probs = before + list(map(int, row.trained)), before + row.log_probs
            sample = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.asarray(row.prompt + row.completion, dtype=np.int64),
                completion_mask=np.asarray(mask, dtype=np.int64),
                old_log_probs=np.asarray(log_probs, dtype=np.float32),
                advantage=float(advantage),
                model_version=version,
                group_id=self._groups,
                metrics={"reward": float(reward), "reward_std": deviation},
            )
            samples.append(sample)
        return samples


def _advantages(rewards: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
    scored = ~np.isnan(rewards)
    advantages = np.zeros_like(rewards)
    if not scored.any():
        return advantages, float("nan")
    deviation = float(rewards[scored].std())
    advantages[scored] = (rewards[scored] - rewards[scored].mean()) / (deviation + 1e-8)
    return advantages, deviation
