"""Checks a rank's request for its part, and turns refusals into errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

from redrb.checks import checked_int
from redrb.errors import BatchTimeout, ConfigError, LeaseLost, RankLost, WrongStep
from redrb.stream.ranks.calls import MOST_STEPS, RankReply, RankStep
from redrb.stream.take.calls import TakeReply, TakeRequest
from redrb.stream.take.fates import batch_timeout
from redrb.stream.task.task import Task

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
        *(task, request.take.least, found),
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
            f"ranks {ranks} of {reply.number} are alive and hold steps: stop them before you take "
            f"with world_size={place.world_size} and count={request.take.count}, or use another "
            "group=."
        )
    return (
        f"{reply.number} groups are leased by takes without a rank: ranks cannot share their "
        "consumer group, use another group=."
    )
