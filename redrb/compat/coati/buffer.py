"""`DetachedReplayBuffer`: ColossalAI's buffer between makers and a trainer, in Redis."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch

from redrb.checks import checked_int
from redrb.connection import Client
from redrb.connection.connecting import client_for
from redrb.errors import ConfigError, LeaseLost
from redrb.experience import BufferItem, Experience
from redrb.scopes import Entered
from redrb.stream import ExperienceStream, Lease, TaskSettings
from redrb.stream.task.settings import may_give_rights


class DetachedReplayBuffer(Entered):
    """Collects samples from any number of makers into full batches for a trainer.

    Source: `coati.ray.detached_replay_buffer`. There it is a queue inside one Ray actor; here it is
    the stream of `task`, which any process can open by that name and which outlives them all.
    Thread-safe. Samples are put exactly once and delivered at least once: a batch is acknowledged
    when the same worker samples again, or by `close`.

    Examples:
        >>> buffer = DetachedReplayBuffer(sample_batch_size=8, limit=16)
        >>> buffer.append(experience)
        >>> batch = buffer.sample(to_device="cuda:0")

    Attributes:
        limit: Most batches that wait; 0: no limit.
    """

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        *,
        client: Client | str | None = None,
        task: str = "default",
        namespace: str = "default",
        **stream_options: Any,
    ) -> None:
        """Open the buffer.

        Args:
            sample_batch_size: Samples in a batch, >= 1.
            limit: Most batches that wait; producers wait beyond it. A batch that was sampled does
                not count. <= 0: no limit.
            client: Result of `redrb.connect`, or a URL; default: REDRB_URL.
            namespace: Keeps experiments on one server apart.
            stream_options: Further options of `ExperienceStream`, such as `order="stalest"`.

        Raises:
            ConfigError: A number or name cannot be used.
            TaskMismatch: The task exists with other settings.
            StoreUnavailable: Redis could not be reached.
        """
        if type(limit) is not int:
            raise ConfigError(f"limit={limit!r}: it is a number of batches; 0 is no limit.")
        self.sample_batch_size = checked_int("sample_batch_size", sample_batch_size, 1)
        self.limit = max(0, limit)
        opened, self._client_scope = client_for(client)
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        most = self.limit * self.sample_batch_size
        limited = TaskSettings(max_waiting=most or None)
        # a run that goes on with another batch size or limit has another limit, or none
        implied = stream_options.pop("implied", limited)
        if may_give_rights({**implied.as_stored(), **stream_options}):
            implied = replace(implied, groups_per_version=self.sample_batch_size)
        with ExitStack() as undo:
            undo.push(self._client_scope)
            self.stream = ExperienceStream(
                opened, task, namespace=namespace, implied=implied, **stream_options
            )
            undo.pop_all()

    def __repr__(self) -> str:
        return f"<redrb.DetachedReplayBuffer of {self.sample_batch_size} on {self.stream!r}>"

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        self.close(trained=error is None)

    def append(self, experience: Experience, *, timeout: float | None = None) -> None:
        """Split a batch into its samples and store them.

        Args:
            experience: B samples.
            timeout: Seconds to wait for room; None waits for ever, and logs the wait.

        Raises:
            RecordError, EncodeError: The batch is malformed; nothing was stored.
            StoreFull: There was no room in time.
            StoreUnavailable: Redis could not be reached.
        """
        self.stream.put(experience, timeout=timeout)

    def extend(self, items: Sequence[BufferItem], *, timeout: float | None = None) -> None:
        """Store samples, each as a group of one, as `append` does."""
        self.stream.put_many([[item] for item in items], timeout=timeout)

    def sample(
        self,
        worker_rank: int = 0,
        to_device: str | torch.device = "cpu",
        *,
        timeout: float | None = None,
    ) -> Experience:
        """Wait for a full batch and lease it.

        The same request acknowledges this worker's previous batch, because a loop samples again
        only after it has trained that batch.

        Args:
            worker_rank: Number of the thread or loop that samples, if several share this object.
            to_device: Device of the batch.
            timeout: Seconds to wait; None waits for ever, and logs what is missing.

        Raises:
            BatchTimeout: Fewer samples came in time; none was taken.
            LeaseLost: This process did not renew its lease in time, and another consumer has the
                previous batch now.
            RecordError: Samples do not fit into one batch. The misfits are among the dead letters,
                the others were requeued.
            StoreUnavailable: Redis could not be reached; the previous batch stays leased, and the
                next `sample` acknowledges it.
        """
        with self._lock:
            previous = self._leases.pop(worker_rank, None)
        try:
            lease = self.stream.take(self.sample_batch_size, timeout=timeout, ack=previous)
        except BaseException:
            if previous:  # it may not be acknowledged yet
                with self._lock:
                    self._leases.setdefault(worker_rank, previous)
            raise
        try:
            batch = lease.batch(to_device)
        except BaseException as error:
            lease.__exit__(type(error), error, error.__traceback__)
            raise
        with self._lock:
            self._leases[worker_rank] = lease
        return batch

    def get_length(self) -> int:
        """Return the number of full batches that wait."""
        return len(self.stream) // self.sample_batch_size

    def clear(self) -> None:
        """Delete all samples, waiting or leased."""
        with self._lock:
            leases, self._leases = self._leases, {}
        for lease in leases.values():
            with suppress(LeaseLost):  # another consumer has the batch, and loses it too
                lease.release()
        self.stream.clear()

    def close(self, *, trained: bool = True) -> None:
        """Close the stream; the last batches are acknowledged, or requeued if not `trained`."""
        with self._lock:
            leases, self._leases = self._leases, {}
        with self._client_scope:
            try:
                for lease in leases.values():
                    if trained:
                        lease.ack()
                    else:
                        lease.release()
            finally:
                self.stream.close()
