"""`task_buffer`: a torchrl `ReplayBuffer` on a task; its sampler and its writer."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import Sampler, Writer

from redrb.checks import checked_int
from redrb.compat.torchrl.storage import Stateless, TaskStorage
from redrb.errors import ConfigError
from redrb.stream import ExperienceStream


class TaskSampler(Stateless, Sampler):  # type: ignore[misc]
    """Samples in the order of the task: fifo, priority, stalest first, drawn by priority, ..."""

    def sample(self, storage: TaskStorage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Lease a batch; returns the ids of its groups, int64 `[B]`."""
        return _checked(storage).lease(batch_size), {}


class TaskWriter(Stateless, Writer):  # type: ignore[misc]
    """Puts elements into the task."""

    def register_storage(self, storage: TaskStorage) -> None:
        """Note the storage of the buffer."""
        self._storage = _checked(storage)

    def add(self, data: TensorDictBase) -> int:
        """Put one element as a group; returns its id."""
        return int(self._storage.put(data.unsqueeze(0))[0])

    def extend(self, data: TensorDictBase) -> Tensor:
        """Put rows; returns the id of each row's group, int64 `[B]`."""
        stored: Tensor = self._storage.put(data)
        return stored


def task_buffer(
    stream: ExperienceStream,
    batch_size: int,
    *,
    group_size: int = 1,
    timeout: float | None = 600.0,
    max_unacknowledged: int = 16,
    **options: Any,
) -> Any:
    """Return a torchrl `TensorDictReplayBuffer` on a task.

    `extend` and `add` put rows; `sample` waits for a full batch and leases it, so no other call
    gets these rows. End each batch with `buffer.storage.ack(batch)`, `release` or `reject`, and the
    buffer with `buffer.storage.close()`. A buffer holds a lock while it waits: to extend from
    another thread use another buffer on the same stream.

    Args:
        stream, group_size, timeout, max_unacknowledged: As for `TaskStorage`.
        batch_size: Samples in a batch, a multiple of `group_size`.
        options: Further options of `TensorDictReplayBuffer`, such as `transform` and `prefetch`.
    """
    given = sorted({"storage", "sampler", "writer", "collate_fn"} & options.keys())
    if given:
        raise ConfigError(
            f"{', '.join(given)}: a buffer on a task has its own. Make a ReplayBuffer of "
            "TaskStorage, TaskSampler and TaskWriter to replace one of them."
        )
    storage = TaskStorage(
        stream, group_size=group_size, timeout=timeout, max_unacknowledged=max_unacknowledged
    )
    if checked_int("batch_size", batch_size, 1) % group_size:
        raise ConfigError(f"batch_size {batch_size} is no multiple of group_size={group_size}.")
    return TensorDictReplayBuffer(
        storage=storage,
        sampler=TaskSampler(),
        writer=TaskWriter(),
        collate_fn=lambda batch: batch,
        batch_size=batch_size,
        **options,
    )


def _checked(storage: object) -> TaskStorage:
    if not isinstance(storage, TaskStorage):
        raise ConfigError(
            f"{type(storage).__name__} is no TaskStorage: TaskSampler and TaskWriter belong to one."
        )
    return storage
