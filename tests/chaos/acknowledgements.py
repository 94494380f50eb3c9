"""Acknowledgements in the journals: when each was done, and which of them a failover explains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.chaos.failovers import Failover, Span, lost

Spans = dict[str, list[Span]]


@dataclass
class Acknowledgements:
    """The acknowledgements of one task that returned, and the trainings of ranks.

    They do not wait for replicas: one that a failover to a replica may have taken back does not
    count as certain, and its group may be delivered, trained and acknowledged again.

    Attributes:
        failovers: All failovers of the run.
        trying: Group -> when an acknowledgement of it began first.
        done: Group -> its acknowledgements, in order.
        trained: Group -> from its delivery to a rank to the end of its training, in order.
    """

    failovers: Sequence[Failover]
    trying: dict[str, float] = field(default_factory=dict)
    done: Spans = field(default_factory=lambda: defaultdict(list))
    trained: Spans = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self._tried: dict[tuple[str, str], float] = {}
        self._delivered: dict[tuple[str, str], float] = {}

    def deliver(self, worker: str, names: Iterable[str], began: float) -> None:
        """Note groups that a take delivered."""
        for name in names:
            self._delivered[worker, name] = began
            self._tried.pop((worker, name), None)

    def begin(self, worker: str, names: Iterable[str], at: float) -> None:
        """Note groups that a worker tries to acknowledge from now on."""
        for name in names:
            self.trying[name] = min(at, self.trying.get(name, at))
            self._tried.setdefault((worker, name), at)

    def train(self, worker: str, names: Iterable[str], at: float) -> None:
        """Note groups that ranks have trained, before it tries to acknowledge them."""
        for name in names:
            self.trying.setdefault(name, at)
            self.trained[name].append(Span(self._delivered.get((worker, name), at), at))

    def end(self, worker: str, names: Iterable[str], at: float) -> None:
        """Note groups whose acknowledgement has returned."""
        for name in names:
            self.done[name].append(Span(self._tried.pop((worker, name), at), at))

    def close(self) -> None:
        """Note that all journals are read."""
        for spans in (*self.done.values(), *self.trained.values()):
            spans.sort(key=lambda span: span.ended)

    def certain(self) -> dict[str, float]:
        """Return group -> when its acknowledgement had returned, without those that may be lost."""
        found = dict[str, float]()
        for name, spans in self.done.items():
            kept = [span.ended for span in spans if not lost(span, self.failovers)]
            if kept:
                found[name] = kept[0]
        return found

    def twice(self) -> list[str]:
        """Return groups that are acknowledged again, although the first one cannot be lost."""
        return [
            name
            for name, spans in self.done.items()
            if any(not lost(a, self.failovers, before=b.ended) for a, b in pairwise(spans))
        ]

    def after(self, name: str, delivered: Span) -> bool:
        """Return whether a group was delivered after an acknowledgement that cannot be lost."""
        return any(
            span.ended < delivered.began and not lost(span, self.failovers, before=delivered.ended)
            for span in self.done.get(name, ())
        )

    def trained_twice(self) -> list[str]:
        """Return groups that ranks trained in two steps, with no failover between both."""
        return [
            name
            for name, spans in self.trained.items()
            if any(not lost(Span(a.began, b.ended), self.failovers) for a, b in pairwise(spans))
        ]

    def vanished(self, begun: Mapping[str, float], touched: Mapping[str, float]) -> set[str]:
        """Return groups that were trained and that a failover may have taken back with their puts.

        A group is taken as soon as the primary has it, and its put returns when a replica has it.

        Args:
            begun: Group -> when its put began, of puts that never returned.
            touched: Group -> when somebody began to acknowledge or reject it.
        """
        return {
            name
            for name, at in begun.items()
            if name in touched and lost(Span(at, touched[name]), self.failovers)
        }
