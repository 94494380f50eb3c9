"""`Ranks`: all data-parallel ranks get their parts of a step, or all get the same error."""

from __future__ import annotations

from typing import NoReturn

from redrb.connection.deadline import Deadline, here
from redrb.damage import Reading
from redrb.errors import ConfigError, DecodeError, LeaseLost
from redrb.forks import in_child
from redrb.stream.ranks.calls import (
    RANKS,
    UNFINISHED,
    AskPart,
    AssignParts,
    EndAttempt,
    FinishPart,
    RankReply,
    RankStep,
)
from redrb.stream.ranks.dealing import deal
from redrb.stream.ranks.rank_part import RankPart
from redrb.stream.ranks.rank_requests import MOST_RANKS, Balance, PartRequest, refuse
from redrb.stream.take.calls import Take, TakeReply, TakeRequest
from redrb.stream.take.claimed import claimed_part
from redrb.stream.take.consumer import Consumer
from redrb.stream.take.lease import Lease
from redrb.stream.take.lease_part import Draw
from redrb.stream.task.entries import first_ids, parse_entry
from redrb.stream.task.inspection import count_waiting
from redrb.stream.task.store import QUEUE_TTL_MS
from redrb.stream.task.task import Task


class Ranks:
    """One process as a rank, which takes its part of every step."""

    def __init__(self, task: Task, consumer: Consumer) -> None:
        self._task = task
        self._store = task.store
        self._consumer = consumer
        self._waiter = f"{RANKS}:{consumer.group}"
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
                    take = request.take
                    waiting = count_waiting(
                        self._store, self._consumer.group, take.status, take.where
                    )
                    self._end(attempt, TakeReply("short", waiting))
                else:
                    self._block(request, reply)
            elif reply.outcome != "more":
                self._refuse(request, reply)
            if reply.outcome in ("gone", "more") and deadline.pages_over:
                self._end(attempt, UNFINISHED)
                self._refuse(request, RankReply("ended", last_look=UNFINISHED))

    def close(self) -> None:
        """Leave; the parts of this rank are kept, unharmed, for the process that replaces it."""
        for rank, consumer in self._joined.items():
            self._store.call(FinishPart(self._consumer.group, consumer, rank, 0, "leave"))
        self._joined.clear()

    def _ask(
        self, request: PartRequest, attempt: int, incarnation: str, *, last: bool
    ) -> RankReply:
        rank, consumer = request.place.rank, self._consumer.name
        joined = self._joined.get(rank) == consumer
        ask = AskPart(
            *(self._consumer.group, consumer, request.place, request.spec, attempt),
            *(joined, last, self._consumer.lease_ms, incarnation),
        )
        reply = self._store.call(ask)
        if reply.outcome not in ("held", "leased", "replaced", "gone", "more"):
            self._joined[rank] = consumer
        return reply

    def _refuse(self, request: PartRequest, reply: RankReply) -> NoReturn:
        refuse(self._task, self._consumer.group, request, reply)

    def _end(self, attempt: int, last_look: TakeReply) -> None:
        self._store.call(EndAttempt(self._consumer.group, attempt, last_look))

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
        full = [self._waiter] if reply.outcome == "form" else []
        self._store.wait_for_wake(f"{self._consumer.name}.rank", *full)

    def _form(self, request: PartRequest, attempt: int, *, last: bool) -> bool:
        """Lease the batch of the step and deal it; False when there is none yet."""
        step, take, consumer = request.place.step, request.take, self._consumer
        slot = f"{RANKS}/{step}"
        lease = Take(
            *(consumer.group, consumer.name, slot, str(attempt), take if last else take.full),
            *(self._waiter, 0 if last else QUEUE_TTL_MS, consumer.lease_ms),
            *(self._task.description.revision, last),
        )
        batch = self._store.call(lease)
        if batch.outcome == "taken":
            ids, weights = self._leased(slot, batch)
            payloads = None
            if request.balance == "tokens":
                payloads, _ = self._read(slot, len(ids) + MOST_RANKS)
            parts = deal(ids, weights, request.place.world_size, payloads)
            self._store.call(AssignParts(consumer.group, step, attempt, request.spec, parts))
        elif batch.outcome == "gone":
            self._task.reopen(refused_here=True)
        elif batch.outcome == "never":
            raise ConfigError(
                f"task {self._store.task!r} holds at most {batch.amount} groups: a batch of "
                f"{take.count} can never be full. Take fewer, raise the limit, or widen the rate."
            )
        elif batch.outcome == "short":
            if last:
                self._end(attempt, batch)
            return last
        if batch.outcome in ("gone", "more") and here().pages_over:
            self._end(attempt, UNFINISHED)
        return True

    def _leased(self, slot: str, batch: TakeReply) -> tuple[list[int], dict[int, float] | None]:
        """Return the groups of a batch in the task's order, and their weights as `deal` asks."""
        pending = self._store.client.execute(
            *("XPENDING", self._store.keys.stream, self._consumer.group),
            *("-", "+", max(batch.amount, 1), slot),
        )
        with Reading("the batch of ranks"):
            ids = [int(entry[0].rpartition(b"-")[2]) for entry in pending]
            order = {int(member): place for place, member in enumerate(batch.members)}
            ids.sort(key=lambda seq: (order.get(seq, 0), seq))
            if not batch.weights:
                return ids, None
            return ids, {**dict(zip(order, batch.weights, strict=True)), 0: batch.total_weight}

    def _read(self, slot: str, count: int) -> tuple[dict[int, bytes | None], dict[int, int]]:
        """Return the payloads that a slot leases, and the first ids of requeued groups, by id."""
        reply = self._store.client.execute(
            *("XREADGROUP", "GROUP", self._consumer.group, slot, "COUNT", max(count, 1)),
            *("STREAMS", self._store.keys.stream, "0"),
        )
        raw = reply[0][1] if reply else ()
        return dict(map(parse_entry, raw)), first_ids(raw)

    def _lease(self, request: PartRequest, reply: RankReply, incarnation: str) -> Lease | None:
        """Return the lease on a part; None when another process has taken the rank over."""
        place = request.place
        payloads, firsts = self._read(place.slot, len(reply.ids)) if reply.ids else ({}, {})
        weights = reply.weights
        try:
            part = claimed_part(
                self._store,
                self._consumer,
                [(seq, payloads.get(seq)) for seq in reply.ids],
                RankPart(self._store, self._consumer.group, self._consumer.name, place),
                status=request.take.status,
                incarnation=incarnation,
                draw=None if weights is None else Draw(weights, weights.pop(0)),
                first_ids=firsts,
            )
        except LeaseLost:
            return None
        if part is None:
            return None
        # groups that cannot be decoded go to the dead letters: the part is smaller, and the number
        # of steps stays equal on all ranks
        if not part:
            raise DecodeError(
                f"task {self._store.task!r}: nothing is left of the part of rank {place.rank} in "
                f"step {place.step}; see the dead letters, and go on with the next step."
            )
        return Lease([part])
