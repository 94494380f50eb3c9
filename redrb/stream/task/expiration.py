"""`Expiration`: groups that are too stale expire. `StalenessReport`: how stale groups are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import msgspec

from redrb.checks import check_choice
from redrb.codec import decode_items, parse_group
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Status
from redrb.stream.task.calls import Discard, Expire, ExpireMode, ExpireReply, Versions
from redrb.stream.task.description import StalenessRules
from redrb.stream.task.entries import entry_id, parse_entry
from redrb.stream.task.settings import OnExpired
from redrb.stream.task.task import Task
from redrb.unpacking import Reading

EXPIRE_GROUPS = 50
"""Most groups that one script call expires."""

CALLBACK_GROUPS = 32
"""Most groups whose ids are asked for before a callback gets each of them."""

MOST_STALENESS = 1023
"""Larger stalenesses count as this one, see `redrb/lua/include/staleness.lua`."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """Groups by staleness, in weight versions.

    Attributes:
        histogram: Staleness -> groups; a staleness above 1023 counts as 1023.
    """

    histogram: Mapping[int, int] = field(default_factory=dict)

    @property
    def groups(self) -> int:
        """Groups that have a version."""
        return sum(self.histogram.values())

    @property
    def mean(self) -> float:
        """Mean staleness; 0.0 without groups."""
        total = sum(stale * groups for stale, groups in self.histogram.items())
        return total / self.groups if self.groups else 0.0

    @property
    def max(self) -> int:
        """Largest staleness; 0 without groups."""
        return max(self.histogram, default=0)


@dataclass(frozen=True, slots=True)
class StalenessReport:
    """How stale a task's groups are, by their oldest and by their newest token.

    The newest token is known in tasks with `max_token_staleness`.

    Attributes:
        current_version: The weight version that groups are compared with.
        waiting: Waiting groups, by their oldest token.
        waiting_newest: Waiting groups, by their newest token.
        leased: Leased groups, by their oldest token.
        leased_newest: Leased groups, by their newest token.
        taken: Groups ever taken, by the staleness of their oldest token at that time.
        taken_newest: Groups ever taken, by the staleness of their newest token at that time.
        taken_in_flight: The part of `taken` that groups had when they were put; of groups that
            were put while the task knew a version.
        taken_queued: The part of `taken` that groups gained while they waited; of the same groups.
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
    """Expires groups of one consumer group, and reports how stale its groups are."""

    def __init__(self, task: Task, group: str) -> None:
        self._task = task
        self._group = group

    def expire(
        self,
        current_version: int | None,
        rules: StalenessRules,
        statuses: Sequence[Status],
        on_expired: OnExpired | Callable[[list[BufferItem]], object] | None,
        number: int = 0,
    ) -> int:
        """Expire groups that are too stale; see `ExperienceStream.expire` and `Expiry.number`."""
        rules = rules if rules.any else self._task.description.staleness
        if not rules.any:
            raise ConfigError(
                "no staleness is given: call expire(max_staleness=...), or open the task with it."
            )
        version = self._current_version(current_version)
        look = Expire(self._group, CALLBACK_GROUPS, "look", version, rules, list(statuses), number)
        if callable(on_expired):
            return self._discard_each(look, on_expired)
        if on_expired is not None:
            check_choice("on_expired", on_expired, get_args(OnExpired))
        keeps = self._task.description.keep_expired
        mode: ExpireMode = on_expired or ("keep" if keeps else "discard")
        expire = msgspec.structs.replace(look, limit=EXPIRE_GROUPS, mode=mode)
        total, expired = 0, EXPIRE_GROUPS
        while expired == EXPIRE_GROUPS:
            expired = self._run(expire).expired
            total += expired
        return total

    def report(self, current_version: int | None) -> StalenessReport:
        """Return how stale groups are."""
        version = self._current_version(current_version)
        found: dict[str, dict[int, int]] = {}
        page = self._task.store.call(Versions(self._group))
        while True:
            for kind, at, groups in page.counts:
                stale = at if kind[0] == "t" else min(max(version - at, 0), MOST_STALENESS)
                histogram = found.setdefault(kind, {})
                histogram[stale] = histogram.get(stale, 0) + groups
            if not page.place:
                break
            page = self._task.store.call(Versions(self._group, page.place))
        kinds = ("wo", "wn", "lo", "ln", "to", "tn", "tf", "tq")
        return StalenessReport(version, *(Staleness(found.get(kind, {})) for kind in kinds))

    def _current_version(self, given: int | None) -> int:
        if given is not None:
            return given
        store = self._task.store
        version = store.client.execute("HGET", store.keys.task, "version")
        if version is None:
            raise ConfigError(
                "the task knows no weight version yet: give current_version, or open the stream "
                "with weights=NAME so that it learns them from the publisher."
            )
        with Reading(f"the weight version of task {self._task.name!r}"):
            return int(version)

    def _discard_each(self, look: Expire, callback: Callable[[list[BufferItem]], object]) -> int:
        """Discard groups, each after the callback; if it raises, its group and later ones stay."""
        store, total = self._task.store, 0
        while True:
            due = self._run(look).due
            for seq in due:
                at = entry_id(seq)
                entries = store.client.execute("XRANGE", store.keys.stream, at, at)
                payload = parse_entry(entries[0])[1] if entries else None  # None: it is gone
                if payload is not None:
                    callback(decode_items(parse_group(payload)))
                total += store.call(Discard(self._group, [str(seq)]))
            if not due:
                return total

    def _run(self, expire: Expire) -> ExpireReply:
        *_, reply = self._task.store.pages(expire)
        if not reply.indexed:
            raise ConfigError(
                'this task does not index versions: open it with order="stalest", or with '
                "max_staleness / max_token_staleness."
            )
        return reply
