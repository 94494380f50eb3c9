"""`DetachedReplayBuffer`: ColossalAI's buffer between makers and one trainer, in Redis."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch

from redrb.checks import checked_int
from redrb.connection import Client
from redrb.errors import ConfigError, LeaseLost
from redrb.experience import BufferItem, Experience
from redrb.runtime.client import client_for
from redrb.stream import ExperienceStream, Lease


class DetachedReplayBuffer:
    """Collects samples from any number of makers into full batches for a trainer.

    Source: `coati.ray.detached_replay_buffer`. There it is a queue inside one Ray actor; here it is
    the stream of `task`, which every process may open under that name, and which outlives them all.
    Safe among threads. Samples are put exactly once and delivered at least once: what `sample`
    returned is acknowledged when the same worker samples again, or by `close`.

    Example:
        >>> buffer = DetachedReplayBuffer(sample_batch_size=8, limit=16)
        >>> buffer.append(experience)
        >>> batch = buffer.sample(to_device="cuda:0")

    Attributes:
        stream: The task's stream, with all that `ExperienceStream` offers.
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
            limit: Most batches waiting or being trained; producers wait then. <= 0: no limit.
            client: What `redrb.connect` returned, or a URL; default: REDRB_URL.
            task: Name of the task.
            namespace: Keeps experiments on one server apart.
            stream_options: Further options of `ExperienceStream`, such as `order="stalest"`.

        Raises:
            ConfigError: A number or name is not usable.
            TaskMismatch: The task exists with other settings.
            StoreUnavailable: Redis could not be reached.
        """
        if type(limit) is not int:
            raise ConfigError(f"limit={limit!r}: it is a number of batches; 0 is no limit.")
        self.sample_batch_size = checked_int("sample_batch_size", sample_batch_size, 1)
        self.limit = max(0, limit)
        self._client, self._owned = client_for(client)
        self._lock = threading.Lock()
        self._held: dict[int, Lease] = {}
        if self.limit:
            stream_options.setdefault("limit", self.limit * self.sample_batch_size)
        try:
            self.stream = ExperienceStream(
                self._client, task, namespace=namespace, **stream_options
            )
        except BaseException:
            self._owned.__exit__(None, None, None)
            raise

    def __repr__(self) -> str:
        return f"<redrb.DetachedReplayBuffer of {self.sample_batch_size} on {self.stream!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(trained=error is None)

    def append(self, experience: Experience, *, timeout: float | None = None) -> None:
        """Split a batch into its samples and store them.

        Args:
            experience: B samples.
            timeout: Seconds to wait for room; None waits for ever, and logs what it waits for.

        Raises:
            RecordError, EncodeError: It is malformed; nothing was stored.
            StoreFull: There was no room in time.
            StoreUnavailable: Redis stayed away.
        """
        self.stream.put(experience, timeout=timeout)

    def extend(self, items: Sequence[BufferItem], *, timeout: float | None = None) -> None:
        """Store samples; every `sample_batch_size` of them are a batch.

        Args and errors are those of `append`.
        """
        self.stream.put_many([[item] for item in items], timeout=timeout)

    def sample(
        self,
        worker_rank: int = 0,
        to_device: str | torch.device = "cpu",
        *,
        timeout: float | None = None,
    ) -> Experience:
        """Wait for a full batch and return it; no one else gets it.

        The batch that this worker sampled before is acknowledged in the same request: the loop
        came back, so it is trained.

        Args:
            worker_rank: Which of the threads or loops that share this object samples.
            to_device: Where the batch is needed.
            timeout: Seconds to wait; None waits for ever, and logs what is missing.

        Raises:
            BatchTimeout: Fewer samples came in time; none was taken.
            LeaseLost: This process was silent for longer than its lease, and another consumer has
                the batch before by now.
            RecordError: Samples do not fit into one batch. Those that differ from most are among
                the dead letters, the others went back.
            StoreUnavailable: Redis stayed away; the batch before stays this worker's, and is
                acknowledged when it samples again.
        """
        with self._lock:
            before = self._held.pop(worker_rank, None)
        try:
            lease = self.stream.take(self.sample_batch_size, timeout=timeout, ack=before)
        except BaseException:
            if before:  # it may not be acknowledged yet
                with self._lock:
                    self._held.setdefault(worker_rank, before)
            raise
        try:
            batch = lease.batch(to_device)
        except BaseException as error:
            lease.__exit__(type(error), error, error.__traceback__)
            raise
        with self._lock:
            self._held[worker_rank] = lease
        return batch

    def get_length(self) -> int:
        """Return the number of full batches that wait."""
        return len(self.stream) // self.sample_batch_size

    def clear(self) -> None:
        """Delete everything that waits or is being trained."""
        with self._lock:
            held, self._held = self._held, {}
        for lease in held.values():
            with suppress(LeaseLost):  # another consumer has it, and loses it too
                lease.release()
        self.stream.clear()

    def close(self, *, trained: bool = True) -> None:
        """End: what was sampled last is acknowledged, or given back where it was not `trained`."""
        with self._lock:
            held, self._held = self._held, {}
        with self._owned:
            try:
                for lease in held.values():
                    if trained:
                        lease.ack()
                    else:
                        lease.release()
            finally:
                self.stream.close()
