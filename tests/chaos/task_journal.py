"""What the journals of all workers say of one task: its puts, takes, rejections and rights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tests.chaos.acknowledgements import Acknowledgements
from tests.chaos.failovers import Span
from tests.chaos.part_puts import PartPuts
from tests.chaos.rights import Admitted

Line = dict[str, Any]


@dataclass
class TaskJournal:
    """What the journals say of one task.

    Attributes:
        acks: Its acknowledgements.
        parts: Its groups in parts.
        admitted: Groups that were put with a right.
        begun: Group -> when its put began; in parts, that of its last part.
        stored: Group -> when its put had returned.
        refused: Groups whose put failed for certain.
        rejecting: Group -> when a rejection of it began first.
        deleted: Group -> when its dead letter was deleted by a call that returned.
        takes, delivered: Takes that returned groups, and their number.
    """

    acks: Acknowledgements
    parts: PartPuts
    admitted: Admitted = field(default_factory=Admitted)
    begun: dict[str, float] = field(default_factory=dict)
    stored: dict[str, float] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    rejecting: dict[str, float] = field(default_factory=dict)
    deleted: dict[str, Span] = field(default_factory=dict)
    delivered: int = 0
    takes: int = 0

    @property
    def acking(self) -> dict[str, float]:
        """Group -> when an acknowledgement of it began first."""
        return self.acks.trying

    @cached_property
    def acked(self) -> dict[str, float]:
        """Group -> when its acknowledgement had returned; none that may be lost."""
        return self.acks.certain()

    @cached_property
    def ending(self) -> dict[str, float]:
        """Group -> when an acknowledgement or a rejection of it began first."""
        both = (*self.rejecting.items(), *self.acking.items())
        return dict(sorted(both, key=lambda each: each[1], reverse=True))

    @cached_property
    def owed(self) -> set[str]:
        """Groups that must be stored in the end: puts that returned, and complete parts."""
        return {*self.stored, *self.parts.complete()}

    def read_put(self, begin: Line, end: Line) -> None:
        """Note a call that may put groups into this task."""
        self.begin_puts(begin.get("groups", ()), begin["t"])
        self.end_puts(end.get("stored", ()), end.get("t", begin["t"]))
        self.refused.update(end.get("refused", ()))
        self.admitted.surely.update(begin.get("admitted", ()))
        if "part" in begin:
            self.parts.add(begin, end)

    def begin_puts(self, names: Iterable[str], at: float) -> None:
        """Note groups that may be stored from now on."""
        _note_first(self.begun, names, at)

    def end_puts(self, names: Iterable[str], at: float) -> None:
        """Note groups that are stored by now."""
        _note_first(self.stored, names, at)

    def read_take(self, worker: str, begin: Line, end: Line) -> None:
        """Note a call that may take groups of this task, or end leases and dead letters."""
        ended = end.get("t", begin["t"])
        _note_first(self.rejecting, begin.get("rejecting", ()), begin["t"])
        self.acks.begin(worker, begin.get("acking", ()), begin["t"])
        if begin["op"] == "drop_letters" and end.get("count") == len(begin["letters"]):
            self.deleted |= dict.fromkeys(begin["letters"], Span(begin["t"], ended))
        self.acks.end(worker, end.get("acked", ()), ended)
        if "delivered" in end:
            self.takes += 1
            self.delivered += len(end["delivered"])
            self.acks.deliver(worker, end["delivered"], begin["t"])

    def close(self) -> None:
        """Note that all journals are read."""
        self.acks.close()
        self.begun |= self.parts.begun()
        self.admitted.surely.update(self.parts.keeping)
        self.admitted.maybe.update(self.parts.admitted)


def _note_first(times: dict[str, float], names: Iterable[str], at: float) -> None:
    for name in names:
        times[name] = min(at, times.get(name, at))
