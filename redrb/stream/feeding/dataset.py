"""`ExperienceDataset`: experience for torch's DataLoader."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from torch.utils.data import IterableDataset, get_worker_info

from redrb.checks import checked_int, checked_int_or_none, checked_timeout
from redrb.connection import Client, connect
from redrb.errors import BatchTimeout, ConfigError, LeaseLost
from redrb.experience import Status
from redrb.experience.padding import check_side
from redrb.experience.records import Side
from redrb.keys import check_name
from redrb.stream import ExperienceStream
from redrb.stream.arguments import AnyStatus, checked_least, checked_status
from redrb.stream.feeding.feed import Feed, Wanted
from redrb.stream.feeding.lease_ref import LeasedExperience, Ticket
from redrb.stream.feeding.lease_registry import Register
from redrb.stream.feeding.worker_errors import tellable
from redrb.stream.take.scripts import Outcome


class ExperienceDataset(IterableDataset[LeasedExperience]):
    """Padded batches of a task, taken and decoded in the worker processes of a DataLoader.

    Each worker has a connection and a consumer of its own, whose heartbeat holds what it took; the
    main process ends each batch after its step, with `ack`, `release` or `reject`. A batch that
    was not ended goes back: at once and unharmed by `close`, or when the main process dies;
    after `lease_ms`, as a failed delivery, when its worker has ended or died, as workers do with
    their DataLoader. A batch that is still trained on then is lost, and its `ack` raises LeaseLost.

    Example:
        >>> with ExperienceDataset(client, "math", 32, lease_ms=120_000) as dataset:
        ...     for batch in DataLoader(dataset, batch_size=None, num_workers=2):
        ...         train(batch)
        ...         dataset.ack(batch)
    """

    def __init__(
        self,
        source: str | Client,
        task: str,
        batch_size: int,
        *,
        namespace: str = "default",
        group: str = "default",
        steps: int | None = None,
        side: Side = "left",
        timeout: float | None = None,
        at_least: int | None = None,
        status: AnyStatus = Status.COMPLETED,
        where: Mapping[str, Any] | None = None,
        max_unacknowledged: int = 16,
        **options: Any,
    ) -> None:
        """Describe the batches; nothing is opened before they are asked for.

        Args:
            source: A URL, or a client, of whose server other processes learn the URL. A pickle of
                the dataset holds it, with the password.
            task: Name of the task.
            batch_size: Groups in a batch.
            namespace, group: As for `ExperienceStream`.
            steps: Batches of one loop, divided among the workers; None: no end.
            side: Where padding goes.
            timeout: Seconds that a worker waits for a batch; None waits for ever, and logs every
                half minute what is missing.
            at_least, status, where: As for `stream.take`.
            max_unacknowledged: Most batches of a worker that are not ended: at this bound it waits
                and says so. It exceeds the DataLoader's `prefetch_factor` and what is kept until a
                checkpoint.
            options: Further options of `ExperienceStream`, such as `lease_ms`.

        Raises:
            ConfigError: An argument cannot be used, or the URL starts a server for each process.
        """
        super().__init__()
        url = source.url if isinstance(source, Client) else source
        if not isinstance(url, str):
            raise ConfigError(f"a {type(source).__name__} is no URL and no redrb.Client.")
        self._scheme = url.partition("://")[0]
        if self._scheme == "embedded":
            raise ConfigError(
                "each process would start a server of its own: give the dataset the client that "
                "redrb.connect('embedded://') returns."
            )
        count, least = checked_least(batch_size, at_least)
        self._url = url
        self._client = source if isinstance(source, Client) else None
        self._retry_s = source.retry_s if isinstance(source, Client) else 60.0
        self._task = check_name("task", task)
        self._namespace = check_name("namespace", namespace)
        self._group = check_name("consumer group", group)
        self._steps = checked_int_or_none("steps", steps, 0)
        self._wanted = Wanted(
            count,
            check_side(side),
            checked_timeout(timeout),
            checked_int("max_unacknowledged", max_unacknowledged, 1),
            {"at_least": least, "status": checked_status(status), "where": where},
        )
        self._options = options
        self._name = uuid.uuid4().hex
        self._pid = os.getpid()
        self._closed = False
        self._feed: Feed | None = None
        self._register: Register | None = None
        self._connected: Client | None = None

    def __repr__(self) -> str:
        return f"<redrb.ExperienceDataset {self._namespace}:{self._task}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: never a connection."""
        own = ("_client", "_feed", "_register", "_connected")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_process()

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
        """Yield batches; in a worker of a DataLoader, those of this worker.

        Raises:
            BatchTimeout: No full batch came in time.
            ConfigError: `max_unacknowledged` batches are not ended, and nobody ends them in time.
        """
        worker = get_worker_info()
        if worker is None:
            yield from self._batches(self._steps, alone=True)
            return
        if self._scheme == "fake":
            raise ConfigError(
                "a fake server lives in one process: use num_workers=0, or a real server."
            )
        steps, workers = self._steps, worker.num_workers
        own = None if steps is None else len(range(worker.id, steps, workers))
        with tellable():
            try:
                yield from self._batches(own, alone=False)
            except BatchTimeout:
                self._feed_here().stay()
                raise
            self._feed_here().stay()

    def ack(self, batch: LeasedExperience | Ticket) -> None:
        """Say that a batch is trained; see `Lease.ack`. Safe to repeat when Redis was away.

        Raises:
            LeaseLost: Others have it by now, or it was ended already.
            StoreUnavailable: Redis stayed away.
        """
        self._end(batch, "ack")

    def release(self, batch: LeasedExperience | Ticket) -> None:
        """Give a batch back unharmed; raises as `ack` does."""
        self._end(batch, "release")

    def reject(self, batch: LeasedExperience | Ticket, reason: str) -> None:
        """Move the groups of a batch to the dead letters, with the reason; raises as `ack` does."""
        self._end(batch, "reject", reason)

    def close(self) -> None:
        """Give back everything that workers of this dataset took and that was not ended.

        For the process that made it, after its DataLoader; a batch cannot be ended from then on,
        and workers that live take no more. Closing twice does no harm.
        """
        if self._pid != os.getpid() or self._closed or get_worker_info() is not None:
            return
        try:
            self._registered().close()
            if self._feed is not None:
                self._feed.close()
        finally:
            self._closed = True
            self._feed = None
            if self._connected is not None:
                self._connected.close()

    def _batches(self, steps: int | None, *, alone: bool) -> Iterator[LeasedExperience]:
        feed = self._feed_here()
        number = 0
        while steps is None or number < steps:
            batch = feed.next(alone=alone)
            if batch is None:
                return
            yield batch
            number += 1

    def _end(self, batch: object, outcome: Outcome, reason: str = "") -> None:
        ticket = batch.ticket if isinstance(batch, LeasedExperience) else batch
        if ticket is None:
            raise LeaseLost(task=self._task, ids=(), why="it was ended already.")
        if not isinstance(ticket, Ticket):
            raise ConfigError(f"a {type(batch).__name__} is no batch of an ExperienceDataset.")
        try:
            self._registered().end(ticket, outcome, reason)
        except LeaseLost:
            _spend(batch)
            raise
        _spend(batch)

    def _feed_here(self) -> Feed:
        """Return what takes in this process; a fork makes its own."""
        self._check_process()
        if self._feed is None:
            client = self._connect()
            stream = ExperienceStream(
                client, self._task, namespace=self._namespace, group=self._group, **self._options
            )
            register, in_worker = self._register_on(client), get_worker_info() is not None
            self._feed = Feed(client, stream, register, self._wanted, serves_parent=in_worker)
        return self._feed

    def _registered(self) -> Register:
        """Return what ends leases, on a connection of this process."""
        self._check_process()
        if self._register is None:
            if self._client is None:
                self._connected = self._connect()
            self._register = self._register_on(self._client or self._connected)
        return self._register

    def _register_on(self, client: Client | None) -> Register:
        if client is None:
            raise ConfigError("the dataset is closed.")
        return Register(client, self._namespace, self._task, self._group, self._name)

    def _connect(self) -> Client:
        return connect(self._url, retry_s=self._retry_s)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._forget_process()
        if self._closed:
            raise ConfigError("the dataset is closed.")

    def _forget_process(self) -> None:
        """Hold nothing that belongs to another process."""
        self._pid = os.getpid()
        self._client = self._feed = self._register = self._connected = None


def _spend(batch: object) -> None:
    if isinstance(batch, LeasedExperience):
        batch.ticket = None
