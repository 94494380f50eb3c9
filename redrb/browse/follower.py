"""`Follower`: the groups of a task as they arrive, and how many were not seen."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from redrb.browse.arrays import mean_of
from redrb.browse.arrival_reader import ArrivalReader, Arrived
from redrb.browse.limits import LIMITS, Limits
from redrb.browse.records import GroupView
from redrb.browse.samples import Samples
from redrb.connection import Client
from redrb.connection.deadline import within
from redrb.errors import DecodeError, StoreUnavailable
from redrb.stream.task.inspection import existing_task
from redrb.stream.task.numbering import Numbering

_WINDOW_S: Final = 10.0
"""Seconds over which the rate is measured."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Groups that arrived.

    Attributes:
        groups: The groups, in the order of their arrival in each partition; without samples.
        put: Groups put since the follower began.
        shown: Groups among them that were returned, these included.
        missed: Groups that were skipped because they came faster than they were taken from here,
            or that consumers had acknowledged before they were read.
        per_s: Groups put per second, over the last ten seconds.
        away: Why Redis cannot be read now; "" if it can.
        anew: Whether the task was created anew: Redis lost its data, or somebody cleared it.
    """

    groups: tuple[GroupView, ...]
    put: int
    shown: int
    missed: int
    per_s: float
    away: str = ""
    anew: bool = False


class Follower:
    """Follows the arrivals of a task without taking them, and without polling.

    One thread a partition waits for groups; it survives restarts of Redis. One thread takes from
    here.
    """

    def __init__(
        self,
        client: Client,
        task: str,
        *,
        namespace: str = "default",
        per_s: float | None = None,
        limits: Limits = LIMITS,
        timeout_s: float = 10.0,
    ) -> None:
        """Begin to follow: groups that are put from now on.

        Args:
            client: A client.
            task: Name of the task.
            namespace: Its namespace.
            per_s: Groups of each partition to read a second, at most; None: all.
            limits: How much of each group is decoded.
            timeout_s: Seconds for the first requests.

        Raises:
            UnknownTask: There is no such task.
            StoreUnavailable: Redis does not answer.
        """
        self._limits = limits
        self._closing = threading.Event()
        with within(timeout_s):
            stores = existing_task(client, task, namespace=namespace)
            self._numbering = Numbering(len(stores))
            self._reports: queue.Queue[Arrived] = queue.Queue(2 * len(stores))
            self._readers = [
                ArrivalReader(store, place, self._reports, closing=self._closing, per_s=per_s)
                for place, store in enumerate(stores)
            ]
        self._put = [0] * len(stores)
        self._unread = [0] * len(stores)
        self._away: dict[int, str] = {}
        self._shown = 0
        self._rates: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads."""
        self._closing.set()
        for reader in self._readers:
            reader.join()

    def next(self, timeout_s: float) -> Arrivals:
        """Return the next groups, or none after a time; while Redis is away, why.

        Raises:
            StoreError: Redis refused to be read.
        """
        try:
            report = self._reports.get(timeout=timeout_s)
        except queue.Empty:
            return self._arrivals(())
        if report.error is not None:
            if not isinstance(report.error, StoreUnavailable):
                raise report.error
            self._away[report.place] = str(report.error)
            return self._arrivals(())
        self._away.pop(report.place, None)
        self._put[report.place], self._unread[report.place] = report.put, report.unread
        groups = tuple(
            self._view(self._numbering.ids(report.place, [seq])[0], blob, report.version)
            for seq, blob in report.blobs
        )
        self._shown += len(groups)
        return self._arrivals(groups, anew=report.anew)

    def _arrivals(self, groups: tuple[GroupView, ...], *, anew: bool = False) -> Arrivals:
        put = sum(self._put)
        return Arrivals(
            groups=groups,
            put=put,
            shown=self._shown,
            missed=max(put - self._shown - sum(self._unread), 0),
            per_s=self._rate(put),
            away="; ".join(self._away.values()),
            anew=anew,
        )

    def _rate(self, put: int) -> float:
        now = time.monotonic()
        self._rates.append((now, put))
        while len(self._rates) > 2 and now - self._rates[1][0] > _WINDOW_S:
            self._rates.popleft()
        since, before = self._rates[0]
        return (put - before) / max(now - since, 0.001)

    def _view(self, name: int, blob: bytes, version: int | None) -> GroupView:
        """Return a group as its payload describes it."""
        if len(blob) > self._limits.group_bytes:
            note = f"it has {len(blob):,} bytes and is not decoded"
            return GroupView(id=name, state="arrived", size=len(blob), notes=(note,))
        try:
            samples = Samples(blob, self._limits)
            rewards = samples.rewards()
        except DecodeError as error:
            return GroupView(id=name, state="arrived", size=len(blob), damaged=str(error))
        oldest = samples.oldest_version
        return GroupView(
            id=name,
            state="arrived",
            status=samples.status,
            size=len(blob),
            samples_total=samples.count,
            oldest_version=oldest,
            staleness=None if None in (version, oldest) else version - oldest,  # type: ignore[operator]
            tags=samples.common_tags(),
            group_id=samples.group_id,
            rewards=rewards[: self._limits.samples],
            reward=mean_of(rewards),
        )
