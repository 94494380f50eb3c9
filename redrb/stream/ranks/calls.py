"""The calls of the scripts in `redrb/lua/ranks`: ranks get their parts of a step, and end them.

Every call may be repeated as it is when a connection breaks, and is.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

from redrb.lua.calls import Call, Page
from redrb.stream.take.calls import Outcome, TakeReply
from redrb.stream.take.cause import NO_CAUSE, Cause

RANKS = "ranks"
"""The consumer that leases the parts of all ranks, see `redrb/lua/include/ranks.lua`."""

MOST_STEPS = 64
"""Most steps that are formed and not acknowledged by all ranks."""

UNFINISHED = TakeReply("more")
"""The last look of an attempt that ended before its groups were counted."""

RankOutcome: TypeAlias = Literal[
    "part",
    "form",
    "wait",
    "ended",
    "done",
    "early",
    "unacked",
    "differs",
    "replaced",
    "held",
    "leased",
    "gone",
    "more",
]

Loss: TypeAlias = Literal["", "replaced", "anew", "ended"]
"""Why a rank cannot end its part any more: another process is this rank; the step was formed again;
the ranks have ended, or have ended this step, while this one was silent. "" if it can."""


class RankStep(msgspec.Struct, frozen=True):
    """One rank in one step."""

    rank: int
    world_size: int
    step: int

    @property
    def slot(self) -> str:
        """The slot to which this rank's part of the step is leased."""
        return f"{RANKS}/{self.step}.{self.rank}"


class RankReply(msgspec.Struct, frozen=True):
    """The reply to a rank that asked for its part.

    Attributes:
        outcome: "part"; "form": this rank forms the step; "wait": for `ranks`, which have not asked
            yet; "ended": no rank gets a part in this attempt; "done": all ranks have acknowledged
            the step; "early": an earlier step is not formed yet; "unacked": too many steps are
            unacknowledged; "differs": other ranks ask for something else; "replaced": another
            process is this rank; "held": other ranks take from this consumer group; "leased": other
            consumers lease entries of it; "gone": there is no such task, or it was created anew;
            "more": there is more to do before, ask again.
        number: The attempt of "form" and "wait"; the next step of "done" and "early"; the first
            unacknowledged step; the number of the ranks or of the entries that are held.
        ranks: Of "wait"; of "held" those that live; of "ended" those that are missing or lost.
        ids: Groups of the part.
        weights: Weight by id, and under 0 the weight of all groups that waited, of an order that
            draws.
        reason: Why an attempt ended: too few groups in time; ranks died; the step is formed again.
        last_look: Of an attempt that ended by its timeout: what the last take found.
        spec: The request of the other ranks.
    """

    outcome: RankOutcome
    number: int = 0
    ranks: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    weights: dict[int, float] | None = None
    reason: Literal["short", "lost", "anew"] = "short"
    last_look: TakeReply | None = None
    spec: str = ""


class AskPart(Call[RankReply], frozen=True):
    """Ask for a rank's part of a step.

    Attributes:
        consumer: The process that is this rank.
        spec: The request, the same for all ranks; its first word is the number of groups.
        attempt: Attempt in which the rank asked before, or 0.
        joined: Whether this process was this rank before; if not, the rank starts, and has trained
            all earlier steps.
        last: Whether the rank's time is up.
        lease_ms: Silence after which the rank is lost.
        incarnation: Of the task, as this process knows it.
        most_steps: Formed steps that may be unacknowledged.
    """

    script: ClassVar = "ranks/take"
    group: str
    consumer: str
    place: RankStep
    spec: str
    attempt: int
    joined: bool
    last: bool
    lease_ms: int
    incarnation: str
    most_steps: int = MOST_STEPS


class DealtPart(msgspec.Struct, frozen=True):
    """The groups that a rank is dealt.

    Attributes:
        ids: The groups, as texts: formatting numbers takes Lua ten times as long.
        weights: Of an order that draws, as in `RankReply`; a dict that is not empty.
    """

    ids: list[str]
    weights: dict[str, float] | None = None


class AssignParts(Call[Literal["ok", "again"]], frozen=True):
    """Deal the batch of a step to the ranks; "again": the attempt is over, or has another batch.

    Attributes:
        attempt: The one in which the batch was leased: the token of that lease.
        spec: The request of all ranks.
        parts: One for each rank.
    """

    script: ClassVar = "ranks/assign"
    group: str
    step: int
    attempt: int
    spec: str
    parts: list[DealtPart]


class EndAttempt(Call[Literal["ended", "formed"]], frozen=True):
    """End an attempt whose time is up, for all ranks; "formed": it has formed a step before.

    Attributes:
        last_look: What the last take found, for the errors of all ranks.
    """

    script: ClassVar = "ranks/end"
    group: str
    attempt: int
    last_look: TakeReply


class PartEnd(Page, frozen=True):
    """Whether a part was ended; with `more`, more groups of its step are left to acknowledge."""

    loss: Loss = ""


class FinishPart(Call[PartEnd], frozen=True):
    """End a rank's part of a step, or groups of it.

    A rank that was silent for too long still ends its parts, while no other process is this rank.

    Attributes:
        outcome: "ack": the whole part; "release": it is kept for this rank; "fail": likewise, and
            counts as a failed delivery; "reject", "expire": `seqs`, at once; "leave": the process
            of the rank ends, and all its parts are kept.
        seqs: The groups, as texts; none in a further page.
        reason: Why they failed, or are rejected.
        samples: Samples trained.
    """

    script: ClassVar = "ranks/finish"
    group: str
    consumer: str
    rank: int
    step: int
    outcome: Outcome | Literal["leave"]
    seqs: tuple[str, ...] = ()
    reason: Cause = NO_CAUSE
    samples: int = 0
