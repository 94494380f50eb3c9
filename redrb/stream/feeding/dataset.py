"""`ExperienceDataset`: an `ExperienceLoader` for training loops over a `DataLoader`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

from torch.utils.data import IterableDataset, get_worker_info

from redrb.checks import checked_int, checked_int_or_none
from redrb.errors import ConfigError, LeaseLost, RecordError
from redrb.experience import Experience
from redrb.stream import ExperienceStream, Lease
from redrb.stream.feeding.loader import ExperienceLoader

_log = logging.getLogger("redrb")

_WORKERS = (
    "an ExperienceDataset reads in the process that trains: use DataLoader(dataset, "
    "batch_size=None, num_workers=0). Its thread takes and decodes batches ahead."
)


@dataclass(eq=False)
class LeasedExperience(Experience):
    """A batch with its lease.

    Attributes:
        lease: The lease on the groups of the batch; end it after the step.
    """

    lease: Lease | None = None


class ExperienceDataset(IterableDataset[LeasedExperience]):
    """Padded batches of a task for torch's `DataLoader`, taken ahead by a thread.

    Each batch is ended after its step, with `ack`, `release` or `reject`: frameworks may ask a
    `DataLoader` for the next batch before they train on the last one, so asking for a batch
    acknowledges nothing. Batches that were taken ahead are requeued as soon as a loop is over,
    batches that were not ended when the dataset is closed, both unharmed; when the process dies,
    all of them are requeued after `lease_ms`, as a failed delivery.

    Example:
        >>> with ExperienceDataset(stream, 32, steps=1000) as dataset:
        ...     for batch in DataLoader(dataset, batch_size=None):
        ...         train(batch)
        ...         dataset.ack(batch)
    """

    def __init__(
        self,
        stream: ExperienceStream,
        batch_size: int,
        *,
        steps: int | None = None,
        max_unacknowledged: int = 16,
        **options: Any,
    ) -> None:
        """Describe the batches; a thread takes them from the first `for` on.

        Args:
            stream: Where from; close it after the dataset.
            batch_size: Groups in a batch.
            steps: Batches of a loop; None: it goes on until a batch does not come in time.
            max_unacknowledged: Most batches that were given and not ended; it exceeds the number
                that is kept until a checkpoint.
            options: Further options of `ExperienceLoader`, such as `prefetch`, `side`, `timeout`,
                `where` and `device`.

        Raises:
            ConfigError: An argument cannot be used.
        """
        super().__init__()
        self._loader = ExperienceLoader(
            stream, batch_size, steps=steps, acknowledge=False, **options
        )
        self._steps = checked_int_or_none("steps", steps)
        self._most = checked_int("max_unacknowledged", max_unacknowledged, 1)
        self._task = stream.task
        self._pid = os.getpid()
        self._given: list[Lease] = []

    def __reduce__(self) -> NoReturn:
        """Refuse to be sent to a worker process."""
        raise ConfigError(_WORKERS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[LeasedExperience]:
        """Yield batches. Groups that fit into no batch are rejected and logged, and it goes on.

        Raises:
            BatchTimeout: No full batch came in time.
            ConfigError: `max_unacknowledged` batches are not ended, or this is a worker process.
        """
        if get_worker_info() is not None:
            raise ConfigError(_WORKERS)
        number = 0
        while self._steps is None or number < self._steps:
            try:
                for batch in self._loader:
                    number += 1
                    yield self._leased(batch)
                    if number == self._steps:
                        break
                    self._check_bound()
                return
            except RecordError as error:
                _log.error("task %r: %s", self._task, error)

    def ack(self, batch: LeasedExperience) -> None:
        """Acknowledge a batch as trained; see `Lease.ack`.

        Raises:
            LeaseLost: Another consumer has taken it over, or it was ended already.
            StoreUnavailable: Redis stayed away.
        """
        _lease_of(batch).ack()

    def release(self, batch: LeasedExperience) -> None:
        """Requeue a batch unharmed; raises as `ack` does."""
        _lease_of(batch).release()

    def reject(self, batch: LeasedExperience, reason: str | BaseException) -> None:
        """Move the groups of a batch to the dead letters; as `Lease.reject`, raises as `ack`."""
        _lease_of(batch).reject(reason)

    def close(self) -> None:
        """Requeue, unharmed, all batches that were not ended. Closing twice does no harm."""
        if self._pid != os.getpid():
            return  # a forked process: the leases belong to its parent
        self._loader.close()
        for lease in filter(None, self._given):
            with suppress(LeaseLost):
                lease.release()
        self._given.clear()

    def _leased(self, batch: Experience) -> LeasedExperience:
        lease = self._loader.lease
        if lease is not None:
            self._given.append(lease)
        return LeasedExperience(**vars(batch), lease=lease)

    def _check_bound(self) -> None:
        self._given = [lease for lease in self._given if lease]
        if len(self._given) >= self._most:
            raise ConfigError(
                f"task {self._task!r}: {self._most} batches of a dataset are not acknowledged: "
                "call dataset.ack(batch) after its step, or raise max_unacknowledged."
            )


def _lease_of(batch: object) -> Lease:
    if not isinstance(batch, LeasedExperience) or batch.lease is None:
        raise ConfigError(f"a {type(batch).__name__} is no batch of an ExperienceDataset.")
    return batch.lease
