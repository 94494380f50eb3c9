"""The side of a dataset that takes: one in each process that does."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from multiprocessing.util import Finalize
from typing import Any, Protocol, cast

from redrb.connection import Client
from redrb.connection.stopping import Stop, stoppable
from redrb.errors import ConfigError, RecordError, StoreError
from redrb.experience import Experience
from redrb.experience.records import Side
from redrb.stream import ExperienceStream, Lease
from redrb.stream.feeding.lease_ref import LeasedExperience, Ticket
from redrb.stream.feeding.lease_registry import Register
from redrb.stream.waiting import Wait

STAY_PRIORITY = 10
"""Before the queues of a process are closed, whose priority is below 0."""

_log = logging.getLogger("redrb")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What each batch is.

    Attributes:
        count: Groups.
        side: Where padding goes.
        timeout: Seconds to wait for a batch, and for acknowledgements at the bound.
        max_unacknowledged: Most batches of a process that are neither ended nor lost.
        take: Further keywords of `stream.take`.
    """

    count: int
    side: Side
    timeout: float | None
    max_unacknowledged: int
    take: Mapping[str, Any]


class _Slot(Protocol):
    """Where a consumer holds a lease."""

    @property
    def consumer(self) -> Any: ...
    @property
    def number(self) -> int: ...
    @property
    def token(self) -> str: ...


class Feed:
    """Takes and pads batches, and gives their leases out of hand as tickets.

    Its consumer's heartbeat holds the leases, until their tickets are ended by whoever has them.
    """

    def __init__(
        self,
        client: Client,
        stream: ExperienceStream,
        register: Register,
        wanted: Wanted,
        *,
        serves_parent: bool,
    ) -> None:
        """Begin to feed.

        Args:
            client: What is closed with it; the stream's.
            stream: Where from; it is the feed's own.
            register: Where its consumer is noted.
            wanted: What each batch is.
            serves_parent: Whether the process that started this one trains on the batches.
        """
        self._client = client
        self._stream = stream
        self._register = register
        self._wanted = wanted
        self._consumer = ""
        self._out: dict[str, tuple[str, _Slot]] = {}  # by name of the slot: token, slot
        self._stays = False
        self._stop = Stop()
        self.pid = os.getpid()
        parent = multiprocessing.parent_process() if serves_parent else None
        if parent is not None:
            threading.Thread(
                target=_end_with,
                args=(parent.sentinel, weakref.WeakMethod(self.orphaned)),
                name="redrb-parent",
                daemon=True,
            ).start()

    def next(self, *, alone: bool) -> LeasedExperience | None:
        """Return the next batch; None when the dataset was closed.

        Args:
            alone: Whether nobody can end a ticket while this waits.

        Raises:
            BatchTimeout: No full batch came in time.
            ConfigError: Too many batches are not acknowledged.
        """
        with stoppable(self._stop):
            self._wait_for_ends(alone=alone)
            while not self._stop.asked:
                lease = self._stream.take(
                    self._wanted.count, timeout=self._wanted.timeout, **self._wanted.take
                )
                slot = cast("_Slot", lease.parts[0].holder)
                if not self._consumer:
                    self._consumer = slot.consumer.name
                    self._register.enter(self._consumer)
                if not self._look():
                    lease.release()
                    break
                batch = self._decoded(lease)
                if batch is not None:
                    return self._handed_out(batch, lease, slot)
            return None

    def stay(self) -> None:
        """Let this process end only when what was handed out is ended: its heartbeat holds it.

        Of processes that multiprocessing has started. A DataLoader waits for its workers for five
        seconds, and then ends them all the same.
        """
        if not self._stays:
            self._stays = True
            Finalize(None, self._linger, exitpriority=STAY_PRIORITY)

    def _linger(self) -> None:
        wait = Wait(None)
        with stoppable(self._stop), suppress(StoreError):
            while self._out and self._look() and self._out and not wait.over:
                wait.tell(f"{len(self._out)} batches of a dataset are not acknowledged")
                self._register.wait_for_an_end(self._consumer, wait.slice_s())

    def orphaned(self) -> None:
        """Give everything back: the process that trains has died."""
        self._stop.ask()
        _log.warning("the process that trains is gone: its batches go back")
        self.close()

    def close(self) -> None:
        """Give back what was handed out and not ended, and end."""
        if self.pid == os.getpid():
            self._stop.ask()
            try:
                self._stream.close()
            except StoreError as error:
                _log.warning("batches of a dataset go back later, by themselves: %s", error)
            self._client.close()

    def _decoded(self, lease: Lease) -> Experience | None:
        """Return the padded batch; None when its samples fit into none."""
        try:
            with ExitStack() as scope:
                scope.push(lease)  # where decoding fails it ends as in `with lease`
                batch = lease.batch(side=self._wanted.side)
                scope.pop_all()
                return batch
        except RecordError as error:
            _log.error("task %r: %s", self._stream.task, error)
            return None

    def _handed_out(self, batch: Experience, lease: Lease, slot: _Slot) -> LeasedExperience:
        name = f"{self._consumer}/{slot.number}"
        ticket = Ticket(self._consumer, name, slot.token, lease.ids, lease.samples)
        lease.parts[0].conclude(held=True)  # from here on it ends by its ticket
        self._out[name] = (slot.token, slot)
        return LeasedExperience(**vars(batch), ticket=ticket)

    def _look(self) -> bool:
        """Forget the leases that are ended; returns False when the dataset is closed."""
        going_on, closed = self._register.look(
            [(name, token) for name, (token, _) in self._out.items()]
        )
        over = [name for name, held in zip(self._out, going_on, strict=True) if not held]
        for name in over:
            _, slot = self._out.pop(name)
            slot.consumer.free(slot.number)
        return not closed

    def _wait_for_ends(self, *, alone: bool) -> None:
        """Wait while too many batches are neither acknowledged, rejected nor released."""
        most, wait = self._wanted.max_unacknowledged, Wait(self._wanted.timeout)
        if len(self._out) < most:
            return
        missing = (
            f"task {self._stream.task!r}: {most} batches of a dataset are not acknowledged: call "
            "dataset.ack(batch) after its step, or raise max_unacknowledged"
        )
        while self._look() and len(self._out) >= most:
            if alone or wait.over:
                raise ConfigError(f"{missing}.")
            wait.tell(missing)
            self._register.wait_for_an_end(self._consumer, wait.slice_s())


def _end_with(sentinel: int, orphaned: weakref.WeakMethod[Any]) -> None:
    """Wait until a process ends, and tell."""
    wait_for([sentinel])
    told = orphaned()
    if told is not None:
        told()
