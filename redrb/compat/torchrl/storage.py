"""`TaskStorage`: the storage of a torchrl `ReplayBuffer`, which is a task in Redis."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from redrb.checks import checked_int
from redrb.compat.torchrl.records import INDEX, samples_of, tensordict_of
from redrb.connection.deadline import checked_timeout
from redrb.errors import ConfigError, RecordError
from redrb.stream import ExperienceStream, Lease


class Stateless:
    """What torchrl saves and loads of a part of a buffer: nothing, since the task is in Redis.

    `ExperienceStream.save` writes the task to a file.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing."""

    def dumps(self, path: Any) -> None:
        """Write nothing."""

    def loads(self, path: Any) -> None:
        """Load nothing."""

    def _empty(self, *_: object, **__: object) -> None:
        """Do nothing: there is no state."""


class TaskStorage(Stateless, Storage):  # type: ignore[misc]
    """Keeps the elements of a `ReplayBuffer` in a task; batches are leased, and acknowledged.

    A batch that was sampled is leased until `ack`, `release` or `reject` is called with it: after
    the optimizer step. Without that, `max_unacknowledged` batches later sampling is a ConfigError.
    When the process dies, its batches are requeued. Thread-safe.

    Args:
        stream: The stream of the task. Close it after the buffer.
        group_size: Samples of each group. A batch has a multiple of it.
        timeout: Seconds that sampling and putting wait; None: for ever.
        max_unacknowledged: Most batches that are sampled and not ended.
    """

    def __init__(
        self,
        stream: ExperienceStream,
        *,
        group_size: int = 1,
        timeout: float | None = 600.0,
        max_unacknowledged: int = 16,
    ) -> None:
        if not isinstance(stream, ExperienceStream):
            raise ConfigError(f"stream={stream!r:.80}: give a redrb.ExperienceStream.")
        self.group_size = checked_int("group_size", group_size, 1)
        self._timeout = checked_timeout(timeout)
        self._most = checked_int("max_unacknowledged", max_unacknowledged, 1)
        self._stream = stream
        self._leases: dict[int, Lease] = {}  # by the id of each group
        self._held = threading.Lock()
        super().__init__(torch.iinfo(torch.int64).max)

    def __len__(self) -> int:
        """Return the number of samples that wait in the task."""
        return self._stream.count() * self.group_size

    def ack(self, batch: TensorDictBase) -> None:
        """Acknowledge a sampled batch as trained. Call it after the optimizer step.

        Raises:
            ConfigError: The batch is not from this storage, or was ended.
            LeaseLost: Another consumer has taken groups over.
        """
        self._end(batch).ack()

    def release(self, batch: TensorDictBase) -> None:
        """Requeue a sampled batch unharmed."""
        self._end(batch).release()

    def reject(self, batch: TensorDictBase, reason: str | BaseException) -> None:
        """Move a sampled batch to the dead letters of the task."""
        self._end(batch).reject(reason)

    def close(self) -> None:
        """Requeue all batches that were not ended, unharmed."""
        with self._held:
            leases = {id(lease): lease for lease in self._leases.values()}
            self._leases.clear()
        for lease in leases.values():
            lease.release()

    def put(self, data: TensorDictBase) -> Tensor:
        """Put rows into the task, in groups; returns the id of each row's group, int64 `[B]`.

        Raises:
            ConfigError: The number of rows is no multiple of `group_size`.
            RecordError: The rows cannot be samples.
            StoreFull: The task is full, and was opened with `on_full="error"`.
        """
        items = samples_of(data)
        size = self.group_size
        if len(items) % size:
            raise ConfigError(f"{len(items)} rows are no multiple of group_size={size}.")
        groups = [items[start : start + size] for start in range(0, len(items), size)]
        stored = self._stream.put_many(groups, timeout=self._timeout)
        return torch.tensor(stored, dtype=torch.int64).repeat_interleave(size)

    def lease(self, batch_size: int) -> Tensor:
        """Lease samples in the task's order; returns the id of each sample's group, int64 `[B]`.

        Raises:
            ConfigError: `batch_size` is no multiple of `group_size`, or too many batches are held.
            RecordError: A group has another size; it counts as a failed delivery.
            BatchTimeout: Too few samples came in time.
        """
        size = self.group_size
        if checked_int("batch_size", batch_size, 1) % size:
            raise ConfigError(f"batch_size {batch_size} is no multiple of group_size={size}.")
        with self._held:
            held = len(set(map(id, self._leases.values())))
        if held >= self._most:
            raise ConfigError(
                f"Batches sampled and not ended: {held}. Call storage.ack(batch) after each "
                "step, or raise max_unacknowledged."
            )
        lease = self._stream.take(batch_size // size, timeout=self._timeout)
        for seq, layout in lease.layouts.items():
            if layout.samples != size:
                error = RecordError(
                    f"group {seq} has {layout.samples} samples, not group_size={size}.",
                    ids=(seq,),
                )
                lease.fail(error, [seq])
                if lease:
                    lease.release()
                raise error
        with self._held:
            self._leases |= dict.fromkeys(lease.ids, lease)
        return torch.tensor(lease.ids, dtype=torch.int64).repeat_interleave(size)

    def get(self, index: Any) -> TensorDict:
        """Return the samples of a batch that `lease` returned ids for.

        Raises:
            ConfigError: The ids are not those of a leased batch: a task is read by sampling.
            RecordError: The samples do not fit into one batch; they count as a failed delivery.
        """
        ids = _ids(index)
        lease = self._lease_of(ids)
        try:
            return tensordict_of(lease.items(), ids)
        except RecordError as error:
            self._forget(lease)
            lease.fail(error)
            raise

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:  # noqa: ARG002
        """Refuse: elements of a task have no place that can be written."""
        raise ConfigError("a task cannot be written at an index: use buffer.extend(tensordict).")

    def _empty(self, *_: object, **__: object) -> None:
        raise ConfigError("a buffer on a task is not emptied: call stream.clear().")

    def _end(self, batch: TensorDictBase) -> Lease:
        if not isinstance(batch, TensorDictBase) or batch.get(INDEX, None) is None:
            raise ConfigError(f"give the batch that was sampled, with its entry {INDEX!r}.")
        lease = self._lease_of(_ids(batch.get(INDEX)))
        self._forget(lease)
        return lease

    def _lease_of(self, ids: Sequence[int]) -> Lease:
        with self._held:
            lease = self._leases.get(ids[0]) if ids else None
        if lease is None or list(dict.fromkeys(ids)) != list(lease.ids):
            raise ConfigError(
                "these are not the samples of one leased batch: they were ended, or do not come "
                "from buffer.sample()."
            )
        return lease

    def _forget(self, lease: Lease) -> None:
        with self._held:
            self._leases = {seq: held for seq, held in self._leases.items() if held is not lease}


def _ids(index: Any) -> list[int]:
    found: list[int] = torch.as_tensor(index).reshape(-1).tolist()
    return found
