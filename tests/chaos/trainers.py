"""Trainers: each way to take, with a journal of what was delivered and what is acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redrb import BatchTimeout, Experience, ExperienceLoader, ExperienceStream, Lease, LeaseLost
from redrb.connection import Client
from redrb.errors import ConfigError, RankLost, WrongStep
from tests.chaos import options, payload, tasks
from tests.chaos.checkpoint import Checkpoint
from tests.chaos.options import Place
from tests.chaos.worker import EXPECTED, Worker

TAKE_S = 2.0
STEP_S = 0.08
BATCH = 16
STEPS = (16, 16, 200)
"""Groups of steps of ranks, at most, one after the other."""
ENDINGS = ("ack", "release", "reject")


class Trainer(Worker):
    """Takes batches, which last a moment, and ends them."""

    task = tasks.FLOW

    def open(self, client: Client) -> None:
        self._stream: ExperienceStream = self.stream(client, self.task)

    def close(self) -> None:
        self._stream.close()

    def train(self) -> None:
        """Last as long as a training step; now and then longer than a lease."""
        self.pause(self.dice.uniform(0, STEP_S))
        if self.dice.random() < 0.01:
            self.pause(options.LEASE_MS / 1000 * 1.5)


class Takes(Trainer):
    """Takes batch after batch; acknowledges most of them, and releases or rejects some."""

    def step(self) -> None:
        timeout = self.dice.choice((0.0, 0.5, TAKE_S))
        with self.journal.call("take", timeout) as outcome:
            lease = self._stream.take(BATCH, timeout=timeout, at_least=1)
            outcome["delivered"], outcome["torn"] = names = payload.names_of(lease.groups())
        self.train()
        ending = self.dice.choices(ENDINGS, (50, 2, 8))[0]
        if ending == "ack":
            with self.journal.call("ack", options.RETRY_S, acking=names[0]) as outcome:
                lease.ack()
                outcome["acked"] = names[0]
        elif ending == "release":
            with self.journal.call("release", options.RETRY_S):
                lease.release()
        else:
            with self.journal.call("reject", options.RETRY_S, rejecting=names[0][:1]):
                lease.reject("chaos", lease.ids[:1])
            with self.journal.call("release", options.RETRY_S):
                if lease:
                    lease.release()


class Loops(Trainer):
    """Takes through `leases`, which acknowledges a batch while the next one is on its way.

    The loop's third batch says that the first one is acknowledged.
    """

    _last: list[list[str]]
    _lease: Lease | None

    def open(self, client: Client) -> None:
        super().open(client)
        self._begin()

    def step(self) -> None:
        confirmed = self._last[:1] if len(self._last) == 2 else []
        acking = self._last[-1] if self._last else []
        try:
            with self.journal.call("leases.next", TAKE_S, acking=acking) as outcome:
                lease = next(self._loop)
                outcome["delivered"], outcome["torn"] = payload.names_of(lease.groups())
                outcome["acked"] = confirmed[0] if confirmed else []
        except EXPECTED:
            self._loop.close()
            self._begin()
            raise
        self._lease = lease
        self._last = [*self._last[-1:], outcome["delivered"]]
        self.train()

    def close(self) -> None:
        if self._lease:
            with self.journal.call("ack", options.RETRY_S, acking=self._last[-1]) as outcome:
                self._lease.ack()
                outcome["acked"] = self._last[-1]
        self._loop.close()
        super().close()

    def _begin(self) -> None:
        self._loop = self._stream.leases(BATCH, timeout=TAKE_S, at_least=1)
        self._last = []
        self._lease = None


class Loads(Trainer):
    """Takes through a loader, which prefetches batches; the next one acknowledges the last."""

    def open(self, client: Client) -> None:
        super().open(client)
        self._loader = ExperienceLoader(self._stream, BATCH, timeout=TAKE_S, at_least=1)
        self._loop: Iterator[Experience] | None = None
        self._last: list[str] = []

    def step(self) -> None:
        last, self._last = self._last, []
        try:
            with self.journal.call("loader.next", TAKE_S + options.RETRY_S, acking=last) as outcome:
                try:
                    self._loop = self._loop or iter(self._loader)
                    batch = next(self._loop)
                except BatchTimeout:  # the batch before was acknowledged first
                    outcome["acked"] = last
                    raise
                groups = self._loader.lease.group_ids
                outcome["delivered"], outcome["torn"] = payload.names_of_batch(batch, groups)
                outcome["acked"] = last
        except EXPECTED:
            self._loop = None
            with self.journal.call("loader.close", options.RETRY_S):
                self._loader.close()
            raise
        self._last = outcome["delivered"]
        self.train()

    def close(self) -> None:
        if self._last and self._loader.lease:
            with self.journal.call("ack", options.RETRY_S, acking=self._last) as outcome:
                self._loader.lease.ack()
                outcome["acked"] = self._last
        self._loader.close()
        super().close()


class Rank(Trainer):
    """Takes its part of each step; its checkpoint is a file that holds the next step."""

    task = tasks.STEPS

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, place)
        self._rank = int(name.split("-")[0].removeprefix("rank"))
        self._checkpoint = Checkpoint(place.directory / f"rank{self._rank}.checkpoint")
        self._trained: tuple[Lease, dict[str, Any]] | None = None

    def step(self) -> None:
        self._acknowledge()
        step = self._checkpoint.load()
        timeout = self.dice.choice((1.0, TAKE_S))
        try:
            with self.journal.call("take", timeout, step=step) as outcome:
                lease = self._take(step, timeout)
                outcome["delivered"], outcome["torn"] = names = payload.names_of(lease.groups())
        except WrongStep as error:
            self._checkpoint.store(error.next_step)
            raise
        self.train()
        self.journal.write("trained", acking=names[0])
        self._checkpoint.store(step + 1)
        self._trained = lease, {"step": step, "rank": self._rank, "acking": names[0]}
        self._acknowledge()

    def close(self) -> None:
        try:
            self._acknowledge()
        finally:
            super().close()

    def _acknowledge(self) -> None:
        """Acknowledge the part that was trained; while Redis is away the next call tries again."""
        if self._trained is None:
            return
        lease, part = self._trained
        with self.journal.call("ack", options.RETRY_S, **part) as outcome:
            try:
                lease.ack()
            except LeaseLost:
                self._trained = None
                raise
            self._trained = None
            outcome["acked"] = part["acking"]

    def _take(self, step: int, timeout: float) -> Lease:
        """Take a part; a rank whose former process seems to live is lost for this attempt."""
        try:
            return self._stream.take(
                STEPS[step % len(STEPS)],
                timeout=timeout,
                at_least=options.WORLD_SIZE,
                rank=self._rank,
                world_size=options.WORLD_SIZE,
                step=step,
            )
        except (WrongStep, RankLost, LeaseLost):
            raise
        except ConfigError as error:
            raise RankLost(task=self.task, step=step, ranks=(self._rank,)) from error
