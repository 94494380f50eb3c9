"""Staleness of a task's groups: what expires, and how stale the rest is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from redrb.codec import decode_items, parse_group
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Status
from redrb.stream.task.entries import entry_id, parse_entry
from redrb.stream.task.scripts import ExpireMode, TaskScripts
from redrb.stream.task.settings import OnExpired
from redrb.stream.task.store import TaskStore

CHUNK = 1000
"""Most groups that one script call expires: it takes a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How stale a group may be, in weight versions; None: not by this rule.

    Attributes:
        max_staleness: For its oldest token.
        max_token_staleness: For the newest token that counts of each sample.
    """

    max_staleness: int | None
    max_token_staleness: int | None


@dataclass(frozen=True, slots=True)
class Staleness:
    """Groups by staleness, in weight versions.

    Attributes:
        histogram: Staleness -> groups; those that are 1023 or more behind count as 1023.
    """

    histogram: Mapping[int, int] = field(default_factory=dict)

    @property
    def groups(self) -> int:
        """Groups that have a version."""
        return sum(self.histogram.values())

    @property
    def mean(self) -> float:
        """Mean staleness; 0.0 of none."""
        total = sum(stale * groups for stale, groups in self.histogram.items())
        return total / self.groups if self.groups else 0.0

    @property
    def max(self) -> int:
        """Largest staleness; 0 of none."""
        return max(self.histogram, default=0)


@dataclass(frozen=True, slots=True)
class StalenessReport:
    """How stale a task's groups are, by the oldest and by the newest token.

    The newest is known where the task has `max_token_staleness`.

    Attributes:
        current_version: The version that they are compared with.
        waiting: Groups in the queue, by their oldest token.
        waiting_newest: The same, by the newest.
        leased: Groups in flight, by their oldest token.
        leased_newest: The same, by the newest.
        taken: Groups ever taken, each as stale as it was then, by their oldest token.
        taken_newest: The same, by the newest.
        taken_in_flight: Of `taken` the share that came with the groups: by how many versions their
            oldest token was behind when they were put. Of those put while the task knew a version.
        taken_queued: Of the same the share that came here: versions published while they waited.
    """

    current_version: int
    waiting: Staleness
    waiting_newest: Staleness
    leased: Staleness
    leased_newest: Staleness
    taken: Staleness
    taken_newest: Staleness
    taken_in_flight: Staleness
    taken_queued: Staleness


class Expiration:
    """Expires groups of one consumer group, and reports how stale the others are."""

    def __init__(self, store: TaskStore, group: str, settings: Mapping[str, str]) -> None:
        """Make it.

        Args:
            store: The task.
            group: Name of the consumer group.
            settings: The task's settings, as Redis keeps them.
        """
        self._store = store
        self._scripts = TaskScripts(store)
        self._group = group
        self._own = Rules(*(_number(settings[f"max_{kind}"]) for kind in _KINDS))
        self._keep = settings["on_expired"] == "keep"

    def expire(
        self,
        current_version: int | None,
        rules: Rules,
        statuses: Sequence[Status],
        on_expired: OnExpired | Callable[[list[BufferItem]], object] | None,
    ) -> int:
        """Expire what is too stale; see `ExperienceStream.expire`."""
        if rules == Rules(None, None):
            rules = self._own
        if rules == Rules(None, None):
            raise ConfigError(
                "what is too stale? Give expire(max_staleness=...), or open the task with it."
            )
        version = self._version(current_version)
        if callable(on_expired):
            return self._hand_over(version, rules, statuses, on_expired)
        if on_expired not in (None, "discard", "keep"):
            raise ConfigError(f'on_expired={on_expired!r}: use "discard", "keep" or a function.')
        keep = self._keep if on_expired is None else on_expired == "keep"
        total = 0
        while True:
            mode: ExpireMode = "keep" if keep else "discard"
            expired, _ = self._run(CHUNK, mode, version, rules, statuses)
            total += expired
            if expired < CHUNK:
                return total

    def report(self, current_version: int | None) -> StalenessReport:
        """Return how stale groups are."""
        version = self._version(current_version)
        found: dict[str, dict[int, int]] = {}
        for kind, at, groups in self._scripts.versions(self._group):
            stale = at if kind[0] == "t" else min(max(version - at, 0), 1023)
            histogram = found.setdefault(kind, {})
            histogram[stale] = histogram.get(stale, 0) + groups
        kinds = ("wo", "wn", "lo", "ln", "to", "tn", "tf", "tq")
        return StalenessReport(version, *(Staleness(found.get(kind, {})) for kind in kinds))

    def _version(self, given: int | None) -> int:
        version = self._scripts.current_version() if given is None else given
        if version is None:
            raise ConfigError(
                "the task knows no weight version yet: give current_version, or open the stream "
                "with weights=NAME so that it learns them from the publisher."
            )
        return version

    def _hand_over(
        self,
        version: int,
        rules: Rules,
        statuses: Sequence[Status],
        callback: Callable[[list[BufferItem]], object],
    ) -> int:
        """Tell a function each group that expires, then discard the group.

        A group whose call raised stays, and so do those after it.
        """
        total = 0
        while True:
            _, due = self._run(32, "look", version, rules, statuses)
            for seq in due:
                payload = self._payload(seq)
                if payload is not None:
                    callback(decode_items(parse_group(payload)))
                total += self._scripts.discard(self._group, [seq])
            if not due:
                return total

    def _payload(self, seq: int) -> bytes | None:
        """Return a group's bytes; None when it is gone."""
        at = entry_id(seq)
        entries = self._store.client.execute("XRANGE", self._store.keys.stream, at, at)
        return parse_entry(entries[0])[1] if entries else None

    def _run(
        self, limit: int, mode: ExpireMode, version: int, rules: Rules, statuses: Sequence[Status]
    ) -> tuple[int, tuple[int, ...]]:
        found = self._scripts.expire(
            self._group,
            limit,
            mode=mode,
            version=version,
            max_staleness=rules.max_staleness,
            max_token_staleness=rules.max_token_staleness,
            statuses=statuses,
        )
        if found is None:
            raise ConfigError(
                'this task does not index versions: open it with order="stalest", or with '
                "max_staleness / max_token_staleness."
            )
        return found


_KINDS = ("staleness", "token_staleness")


def _number(text: str) -> int | None:
    return int(text) if text else None
