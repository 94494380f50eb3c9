"""Makers: each way to put, with a journal of the groups that are stored, refused or unknown."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from redrb import BufferItem, ExperienceSender, ExperienceStream
from redrb.connection import Client
from redrb.errors import ConfigError, OutcomeUnknown, RedrbError, SendFailed, StoreUnavailable
from tests.chaos import options, payload, tasks
from tests.chaos.options import Place
from tests.chaos.worker import Worker

TIMEOUTS_S = (1.0, 3.0, 6.0)
MOST_UNCERTAIN = 32
"""Groups of a `put_many` that an uncertain error is about."""


class Maker(Worker):
    """Names groups; `task` is where they go."""

    part = "makers"
    task = tasks.FLOW

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, place)
        self._made = 0

    def open(self, client: Client) -> None:
        self._stream: ExperienceStream = self.stream(client, self.task)

    def close(self) -> None:
        self._stream.close()

    def new_names(self, count: int) -> list[str]:
        first, self._made = self._made, self._made + count
        return [f"{self.name}#{number}" for number in range(first, first + count)]

    def timeout(self) -> float:
        return self.dice.choice(TIMEOUTS_S)


class Putter(Maker):
    """Puts group after group."""

    def step(self) -> None:
        self.pause(self.dice.uniform(0, 0.06))
        names, timeout = self.new_names(1), self.timeout()
        with self.journal.call("put", timeout, groups=names) as outcome:
            try:
                self._stream.put(payload.group(names[0]), timeout=timeout)
            except RedrbError as error:
                outcome |= fate(names, error)
                raise
            outcome["stored"] = names


class ManyPutter(Maker):
    """Puts several groups at a time."""

    counts: Sequence[int] = (2, 7, 40)

    def make(self, name: str) -> list[BufferItem]:
        """Return the group of a name."""
        return payload.group(name)

    def step(self) -> None:
        self.pause(self.dice.uniform(0, 0.4))
        names, timeout = self.new_names(self.dice.choice(self.counts)), self.timeout()
        with self.journal.call("put_many", timeout, groups=names) as outcome:
            try:
                self._stream.put_many([self.make(name) for name in names], timeout=timeout)
            except RedrbError as error:
                outcome |= fate(names, error)
                raise
            outcome["stored"] = names


class StepsPutter(ManyPutter):
    """Puts the groups that ranks train."""

    task = tasks.STEPS


class Fills(ManyPutter):
    """Puts the groups that hoarders hold: 1 to 600 bytes, and a few of 4 MiB."""

    task = tasks.HELD
    counts = (1, 20, 200, 500)

    def make(self, name: str) -> list[BufferItem]:
        return [payload.sized(name)]


class Writes(Maker):
    """Puts through a writer: each call says which of the groups before are stored."""

    def open(self, client: Client) -> None:
        super().open(client)
        self._writer = self._stream.writer()
        self._sent: deque[str] = deque()

    def step(self) -> None:
        self.pause(self.dice.uniform(0, 0.06))
        [name], timeout = self.new_names(1), self.timeout()
        with self.journal.call("writer.put", timeout, groups=[name]) as outcome:
            try:
                ids = self._writer.put(payload.group(name), timeout=timeout)
            except (ConfigError, OutcomeUnknown):
                self._sent.clear()
                raise
            except RedrbError:
                outcome["refused"] = [name]
                raise
            self._sent.append(name)
            outcome["stored"] = self._stored(len(ids))

    def close(self) -> None:
        with self.journal.call("writer.flush", options.RETRY_S) as outcome:
            outcome["stored"] = self._stored(len(self._writer.flush(timeout=options.RETRY_S)))
        super().close()

    def _stored(self, count: int) -> list[str]:
        return [self._sent.popleft() for _ in range(count)]


class Sends(Maker):
    """Puts through a sender: a flush says that all groups before are stored."""

    def open(self, client: Client) -> None:
        super().open(client)
        self._sender = ExperienceSender(self._stream, max_groups=64, timeout=options.RETRY_S)
        self._sent: list[str] = []

    def step(self) -> None:
        for _ in range(self.dice.randint(1, 20)):
            self.pause(self.dice.uniform(0, 0.06))
            [name], timeout = self.new_names(1), self.timeout()
            with self.journal.call("send", timeout, groups=[name]) as outcome:
                try:
                    self._sender.send(payload.group(name), timeout=timeout)
                except RedrbError as error:
                    outcome |= {"refused": [name], "dropped": dropped(error)}
                    raise
                self._sent.append(name)
        self._flush(self.timeout())

    def close(self) -> None:
        try:
            self._flush(options.RETRY_S)
        finally:
            with self.journal.call("sender.close", options.RETRY_S):
                self._sender.close(timeout=options.RETRY_S)
            super().close()

    def _flush(self, timeout: float) -> None:
        with self.journal.call("sender.flush", timeout) as outcome:
            try:
                self._sender.flush(timeout=timeout)
            except SendFailed as error:
                outcome["dropped"] = dropped(error)
                raise
            outcome["stored"], self._sent = self._sent, []


def dropped(error: RedrbError) -> int:
    """Return how many groups a sender gave up."""
    return error.dropped if isinstance(error, SendFailed) else 0


def fate(names: list[str], error: RedrbError) -> dict[str, Any]:
    """Return which groups of a put that failed are stored, and which are not."""
    stored, unknown = error.stored, 0
    if isinstance(error, StoreUnavailable) and error.uncertain:
        unknown = MOST_UNCERTAIN
    if isinstance(error, OutcomeUnknown):
        unknown = error.groups
    return {"stored": names[:stored], "refused": names[stored + unknown :]}
