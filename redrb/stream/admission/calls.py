"""The calls of the scripts in `redrb/lua/admission`: rights are given, returned and kept alive.

Every call may be repeated as it is when a connection breaks, and is.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from redrb.lua.calls import Call, Found, Page


class AdmitReply(Page, frozen=True, kw_only=True):
    """The reply to a request for rights; `more`: rights of dead makers come back, ask again.

    Attributes:
        outcome: "granted"; "wait": too few rights are left; "unset": the task has no
            groups_per_version yet; "refused": it gives no rights, as it has no max_staleness, or
            settings that groups_per_version excludes; "never": more rights are asked for than may
            ever be held; "gone": the task was deleted, or created anew.
        series: Random name of the task's rights.
        version: Weight version that the task knows; None: none.
        released: Groups that may be begun beyond the bound, as all waited for each other.
        held, stored, trained, most, waiting: As in `AdmissionTimeout`.
        oldest_ms: Time for which the oldest right is held.
        oldest_maker: The maker that holds it.
        makers: Some makers that are late for a heartbeat, or for a look at their request.
    """

    outcome: Literal["granted", "wait", "unset", "refused", "never", "gone"]
    series: str = ""
    version: int | None = None
    numbers: tuple[int, ...] = ()
    released: int = 0
    held: int = 0
    stored: int = 0
    trained: int = 0
    most: int = 0
    waiting: int = 0
    oldest_ms: int = 0
    oldest_maker: str = ""
    makers: tuple[str, ...] = ()


class Admit(Call[AdmitReply], frozen=True):
    """Ask for rights, and queue for them; repeated, a request returns the rights it was given.

    Attributes:
        waiter: "<maker>/<request>", another one for each request.
        least: Fewest rights that are accepted.
        ttl_ms: How long the place in the queue is kept; 0: do not queue, leave the queue.
        lease_ms: Silence of the maker's heartbeat after which its rights are taken back.
        hold_ms: Time after which the rights are taken back.
        incarnation: Of the task, as this process knows it.
        series: Random name of the rights, if this request creates their counters.
    """

    script: ClassVar = "admission/admit"
    waiter: str
    count: int
    least: int
    ttl_ms: int
    lease_ms: int
    hold_ms: int
    incarnation: str
    series: str


class GiveBack(Call[Found], frozen=True, kw_only=True):
    """Return rights that are not used: some of a series, or those of a holder, in pages.

    Attributes:
        series: Of the rights; numbers of another series are not those of this maker.
        numbers: The rights, as texts.
        holder: A waiter, which leaves the queue, or a maker that ends; "": none.
        died: Whether the maker is known to have died: its rights count as lost, and its requests
            leave the queue.
    """

    script: ClassVar = "admission/give_back"
    series: str = ""
    numbers: tuple[str, ...] = ()
    holder: str = ""
    died: bool = False


class MakerPulse(Page, frozen=True, kw_only=True):
    """The reply to a maker's heartbeat; `more`: there may be more rights to take back, beat again.

    Attributes:
        outcome: "held": the maker was known, so it has its rights yet; "lost"; "anew": the task was
            created anew, or admits no more.
        taken_back: Rights taken back from dead makers.
        makers: As in `AdmitReply`.
    """

    outcome: Literal["held", "lost", "anew"]
    taken_back: int = 0
    makers: tuple[str, ...] = ()


class BeatMaker(Call[MakerPulse], frozen=True):
    """Renew a maker's deadline; the announcement of its worker goes beside it, if there is one.

    Attributes:
        lease_ms: The maker is dead after so long without a heartbeat.
    """

    script: ClassVar = "admission/heartbeat"
    maker: str
    lease_ms: int
    incarnation: str
    worker: str = ""
