"""`Ranks`: all data-parallel ranks get their parts of a step, or all get the same error."""

from __future__ import annotations

from typing import NoReturn, Protocol

from redrb.connection.deadline import Deadline, here
from redrb.errors import ConfigError, DecodeError, LeaseLost
from redrb.forks import in_child
from redrb.stream.ranks.dealing import deal, part_draw
from redrb.stream.ranks.rank_part import RankPart
from redrb.stream.ranks.rank_requests import MOST_RANKS, Balance, PartRequest, refuse
from redrb.stream.ranks.scripts import RANKS, UNFINISHED, RankReply, RankStep, RankStore
from redrb.stream.take.claimed import claimed_part
from redrb.stream.take.consumer import Consumer
from redrb.stream.take.lease import Lease
from redrb.stream.take.scripts import TakeRequest
from redrb.stream.task.store import QUEUE_TTL_MS
from redrb.stream.task.task import Task


class RankTakes(Protocol):
    """Takes the parts of one rank: `Ranks`, or that of a task with partitions."""

    def take(self, place: RankStep, take: TakeRequest, balance: Balance | None) -> Lease:
        """Lease this rank's part of a step, when all ranks have asked for it."""

    def close(self) -> None:
        """Leave."""


class Ranks:
    """One process as a rank, which takes its part of every step."""

    def __init__(self, task: Task, consumer: Consumer) -> None:
        """Make a rank; each take names its number.

        Args:
            task: The task.
            consumer: The process; its heartbeat keeps the rank alive.
        """
        self._task = task
        self._store = task.store
        self._consumer = consumer
        self._rank_store = RankStore(task.store, consumer.group)
        self._begin()
        in_child(self._begin)  # the parts belong to the parent

    def _begin(self) -> None:
        self._joined: dict[int, str] = {}

    def take(self, place: RankStep, take: TakeRequest, balance: Balance | None) -> Lease:
        """Lease this rank's part of a step, when all ranks have asked for it.

        Raises:
            BatchTimeout: The time of a rank was up; no rank has a part.
            RankLost: A rank's heartbeat stopped; no rank has a part.
            WrongStep: The step is done, or not the next.
            ConfigError: See `ExperienceStream.take`.
        """
        self._consumer.attend()
        size = place.world_size
        least = max(take.least // size * size, size)
        take = TakeRequest(take.count, least, take.status, take.where)
        request = PartRequest(place, take, balance)
        with self._consumer.worker.waiting("batch"):
            return self._take(request)

    def _take(self, request: PartRequest) -> Lease:
        """Ask for the part of a step until there is one, or an error."""
        attempt, grace, deadline = 0, None, here()
        while True:
            last = deadline.over
            incarnation = self._task.description.incarnation
            reply = self._ask(request, attempt, incarnation, last=last)
            if reply.outcome == "part":
                lease = self._lease(request, reply, incarnation)
                if lease is not None:
                    return lease
            elif reply.outcome == "gone":
                self._task.reopen(refused_here=True)
            elif reply.outcome in ("held", "leased", "differs"):
                # most likely processes that died just now, and whose deadline has not passed
                grace = grace or Deadline(2 * self._consumer.lease_ms / 1000)
                if last or grace.over:
                    self._refuse(request, reply)
                self._block(request, reply)
            elif reply.outcome == "form":
                attempt = reply.number
                if not self._form(request, attempt, last=last):
                    self._block(request, reply)
            elif reply.outcome == "wait":
                attempt = reply.number
                if last:
                    self._end(request, attempt)
                else:
                    self._block(request, reply)
            elif reply.outcome != "more":
                self._refuse(request, reply)
            if reply.outcome in ("gone", "more") and deadline.pages_over:
                self._rank_store.end(attempt, UNFINISHED)
                self._refuse(request, RankReply("ended", counts=UNFINISHED))

    def close(self) -> None:
        """Leave; the parts of this rank are kept, unharmed, for the process that replaces it."""
        for rank, consumer in self._joined.items():
            self._rank_store.leave(consumer, rank)
        self._joined.clear()

    def _ask(
        self, request: PartRequest, attempt: int, incarnation: str, *, last: bool
    ) -> RankReply:
        rank, consumer = request.place.rank, self._consumer.name
        joined = self._joined.get(rank) == consumer
        reply = self._rank_store.ask(
            *(consumer, request.place, request.spec),
            attempt=attempt,
            joined=joined,
            last=last,
            lease_ms=self._consumer.lease_ms,
            incarnation=incarnation,
        )
        if reply.outcome not in ("held", "leased", "replaced", "gone", "more"):
            self._joined[rank] = consumer
        return reply

    def _refuse(self, request: PartRequest, reply: RankReply) -> NoReturn:
        refuse(
            *(self._store, self._consumer.group, request, reply, here().waited_s),
            self._task.similar,
        )

    def _end(self, request: PartRequest, attempt: int) -> None:
        """End an attempt for which ranks are missing; the errors count the groups that wait."""
        group, take = self._consumer.group, request.take
        waiting = self._task.scripts.count(group, take.status, take.where)
        self._rank_store.end(attempt, f"{waiting}")

    def _block(self, request: PartRequest, reply: RankReply) -> None:
        deadline = here()
        if deadline.over:
            return
        ranks = ", ".join(map(str, reply.ranks)) or "none"
        deadline.log(
            f"task {self._store.task!r}, consumer group {self._consumer.group!r}, step "
            f"{request.place.step}: rank {request.place.rank} waits ({reply.outcome}); for ranks: "
            f"{ranks}"
        )
        forming = reply.outcome == "form"
        self._rank_store.wait(self._consumer.name, forming=forming)

    def _form(self, request: PartRequest, attempt: int, *, last: bool) -> bool:
        """Lease the batch of the step and deal it; False when there is none yet."""
        step, take, size = request.place.step, request.take, request.place.world_size
        batch = self._rank_store.lease_batch(
            *(self._consumer.name, step, attempt, take if last else take.full),
            ttl_ms=0 if last else QUEUE_TTL_MS,
            lease_ms=self._consumer.lease_ms,
            revision=self._task.description.revision,
        )
        if batch.outcome == "taken":
            payloads = None
            if request.balance == "tokens":
                payloads, _ = self._rank_store.read(f"{RANKS}/{step}", len(batch.ids) + MOST_RANKS)
            parts = deal(batch.ids, batch.weights, size, payloads)
            self._rank_store.assign(step, attempt, request.spec, parts)
        elif batch.outcome == "gone":
            self._task.reopen(refused_here=True)
        elif batch.outcome == "never":
            raise ConfigError(
                f"task {self._store.task!r} holds at most {batch.counts[0]} groups: a batch of "
                f"{take.count} can never be full. Take fewer, raise the limit, or widen the rate."
            )
        elif batch.outcome == "short":
            if last:
                self._rank_store.end(attempt, batch.counts_as_text)
            return last
        if batch.outcome in ("gone", "more") and here().pages_over:
            self._rank_store.end(attempt, UNFINISHED)
        return True

    def _lease(self, request: PartRequest, reply: RankReply, incarnation: str) -> Lease | None:
        """Return the lease on a part; None when another process has taken the rank over.

        Groups that cannot be decoded go to the dead letters: the part is smaller, and the number
        of steps stays equal on all ranks.
        """
        place = request.place
        payloads, first_ids = (
            self._rank_store.read(place.slot, len(reply.ids)) if reply.ids else ({}, {})
        )
        try:
            part = claimed_part(
                self._store,
                self._consumer.group,
                [(seq, payloads.get(seq)) for seq in reply.ids],
                RankPart(self._rank_store, self._store.task, self._consumer.name, place),
                status=request.take.status,
                incarnation=incarnation,
                reader=self._consumer.reader,
                draw=part_draw(reply.text),
                first_ids=first_ids,
            )
        except LeaseLost:
            return None
        if part is None:
            return None
        if not part:
            raise DecodeError(
                f"task {self._store.task!r}: nothing is left of the part of rank {place.rank} in "
                f"step {place.step}; see the dead letters, and go on with the next step."
            )
        return Lease([part])
