"""`Ranks`: all data-parallel ranks get their parts of a step, or all get the same error."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn, TypeAlias

from msgspec.structs import replace

from redrb.checks import checked_int
from redrb.connection.deadline import Deadline, here
from redrb.connection.request import Request
from redrb.errors import BatchTimeout, ConfigError, DecodeError, LeaseLost, RankLost, WrongStep
from redrb.forks import in_child
from redrb.stream.heartbeat import Silences
from redrb.stream.ranks.calls import (
    MOST_STEPS,
    RANKS,
    UNFINISHED,
    AskPart,
    AssignParts,
    EndAttempt,
    FinishPart,
    Loss,
    PartEnd,
    RankReply,
    RankStep,
)
from redrb.stream.ranks.dealing import deal
from redrb.stream.take.calls import Outcome, Take, TakeReply, TakeRequest
from redrb.stream.take.cause import NO_CAUSE, Cause
from redrb.stream.take.claimed import claimed_part
from redrb.stream.take.consumer import Consumer
from redrb.stream.take.lease import Lease
from redrb.stream.take.part import Draw
from redrb.stream.take.taker import batch_timeout
from redrb.stream.task.entries import first_ids, parse_entry
from redrb.stream.task.lookup import count_waiting
from redrb.stream.task.never_full import never_full
from redrb.stream.task.queries import no_query
from redrb.stream.task.store import QUEUE_TTL_MS, TaskStore
from redrb.stream.task.task import Task
from redrb.unpacking import Reading
from redrb.words import counted


@dataclass(frozen=True, slots=True)
class RankShare:
    """The holder of a rank's lease: its part of one step, kept until all ranks acknowledge.

    Attributes:
        consumer: The process that is this rank.
        silences: Of its heartbeat.
        since: When it took the part (monotonic).
    """

    store: TaskStore
    group: str
    consumer: str
    place: RankStep
    silences: Silences
    since: float
    whole: ClassVar[Collection[Outcome]] = ("ack", "release", "fail")

    def end_request(
        self, outcome: Outcome, ids: Sequence[int], *, reason: Cause, samples: int, ends: bool
    ) -> Request[str]:
        """Return the request that ends the part, or rejects or expires groups of it.

        The part is lost if another process is this rank, the step was formed anew, or the ranks
        have ended.
        """
        if not ends and outcome in self.whole:
            raise ConfigError(
                f"{outcome}(ids): a rank's part ends as a whole. Call {outcome}() without ids; "
                "reject(reason, ids) and expire(ids) take single groups out before."
            )
        part = (self.group, self.consumer, self.place.rank, self.place.step)
        finish = FinishPart(*part, outcome, tuple(map(str, ids)), reason, samples)

        def read(end: PartEnd) -> str:
            if end.more:  # a page of the step's groups was acknowledged
                *_, end = self.store.pages(replace(finish, seqs=()))
            return self._reason(end.loss)

        return self.store.request(finish, read)

    def release(self, ids: Sequence[int]) -> None:
        """Keep the part for this rank."""
        self.end_request("release", ids, reason=NO_CAUSE, samples=0, ends=True).result()

    def _reason(self, loss: Loss) -> str:
        """Return why the part is lost, and what to do; "" if it is not."""
        if not loss:
            return ""
        if loss == "replaced":
            return (
                f"another process has taken rank {self.place.rank} over. Drop the result of "
                "training on them, and give every process a different rank."
            )
        if loss == "anew":
            return (
                f"step {self.place.step} was formed anew, because deliveries of a part of it "
                "failed too often. Drop the result of training on them, and take it again."
            )
        return (
            f"rank {self.place.rank} was silent for longer than lease_ms, and step "
            f"{self.place.step} has ended since, or the ranks began anew (the longest silence of "
            f"its heartbeat: {self.silences.longest_s(self.since):.1f} s). Go on with the next "
            "step."
        )

    def abandon(self, ids: tuple[int, ...]) -> None:
        """Do nothing: the part is kept for this rank."""


Balance: TypeAlias = Literal["tokens"]
"""Quantity that is about equal in all parts."""

MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class PartRequest:
    """A rank's request for its part of a step's batch."""

    place: RankStep
    take: TakeRequest
    balance: Balance | None

    @property
    def spec(self) -> str:
        """Text of the request, which must be the same for all ranks."""
        take = self.take
        return f"{take.count} {take.least} {take.status} {self.balance or '-'} {take.where}"


def checked_place(count: int, rank: object, world_size: object, step: object) -> RankStep:
    """Return the rank and its step; raises ConfigError if one is missing or does not fit."""
    if rank is None or world_size is None or step is None:
        raise ConfigError("take(rank=, world_size=, step=) belong together: give all three.")
    size = checked_int("world_size", world_size, 1)
    place = RankStep(checked_int("rank", rank), size, checked_int("step", step))
    if place.rank >= size or size > MOST_RANKS:
        raise ConfigError(
            f"rank={rank} of world_size={size}: ranks are 0 to world_size - 1, and at most "
            f"{MOST_RANKS}."
        )
    if count % size:
        raise ConfigError(
            f"take({count}, world_size={size}): every rank gets as many groups as the others, so "
            "count must be a multiple of world_size."
        )
    return place


def checked_balance(balance: object) -> Balance | None:
    """Return the quantity by which parts are balanced; raises ConfigError for another one."""
    if balance is None or balance == "tokens":
        return "tokens" if balance else None
    raise ConfigError(f'balance={balance!r:.80}: use "tokens" or None.')


def refuse(task: Task, group: str, request: PartRequest, reply: RankReply) -> NoReturn:
    """Raise the error that a reply without a part means."""
    if reply.outcome == "ended":
        raise _ended(task, request, reply)
    step = request.place.step
    if reply.outcome == "done":
        why = "all ranks have acknowledged it already"
        raise WrongStep(task=task.name, step=step, next_step=reply.number, why=why)
    if reply.outcome == "early":
        why = f"step {reply.number} comes first, on every rank"
        raise WrongStep(task=task.name, step=step, next_step=reply.number, why=why)
    raise ConfigError(f"task {task.name!r}, consumer group {group!r}: {_refusal(request, reply)}")


def _ended(
    task: Task, request: PartRequest, reply: RankReply
) -> RankLost | LeaseLost | BatchTimeout:
    """Return the error of an attempt that ended for all ranks."""
    place = request.place
    if reply.reason == "lost":
        return RankLost(task=task.name, step=place.step, ranks=reply.ranks)
    if reply.reason == "anew":
        return LeaseLost(
            task=task.name,
            ids=(),
            why=f"deliveries of rank {place.rank}'s part failed too often, so step "
            f"{place.step} is formed anew: take it again on all ranks.",
        )
    found = reply.last_look or TakeReply("short")
    return batch_timeout(
        task,
        request.take.least,
        found,
        leased_here=None,
        expired=found.expired,
        missing_ranks=reply.ranks,
    )


def _refusal(request: PartRequest, reply: RankReply) -> str:
    """Return why a request cannot be served, and how to change it."""
    place = request.place
    if reply.outcome == "unacked":
        return (
            f"{MOST_STEPS} steps, from step {reply.number} on, are not acknowledged by all ranks: "
            "call lease.ack() after each optimizer step."
        )
    if reply.outcome == "differs":
        return (
            f"other ranks ask for {reply.spec!r} in step {place.step}, and rank {place.rank} for "
            f"{request.spec!r} (count, at least, status, balance, query). All must ask for the "
            "same."
        )
    if reply.outcome == "replaced":
        return (
            f"another process has taken rank {place.rank} over. Give every process a different "
            "rank."
        )
    if reply.outcome == "held":
        ranks = ", ".join(map(str, reply.ranks))
        return (
            f"live ranks hold steps ({ranks} of {reply.number}): stop them before you take "
            f"with world_size={place.world_size} and count={request.take.count}, or use another "
            "group=."
        )
    return (
        f"{counted(reply.number, 'group', 'are')} leased by takes without a rank: ranks "
        "cannot share their consumer group, use another group=."
    )


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
            self._consumer.group,
            consumer,
            request.place,
            request.spec,
            attempt,
            joined,
            last,
            self._consumer.lease_ms,
            incarnation,
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
            consumer.group,
            consumer.name,
            slot,
            str(attempt),
            take if last else take.full,
            self._waiter,
            0 if last else QUEUE_TTL_MS,
            consumer.lease_ms,
            self._task.description.revision,
            last,
        )
        batch = self._store.call(lease)
        while batch.search is not None and not here().pages_over:
            batch = self._store.call(replace(lease, search=batch.search))
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
            raise never_full(self._task, take.count, batch.amount)
        elif batch.outcome == "drawn":
            raise no_query(self._store.task)
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
            "XPENDING",
            self._store.keys.stream,
            self._consumer.group,
            "-",
            "+",
            max(batch.amount, 1),
            slot,
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
            "XREADGROUP",
            "GROUP",
            self._consumer.group,
            slot,
            "COUNT",
            max(count, 1),
            "STREAMS",
            self._store.keys.stream,
            "0",
        )
        raw = reply[0][1] if reply else ()
        return dict(map(parse_entry, raw)), first_ids(raw)

    def _share(self, place: RankStep) -> RankShare:
        consumer, now = self._consumer, time.monotonic()
        return RankShare(self._store, consumer.group, consumer.name, place, consumer.silences, now)

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
                self._share(place),
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
