"""`Observe`: the call of the script that reads what a task holds and who works on it."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import msgspec

from redrb.connection.transport import Reply
from redrb.lua.calls import Call
from redrb.watch.state.histogram import BOUNDS, Histogram


class StalenessCounts(msgspec.Struct, frozen=True):
    """The staleness of groups: exact counts, or the versions of some groups.

    Attributes:
        ages: Staleness, and groups that have it; those beyond the last bound count together.
        oldest: Oldest version, with exact counts.
        read: Number of groups whose facts were read, where the counts are not exact.
        versions: Versions of those of them that have one.
    """

    groups: int
    ages: list[tuple[int, int]] = msgspec.field(default_factory=list)
    oldest: float = 0.0
    read: int = 0
    versions: list[float] = msgspec.field(default_factory=list)

    def histogram(self, newest: int | None) -> Histogram:
        """Return the histogram, by the newest weight version that the task knows."""
        if newest is None or not (self.read or self.ages):
            return Histogram(unknown=self.groups)
        if self.read:
            known = [int(version) for version in self.versions if abs(version) < 2**53]
            found = Counter(max(0, newest - version) for version in known)
            unknown = self.read - len(known)
            return Histogram.of(found, unknown=unknown, sampled=self.groups > self.read)
        counts = dict(self.ages)
        unknown = self.groups - sum(counts.values())
        beyond = counts.pop(BOUNDS[-1] + 1, 0)
        exact = Histogram.of(counts, unknown=unknown)
        if not beyond:
            return exact
        largest = max(BOUNDS[-1] + 1, newest - int(self.oldest))
        middle = (BOUNDS[-1] + 1 + largest) / 2
        last = Histogram((*[0] * len(BOUNDS), beyond), mean=middle, largest=largest)
        return Histogram.summed([exact, last])


class ObservedGroup(msgspec.Struct, frozen=True):
    """A consumer group of a task.

    Attributes:
        figures: Its counters by name: `redrb/lua/include/counters.lua`.
        waiting, leased: Staleness of its completed groups.
        taken: Staleness of groups ever taken, and their number.
    """

    name: str
    figures: dict[str, int]
    waiting: StalenessCounts
    leased: StalenessCounts
    taken: list[tuple[int, int]] = msgspec.field(default_factory=list)


class Observed(msgspec.Struct, frozen=True):
    """A task at one moment.

    Attributes:
        settings: Its incarnation, and those that were asked for and that it has; empty without a
            task.
        groups: A page of its consumer groups.
        odd_groups: Consumer groups with names that nothing can have.
        seen_ms: When each of the `workers` announced itself, by the server's time.
        memory_bytes: Bytes of groups, facts and dead letters, as Redis estimates them.
        workers: Name and announcement of a page of workers, the newest first. They come behind the
            record.
    """

    settings: dict[str, str] = msgspec.field(default_factory=dict)
    put: int = 0
    server_ms: float = 0.0
    version: int | None = None
    figures: dict[str, int] = msgspec.field(default_factory=dict)
    groups: list[ObservedGroup] = msgspec.field(default_factory=list)
    odd_groups: int = 0
    workers_total: int = 0
    seen_ms: list[float] = msgspec.field(default_factory=list)
    memory_bytes: int | None = None
    workers: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)


class Observe(Call[Observed], frozen=True):
    """Read a task, with work that does not depend on the number of groups.

    Attributes:
        group: Consumer group that is reported also if it has not joined; "": "default", unless only
            others have joined.
        since: The caller has the workers that announced themselves before this ms of the server;
            "-inf": none.
    """

    script: ClassVar = "task/observe"
    group: str
    since: str
    settings: tuple[str, ...] = ()

    def read(self, reply: Reply) -> Observed:
        """Return the record of a reply, and the workers behind it."""
        workers = list(zip(reply[1::2], reply[2::2], strict=True))
        return msgspec.structs.replace(super().read(reply), workers=workers)
