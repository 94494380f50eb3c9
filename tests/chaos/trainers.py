"""Trainers: each way to take, with a journal of what was delivered and what is acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from redrb import BatchTimeout, Experience, ExperienceLoader, ExperienceStream, Lease, LeaseLost
from redrb.connection import Client
from redrb.errors import RedrbError
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


class Ranks(Trainer):
    """A job of ranks, each in a thread, which ends and starts again as a whole.

    Its checkpoint is a file: the next step, and the groups whose acknowledgement may be missing.
    """

    task = tasks.STEPS

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, place)
        first = {"step": 0, "names": [], "trained": {}, "incarnation": ""}
        self._checkpoint = Checkpoint(place.directory / "ranks.checkpoint", first)
        self._pool = ThreadPoolExecutor(options.WORLD_SIZE)
        self._streams: list[ExperienceStream] = []
        self._leases: list[Lease] = []
        self._broken = False  # ranks got different results

    def open(self, client: Client) -> None:
        """Start all ranks; they go on from the checkpoint."""
        self._client = client
        self._leave()
        self._streams.append(self.stream(client, self.task))
        state = self._checkpoint.load()
        if state["trained"]:
            trained = {int(seq): samples for seq, samples in state["trained"].items()}
            with self.journal.call("settle", options.RETRY_S, acking=state["names"]) as outcome:
                settled = self._streams[0].settle(trained, incarnation=state["incarnation"])
                outcome["acked"] = state["names"] if settled == len(trained) else []
        while len(self._streams) < options.WORLD_SIZE:
            self._streams.append(self.stream(client, self.task))

    def step(self) -> None:
        if len(self._streams) < options.WORLD_SIZE:
            self.open(self._client)
        self._acknowledge()
        step = self._checkpoint.load()["step"]
        timeout = self.dice.choice((1.0, TAKE_S))
        try:
            with self.journal.call("take", timeout, step=step) as outcome:
                self._leases = self._take(step, timeout)
                groups = [group for lease in self._leases for group in lease.groups()]
                outcome["delivered"], outcome["torn"] = names = payload.names_of(groups)
        except EXPECTED:
            if self._broken:
                self._leave()
            raise
        self.train()
        self.journal.write("trained", acking=names[0])
        first = self._leases[0]
        state = {"step": step + 1, "names": names[0], "trained": first.unacknowledged}
        self._checkpoint.store({**state, "incarnation": first.incarnation})
        self._acknowledge()

    def close(self) -> None:
        try:
            self._acknowledge()
        finally:
            self._leave()
            self._pool.shutdown()

    def _acknowledge(self) -> None:
        """Acknowledge the step that was trained; while Redis is away the next call tries again."""
        if not self._leases:
            return
        names = self._checkpoint.load()["names"]
        with self.journal.call("ack", options.RETRY_S, acking=names) as outcome:
            try:
                for lease in self._leases:
                    lease.ack()
            except LeaseLost:
                self._leases = []
                raise
            self._leases = []
            outcome["acked"] = names

    def _take(self, step: int, timeout: float) -> list[Lease]:
        """Take the parts of all ranks; if one of them has none, the job ends."""

        def take(rank: int) -> Lease | RedrbError:
            try:
                return self._streams[rank].take(
                    STEPS[step % len(STEPS)],
                    timeout=timeout,
                    at_least=options.WORLD_SIZE,
                    rank=rank,
                    world_size=options.WORLD_SIZE,
                    step=step,
                )
            except EXPECTED as error:
                return error

        found = list(self._pool.map(take, range(options.WORLD_SIZE)))
        leases = [each for each in found if isinstance(each, Lease)]
        for error in found:
            if not isinstance(error, Lease):
                self._broken = bool(leases) or not isinstance(error, BatchTimeout)
                raise error
        if len(set(map(len, leases))) > 1:
            raise AssertionError(f"parts of {[len(lease) for lease in leases]} groups")
        return leases

    def _leave(self) -> None:
        """End all ranks; their groups wait again."""
        streams, self._streams = self._streams, []
        for stream in streams:
            with suppress(*EXPECTED), self.journal.call("close", options.RETRY_S):
                stream.close()
