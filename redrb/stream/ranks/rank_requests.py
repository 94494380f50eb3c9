"""What a rank asks for, and what the answers other than a part mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

from redrb.checks import checked_int
from redrb.errors import BatchTimeout, ConfigError, LeaseLost, RankLost, WrongStep
from redrb.stream.ranks.rank_store import MOST_AHEAD, Answer, Place
from redrb.stream.take.consumer import Wanted

Balance: TypeAlias = Literal["tokens"]
"""By what parts are made alike."""

MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Asked:
    """What one take of a rank asks for.

    Attributes:
        place: Which part.
        wanted: Of which batch.
        balance: How the batch is split.
    """

    place: Place
    wanted: Wanted
    balance: Balance | None

    @property
    def spec(self) -> str:
        """The same for all ranks."""
        own = self.wanted
        return f"{own.count} {own.least} {own.status} {self.balance or '-'} {own.where}"


def checked_place(count: int, rank: object, world_size: object, step: object) -> Place:
    """Return what a rank asks for.

    Raises:
        ConfigError: Something is missing or does not fit.
    """
    if rank is None or world_size is None or step is None:
        raise ConfigError("take(rank=, world_size=, step=) belong together: give all three.")
    size = checked_int("world_size", world_size, 1)
    place = Place(checked_int("rank", rank), size, checked_int("step", step))
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
    """Return by what parts are balanced.

    Raises:
        ConfigError: It is nothing that is known.
    """
    if balance is None or balance == "tokens":
        return "tokens" if balance else None
    raise ConfigError(f'balance={balance!r:.80}: use "tokens" or None.')


def refuse(task: str, group: str, asked: Asked, answer: Answer, waited_s: float) -> NoReturn:
    """Raise what an answer other than a part means."""
    place, own = asked.place, asked.wanted
    ranks = ", ".join(map(str, answer.ranks))
    if answer.outcome == "ended" and answer.text == "lost":
        raise RankLost(task=task, step=place.step, ranks=answer.ranks)
    if answer.outcome == "ended" and answer.text == "anew":
        raise LeaseLost(
            task=task,
            ids=(),
            why=f"deliveries of rank {place.rank}'s part failed too often, so step "
            f"{place.step} is formed anew: take it again on all ranks.",
        )
    if answer.outcome == "ended":
        available, blocked, expired, others = ([*map(int, answer.told.split())] + [0] * 4)[:4]
        raise BatchTimeout(
            task=task,
            wanted=own.least,
            available=available,
            waited_s=waited_s,
            blocked=blocked,
            expired=expired,
            others=others,
            missing_ranks=answer.ranks,
        )
    if answer.outcome == "done":
        why = "all ranks have acknowledged it already"
        raise WrongStep(task=task, step=place.step, next_step=answer.number, why=why)
    if answer.outcome == "early":
        why = f"step {answer.number} comes first, on every rank"
        raise WrongStep(task=task, step=place.step, next_step=answer.number, why=why)
    where = f"task {task!r}, consumer group {group!r}"
    if answer.outcome == "unacked":
        raise ConfigError(
            f"{where}: {MOST_AHEAD} steps, from step {answer.number} on, are not acknowledged "
            "by all ranks: call lease.ack() after each optimizer step."
        )
    if answer.outcome == "differs":
        raise ConfigError(
            f"{where}: other ranks ask for {answer.text!r} in step {place.step}, and rank "
            f"{place.rank} for {asked.spec!r} (count, at least, status, balance, query). All "
            "must ask for the same."
        )
    if answer.outcome == "replaced":
        raise ConfigError(
            f"{where}: rank {place.rank} is held by another process. Give every process a rank "
            "of its own."
        )
    if answer.outcome == "held":
        raise ConfigError(
            f"{where}: ranks {ranks} of {answer.number} still live and have steps of their "
            f"own: stop them before you take with world_size={place.world_size} and "
            f"count={own.count}, or use another group=."
        )
    raise ConfigError(
        f"{where}: {answer.number} groups are leased by takes without a rank: ranks need a "
        "consumer group of their own, use another group=."
    )
