"""Consumers that hold many leases and large ones, and one that takes over what they have left."""

from __future__ import annotations

import time
from dataclasses import dataclass

from redrb import Lease
from redrb.connection import Client
from redrb.errors import StoreUnavailable
from tests.chaos import options, payload, tasks
from tests.chaos.trainers import Trainer

_STYLES = (
    (200, (1, 2, 5, 20)),
    (60, (1, 3, 51, 120)),
    (8, (51, 200, 500)),
    (1, (500,)),
)
"""Most leases that are held, and groups of a take."""

_ENDINGS = {"ack": 24, "release": 2, "fail": 2, "reject": 1}
_STEP_S = 0.02


@dataclass(frozen=True)
class _Held:
    """A lease, and the names of its groups by their ids."""

    lease: Lease
    names: dict[int, str]


class Hoards(Trainer):
    """Holds up to 200 leases of up to 500 groups, and ends them in any order, whole or in part.

    Now and then it closes its stream and opens it again. When it is asked to end it closes the
    stream too, with all leases that it holds.
    """

    part = "hoarders"
    task = tasks.HELD
    struck = 4

    def open(self, client: Client) -> None:
        super().open(client)
        self._client = client
        self._closed = False
        self._held: list[_Held] = []
        self._stepped = time.monotonic()
        self._choose()

    def step(self) -> None:
        before, self._stepped = self._stepped, time.monotonic()
        if self._held and self._stepped - before > options.LEASE_MS / 1000:
            self._go_on()
        if self._closed or self.dice.random() < 0.003:
            self._reopen()
        if self.dice.random() < 0.01:
            self._choose()
        self.pause(self.dice.uniform(0, _STEP_S))
        if not self._held or (len(self._held) < self._most and self.dice.random() < 0.75):
            self._take()
        else:
            self._finish(self._held.pop(self.dice.randrange(len(self._held))))

    def _choose(self) -> None:
        self._most, self._sizes = self.dice.choice(_STYLES)

    def _take(self) -> None:
        timeout = self.dice.choice((0.0, 0.0, 0.5))
        with self.journal.call("take", timeout) as outcome:
            lease = self._stream.take(self.dice.choice(self._sizes), timeout=timeout, at_least=1)
            outcome["delivered"], outcome["torn"] = payload.names_of(lease.groups())
        names = dict(zip(lease.ids, outcome["delivered"], strict=True))
        self._held.append(_Held(lease, names))

    def _go_on(self) -> None:
        """Acknowledge the largest lease, as a trainer does that was stopped during its step."""
        largest = max(self._held, key=lambda held: len(held.lease.ids))
        self._held.remove(largest)
        self._end_groups(largest, "ack", list(largest.lease.ids))

    def _finish(self, held: _Held) -> None:
        """End some groups of a lease, or all; it is kept if groups are left, or no reply came."""
        ids = list(held.lease.ids)
        if self.dice.random() < 0.4:
            ids = self.dice.sample(ids, self.dice.randint(1, len(ids)))
        ending = self.dice.choices(list(_ENDINGS), list(_ENDINGS.values()))[0]
        self._end_groups(held, ending, ids)

    def _end_groups(self, held: _Held, ending: str, ids: list[int]) -> None:
        lease, names = held.lease, [held.names[each] for each in ids]
        said = {"ack": {"acking": names}, "reject": {"rejecting": names}}.get(ending, {})
        try:
            with self.journal.call(ending, options.RETRY_S, **said) as outcome:
                if ending == "ack":
                    lease.ack(ids)
                    outcome["acked"] = names
                elif ending == "release":
                    lease.release(ids)
                else:
                    getattr(lease, ending)("chaos", ids)
        except StoreUnavailable:
            self._held.append(held)
            raise
        if lease:
            self._held.append(held)

    def _reopen(self) -> None:
        """Close the stream with its leases, and open it again."""
        if not self._closed:
            held, self._held, self._closed = self._held, [], True
            with self.journal.call("close", options.RETRY_S, leases=len(held)):
                self._stream.close()
        self._stream = self.stream(self._client, self.task)
        self._closed = False


class Inherits(Trainer):
    """Takes and acknowledges all that hoarders which ended, or were killed, have left."""

    task = tasks.HELD

    def step(self) -> None:
        with self.journal.call("take", 1.0) as outcome:
            lease = self._stream.take(500, timeout=1.0, at_least=1)
            outcome["delivered"], outcome["torn"] = payload.names_of(lease.groups())
        names = outcome["delivered"]
        with self.journal.call("ack", options.RETRY_S, acking=names) as outcome:
            lease.ack()
            outcome["acked"] = names
