"""The call by which ranks agree on each step, and the record that they agree on."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from redrb.errors import BatchTimeout
from redrb.lua.calls import Call
from redrb.stream.task.entries import Count

MOST_RANKS = 4096


class RankStep(msgspec.Struct, frozen=True):
    """One rank in one step."""

    rank: int
    world_size: int
    step: int


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """The groups of one rank.

    Attributes:
        weights: Of each group, of an order that draws.
    """

    ids: list[Count]
    weights: list[float] | None = None


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one take of all ranks has come to: the parts of a batch, or an error.

    Attributes:
        step: Its step, as rank 0 counts.
        spec: The request, which must be the same for all ranks.
        slot, token: The lease of rank 0 on the whole batch.
        parts: One for each rank.
        total_weight: Sum of the weights of all groups that waited, of an order that draws.
        timeout: The error, if no batch came in time.
        refusal: The text of a ConfigError.
    """

    step: int
    spec: str
    slot: str = ""
    token: str = ""
    incarnation: str = ""
    parts: list[Part] = []
    total_weight: float = 0.0
    timeout: BatchTimeout | None = None
    refusal: str = ""


class StepReply(msgspec.Struct, frozen=True):
    """The reply to a rank.

    Attributes:
        number: The number of the decision: another one than asked for if ranks have begun anew.
        replaced: Another process is this rank now; there is nothing else then.
        decision: The `Decision` that stands, as JSON; None: there is none yet.
        missing: Ranks that have not asked, before the first decision.
        left_ms: Time until the first of the other ranks ends its wait, as far as they wait.
        former: The consumer that was rank 0 before.
    """

    number: int = 0
    replaced: bool = False
    decision: str | None = None
    missing: tuple[int, ...] = ()
    left_ms: int | None = None
    former: str = ""


class AskStep(Call[StepReply], frozen=True):
    """Ask for the next decision.

    Attributes:
        consumer: The process that is this rank.
        number: The decision that comes next, as it has got those before; -1: this process has had
            no reply as this rank.
        left_ms: Time that it waits yet; None: no limit, or it is rank 0.
        decision: JSON of a `Decision`, which stands if there is no other one.
    """

    script: ClassVar = "ranks/ask"
    group: str
    consumer: str
    rank: int
    world_size: Annotated[int, Meta(le=MOST_RANKS)]
    number: int
    left_ms: int | None = None
    decision: str | None = None


class Unread(msgspec.Struct, frozen=True):
    """Which ranks have not read the parts of a decision.

    Attributes:
        missing: Ranks that have still to read theirs.
        skipped: Whether one never will, as it has started again since.
    """

    missing: tuple[int, ...] = ()
    skipped: bool = False


class AskRead(Call[Unread], frozen=True):
    """Ask which ranks have not read the parts of a decision yet; they wake rank 0 then.

    Attributes:
        number: Number of the decision.
    """

    script: ClassVar = "ranks/read"
    group: str
    world_size: int
    number: int
