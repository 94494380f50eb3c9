"""`Ranks`: rank 0 takes a batch for all ranks; all get their parts of it, or the same error."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, NoReturn, TypeAlias, cast

import msgspec

from redrb.checks import checked_int
from redrb.connection.client import Request
from redrb.connection.deadline import PAGES_S, Deadline, here
from redrb.connection.transport import Pipeline, Reply, without_errors
from redrb.errors import (
    BatchTimeout,
    ConfigError,
    DecodeError,
    LeaseLost,
    RecordError,
    RedrbError,
    WrongStep,
)
from redrb.forks import in_child
from redrb.stream.ranks.calls import (
    MOST_RANKS,
    AskRead,
    AskStep,
    Decision,
    Part,
    RankStep,
    StepReply,
)
from redrb.stream.ranks.dealing import deal
from redrb.stream.ranks.lease import RankLease, Share, without_payload
from redrb.stream.take.calls import TakeReply, TakeRequest
from redrb.stream.take.consumer import Consumer, Slot
from redrb.stream.take.lease import Lease
from redrb.stream.take.part import Draw
from redrb.stream.take.taker import Taker, claimed_part
from redrb.stream.take.unfilled import batch_timeout
from redrb.stream.task.entries import entry_id, parse_entries
from redrb.stream.task.lookup import count_waiting
from redrb.stream.task.task import Task
from redrb.unpacking import Reading

Balance: TypeAlias = Literal["tokens"]
"""Quantity that is about equal in all parts."""


class PartRequest(NamedTuple):
    """A rank's request for its part of a step's batch."""

    place: RankStep
    take: TakeRequest
    balance: Balance | None

    @property
    def spec(self) -> str:
        """Text of the request, which must be the same for all ranks."""
        take, size = self.take, self.place.world_size
        return (
            f"{size} ranks, {take.count} groups, at least {take.least}, status {take.status}, "
            f"balance {self.balance or '-'}, query {take.where or '-'}"
        )


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


class _Proposal(NamedTuple):
    """What rank 0 asks all ranks to accept: a batch, of which it has a part, or an error."""

    request: PartRequest
    decision: str
    lease: RankLease | None
    error: RedrbError | None = None


class Ranks:
    """One process as a rank, which takes its part of every step."""

    def __init__(self, task: Task, consumer: Consumer, taker: Taker) -> None:
        self._task, self._store = task, task.store
        self._consumer, self._taker = consumer, taker
        self._begin()
        in_child(self._begin)  # the parts belong to the parent

    def _begin(self) -> None:
        self._joined = -1  # the rank that this process is
        self._number = 0  # of its next decision
        self._missing: tuple[int, ...] = ()  # ranks that had not asked when it asked last
        self._former = ""  # the rank 0 before, whose groups were requeued
        self._proposal: _Proposal | None = None  # one that may have been accepted

    def take(
        self, place: RankStep, take: TakeRequest, balance: Balance | None, timeout: float | None
    ) -> Lease:
        """Return this rank's part of a step.

        The rank whose time is up first ends the take of all. Ranks but rank 0 wait a moment longer
        than `timeout`, for rank 0's last look.

        Raises:
            BatchTimeout, ConfigError: As rank 0's take, on all ranks; a rank did not ask in time.
            WrongStep: Rank 0 takes another step.
            LeaseLost, DecodeError: The part cannot be read.
        """
        self._consumer.attend()
        size = place.world_size
        least = max(take.least // size * size, size)
        take = TakeRequest(take.count, least, take.status, take.where)
        request = PartRequest(place, take, balance)
        wait = self._lead if place.rank == 0 else self._follow
        extra_s = PAGES_S if place.rank else 0.0
        seconds = None if timeout is None else timeout + extra_s
        with Deadline(seconds), self._consumer.worker.waiting("batch"):
            return wait(request)

    def _lead(self, request: PartRequest) -> Lease:
        """Take the batch of all ranks, and let them know."""
        proposal, self._proposal = self._proposal, None
        if proposal is not None and proposal.request != request:
            self._withdraw(proposal)
            proposal = None
        ready = proposal is not None  # its decision may stand, whatever has happened since
        while True:
            self._proposal = proposal if proposal and proposal.lease else None
            reply = self._ask(request, proposal.decision if ready and proposal else None)
            if reply.former and reply.former != self._former:
                self._consumer.leave(reply.former, died=True)
                self._former = reply.former
            if reply.decision is not None:
                self._proposal = None
                self._number += 1
                if proposal is None or reply.decision != proposal.decision:
                    self._withdraw(proposal)
                    self._raise(reply.decision)
                if proposal.lease is None:
                    raise proposal.error or ConfigError(proposal.decision)
                size = request.place.world_size
                proposal.lease.unread = partial(self._unread, size, self._number - 1)
                return proposal.lease
            ready = not reply.missing
            if ready and proposal is None:
                proposal = self._propose(request, reply.left_ms)
                ready = not self._missing
            elif not ready and here().over:
                self._withdraw(proposal)
                error = self._timeout(request, reply.missing)
                proposal, ready = self._refusal(request, error), True
            elif not ready:
                self._wait(request, reply)

    def _propose(self, request: PartRequest, left_ms: int | None) -> _Proposal:
        """Take and deal a batch, until the first rank that waits already has its time up."""
        place, consumer = request.place, self._consumer
        try:
            with Deadline(None if left_ms is None else left_ms / 1000) as deadline:
                look = partial(self._look, request, deadline)
                whole = self._taker.take(request.take, waiter=self._waiter, look=look)
        except (BatchTimeout, ConfigError, RecordError) as error:
            return self._refusal(request, error)
        [part] = whole.parts
        groups = deal(part.layouts, place.world_size, by_tokens=request.balance == "tokens")
        weights = part.draw.weights if part.draw else {}
        parts = [Part(ids, [weights[each] for each in ids] if weights else None) for ids in groups]
        total = max(part.draw.total, sum(weights.values())) if part.draw else 0.0
        mine = [(seq, part.layouts[seq]) for seq in groups[0]]
        left = part.ids[sum(map(len, groups)) :]
        if left:
            whole.release(left)
        part.layouts = {seq: without_payload(each) for seq, each in part.layouts.items()}
        slot = cast("Slot", part.holder)
        share = Share(self._store, consumer.group, consumer.name, slot.name, slot.token)
        own = replace(
            part,
            groups=mine,
            holder=share,
            expiries={seq: part.expiries[seq] for seq, _ in mine if seq in part.expiries},
        )
        decision = Decision(
            *(place.step, request.spec, slot.name, slot.token, part.incarnation, parts, total)
        )
        return _Proposal(request, _packed(decision), RankLease(own, part))

    def _look(self, request: PartRequest, deadline: Deadline) -> None:
        """End rank 0's take with the first wait of the other ranks."""
        reply = self._ask(request, None)
        left_ms = reply.left_ms if reply.decision is None else 0
        if left_ms is not None:
            deadline.wait_until = min(deadline.wait_until, time.monotonic() + left_ms / 1000)

    def _refusal(self, request: PartRequest, error: RedrbError) -> _Proposal:
        """Return the proposal of an error for all ranks."""
        found = Decision(request.place.step, request.spec)
        if isinstance(error, BatchTimeout):
            found = msgspec.structs.replace(found, timeout=error)
        else:
            found = msgspec.structs.replace(found, refusal=str(error))
        return _Proposal(request, _packed(found), None, error)

    def _withdraw(self, proposal: _Proposal | None) -> None:
        if proposal is not None and proposal.lease:
            proposal.lease.release()

    def _follow(self, request: PartRequest) -> Lease:
        """Wait for the decision about a step; if the time is up, propose an error."""
        while True:
            over = here().over
            reply = self._ask(request, None)
            if over and reply.decision is None:
                refusal = self._refusal(request, self._timeout(request, reply.missing))
                reply = self._ask(request, refusal.decision)
            if reply.decision is not None:
                return self._accept(request, reply.decision)
            if not over:
                self._wait(request, reply)

    def _accept(self, request: PartRequest, text: str) -> Lease:
        """Return this rank's part of a batch; raises the error of a decision without one."""
        place, consumer = request.place, self._consumer
        decision = self._read(text)
        if decision.timeout is None and not decision.refusal:
            self._check_same(request, decision)
        if not decision.parts:
            self._number += 1
            self._raise(text)
        with Reading("the parts of a step"):
            part = decision.parts[place.rank]
        raw = self._payload(place, part.ids)
        entries, first_ids = parse_entries(raw)
        found = dict(entries)
        gone = tuple(seq for seq in part.ids if found.get(seq) is None)
        if gone:
            why = "rank 0 has ended this step already, or other clients deleted them."
            raise LeaseLost(task=self._task.name, ids=gone, why=why)
        share = Share(self._store, consumer.group, consumer.name, decision.slot, decision.token)
        draw = None
        if part.weights is not None:
            draw = Draw(dict(zip(part.ids, part.weights, strict=True)), decision.total_weight)
        claimed = claimed_part(
            self._store,
            consumer,
            [(seq, found[seq]) for seq in part.ids],
            share,
            status=request.take.status,
            incarnation=decision.incarnation,
            draw=draw,
            first_ids=first_ids,
            least=len(part.ids),
        )
        if claimed is None:
            raise DecodeError(
                f"task {self._task.name!r}: the part of rank {place.rank} in step {place.step} "
                "cannot be decoded; see the dead letters."
            )
        return RankLease(claimed)

    def _payload(self, place: RankStep, ids: Sequence[int]) -> list[Reply]:
        """Return the entries of a part, and let rank 0 know that they were read."""
        asked = self._call(place, self._number + 1)
        made = Pipeline()
        for seq in ids:
            made.add("XRANGE", self._store.keys.stream, entry_id(seq), entry_id(seq))
        asked.add_to(made, self._store.script_keys)

        def entries(replies: list[Reply]) -> list[Reply]:
            *found, reply = without_errors(replies)
            self._number = asked.read(reply).number
            return [entry for one in found for entry in one]

        return Request(self._store.client, made, entries).result()

    def _unread(self, world_size: int, number: int) -> str:
        """Wait until all ranks have read a decision; returns why one has not, "" if all have."""
        consumer = self._consumer
        ask = AskRead(consumer.group, world_size, number)
        with Deadline(consumer.lease_ms / 1000) as deadline:
            while (reply := self._store.call(ask)).missing and not (reply.skipped or deadline.over):
                self._store.wait_for_wake(f"{consumer.name}.read")
        if reply.skipped:
            return "a rank has started again before it had read its part"
        ranks = ", ".join(map(str, reply.missing))
        return f"its part was not read by rank {ranks}" if ranks else ""

    def _check_same(self, request: PartRequest, decision: Decision) -> None:
        """Check that rank 0 has asked for the same; the next take gets its part all the same."""
        place = request.place
        if decision.step != place.step:
            raise WrongStep(
                task=self._task.name,
                step=place.step,
                next_step=decision.step,
                why="rank 0 takes another one",
            )
        if decision.spec != request.spec:
            raise ConfigError(
                f"task {self._task.name!r}, step {place.step}: rank 0 takes {decision.spec}; and "
                f"rank {place.rank} {request.spec}. All ranks must ask for the same."
            )

    def _read(self, text: str) -> Decision:
        with Reading(f"the decision about a step of task {self._task.name!r}"):
            decision = msgspec.json.decode(text, type=Decision)
            if not (decision.parts or decision.timeout or decision.refusal):
                raise ValueError("it is empty")
        return decision

    def _raise(self, text: str) -> NoReturn:
        """Raise the error that a decision is for this rank."""
        decision = self._read(text)
        if decision.timeout is not None:
            raise decision.timeout
        if decision.refusal:
            raise ConfigError(decision.refusal)
        raise LeaseLost(
            task=self._task.name,
            ids=(),
            why="an earlier take of rank 0 was cut off, and other ranks have its parts. Start all "
            "ranks again from a checkpoint.",
        )

    def _timeout(self, request: PartRequest, missing: tuple[int, ...]) -> BatchTimeout:
        """Return the error of a take that rank 0 has not ended in time."""
        take = request.take
        waiting = count_waiting(self._store, self._consumer.group, take.status, take.where)
        if not missing and waiting >= take.least:
            missing = (0,)
        return batch_timeout(
            self._task,
            take.least,
            TakeReply("short", waiting),
            leased_here=0,
            expired=0,
            missing_ranks=missing,
        )

    @property
    def _waiter(self) -> str:
        return f"{self._consumer.name}.rank"

    def _call(
        self, place: RankStep, number: int, left_ms: int | None = None, decision: str | None = None
    ) -> AskStep:
        known = number if self._joined == place.rank else -1
        asked = (place.rank, place.world_size, known, left_ms, decision)
        return AskStep(self._consumer.group, self._consumer.name, *asked)

    def _ask(self, request: PartRequest, decision: str | None) -> StepReply:
        rank, waits_s = request.place.rank, here().waits_s - PAGES_S
        left_ms = None if rank == 0 or waits_s == math.inf else max(0, int(waits_s * 1000))
        reply = self._store.call(self._call(request.place, self._number, left_ms, decision))
        if reply.replaced:
            raise ConfigError(
                f"task {self._task.name!r}, consumer group {self._consumer.group!r}: another "
                f"process has taken rank {rank} over. Give every process a different rank, and "
                "every job its own group=."
            )
        self._joined, self._number, self._missing = rank, reply.number, reply.missing
        return reply

    def _wait(self, request: PartRequest, reply: StepReply) -> None:
        place = request.place
        ranks = ", ".join(map(str, reply.missing)) or "0"
        here().log(
            f"task {self._store.task!r}, consumer group {self._consumer.group!r}, step "
            f"{place.step}: rank {place.rank} waits for rank {ranks}",
            self._store.keys.namespace,
        )
        self._store.wait_for_wake(self._waiter)


def _packed(decision: Decision) -> str:
    return msgspec.json.encode(decision).decode()
