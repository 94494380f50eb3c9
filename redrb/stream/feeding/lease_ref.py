"""What tells one process which lease of another one a batch belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from redrb.experience import Experience


@dataclass(frozen=True, slots=True)
class Ticket:
    """A lease as other processes see it: enough to end it, and small.

    Attributes:
        consumer: Who took the groups; its heartbeat holds them.
        slot: Where it keeps the lease.
        token: Which lease of this slot it is.
        ids: Ids of the groups.
        samples: Samples in them.
    """

    consumer: str
    slot: str
    token: str
    ids: tuple[int, ...]
    samples: int


@dataclass(eq=False)
class LeasedExperience(Experience):
    """A batch that came from another process, with what ends its lease.

    Attributes:
        ticket: The lease; None when it was ended.
    """

    ticket: Ticket | None = None
