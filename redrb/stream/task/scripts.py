"""`TaskScripts`: a typed method for each script of `redrb/lua/task`.

Each method repeats its script with the same arguments while Redis is away, which the scripts allow.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

from redrb.connection.transport import Argument, Pipeline
from redrb.damage import Reading, whole
from redrb.errors import ConfigError, TaskMismatch
from redrb.experience import Status
from redrb.orders import Score
from redrb.stream.task.rate import UNREAD_FILL
from redrb.stream.task.settings import STORED_DEFAULTS, excluded_by_admission
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import caller

ExpireMode: TypeAlias = Literal["keep", "discard", "look"]

WIRE_FORMAT = 3
"""Version of the layout of a task in Redis."""

_CREATED_WITH = {"format": str(WIRE_FORMAT), **STORED_DEFAULTS}

MOVE_GROUPS = 100
"""Most groups that one script call moves."""

REQUEUE_LETTERS = 20
"""Most dead letters that one script call requeues or deletes."""

SETTLE_GROUPS = 100
"""Most groups that one script call acknowledges for a checkpoint."""

REMOVED_TTL_MS = 3_600_000
"""Time for which processes that used a removed task learn who has removed it."""


class TaskScripts:
    """Runs the scripts that concern a task as a whole."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store

    @overload
    def open(
        self, settings: Mapping[str, str], implied: Mapping[str, str] | None = None
    ) -> dict[str, str]: ...

    @overload
    def open(
        self,
        settings: Mapping[str, str],
        implied: Mapping[str, str] | None = None,
        *,
        create: bool,
        incarnation: str = "",
        generation: int | None = None,
        configured: Collection[str] = (),
    ) -> dict[str, str] | None: ...

    def open(
        self,
        settings: Mapping[str, str],
        implied: Mapping[str, str] | None = None,
        *,
        create: bool = True,
        incarnation: str = "",
        generation: int | None = None,
        configured: Collection[str] = (),
    ) -> dict[str, str] | None:
        """Create the task, or compare its settings; returns all of them, "" for those not given.

        The fields "epoch" and "generation" beside them are that of the producers' records, and the
        number of changes; "configured" names the settings that `configure` has changed, and "held"
        those of them that are given here with another value and stay as they are. Without `create`,
        None is returned for a task that does not exist.

        Args:
            settings: Settings that the task must have; "" for one that was removed.
            implied: Settings that no user gave: they replace only such settings.
            create: Whether to create the task when it does not exist.
            incarnation: Of the task as the caller has opened it: in this incarnation nothing is
                compared.
            generation: Changes of settings that the caller knows of; None at its first open.
            configured: Names of settings that `configure` has changed, as the caller knows.

        Raises:
            TaskMismatch: The task exists with other settings.
            ConfigError: `eviction="stalest"` is asked of a task that indexes no versions, or the
                limit or capacity is smaller than the rate's `min_size`, or another process gave a
                setting that `groups_per_version` excludes.
        """
        asked = {**_CREATED_WITH, **settings}
        flat: list[str] = []
        for given, kind in ((asked, ""), (implied or {}, "implied:")):
            for name, value in given.items():
                flat += [f"configured:{name}" if name in configured else f"{kind}{name}", value]
        changes = "" if generation is None else generation
        who = caller(self._store)
        arguments: list[Argument] = [uuid.uuid4().hex, int(create), who, incarnation, changes]
        head, *reply = self._store.run("task/open", [*arguments, *flat])
        if head == b"unknown":
            return None
        if head == b"differs":
            stored = _pairs(reply)
            raise TaskMismatch(
                self._store.task,
                {name: (stored[name], ({**(implied or {}), **asked}).get(name)) for name in stored},
            )
        return self._settled(head, reply)

    def rebuild_settings(self) -> int:
        """Rebuild the lost settings of a task whose groups are stored; returns their number."""
        flat = [word for item in _CREATED_WITH.items() for word in item]
        return int(self._store.run("repair/task", [uuid.uuid4().hex, *flat]))

    def configure(
        self, revision: str, expected: str, changes: Mapping[str, str]
    ) -> dict[str, str] | None:
        """Change settings; returns all of them as `open` does.

        None: the settings are others than those of the revision `expected`.

        Args:
            revision: Random name of the changed settings.
            expected: Revision for which the changes were checked.
            changes: Settings as Redis keeps them; "" removes one.

        Raises:
            ConfigError: As `open`, or the order cannot be given to stored groups.
        """
        flat = [word for item in changes.items() for word in item]
        who = caller(self._store)
        head, *reply = self._store.run("task/configure", [revision, expected, who, *flat])
        if head in (b"changed", b"gone"):
            return None
        if head == b"unsortable":
            raise ConfigError(
                f"task {self._store.task!r} has groups, and Redis does not know the scores of "
                f"{changes['order']!r}: it can sort them by fifo, lifo, stalest, freshest, "
                "priority, uniform and prioritized. Give one of these, or change the order while "
                "the task is empty."
            )
        return self._settled(head, reply)

    def _settled(self, head: bytes, reply: Sequence[Any]) -> dict[str, str]:
        """Return the settings in a reply, after the work that they have left is done.

        Raises:
            ConfigError: The settings do not fit together.
        """
        if head == b"unversioned":
            raise ConfigError(
                f'task {self._store.task!r} indexes no versions, so eviction="stalest" has nothing '
                'to go by: give order="stalest" or max_staleness too.'
            )
        if head == b"blocked":
            raise self._blocked(*reply)
        if head == b"excluded":
            raise excluded_by_admission(*(word.decode() for word in reply))
        stored = _pairs(reply)
        if stored.pop("unfinished"):  # groups are indexed or sorted, or history deleted, in pages
            for _ in self._store.pages("task/fill", all_of_them=False):
                pass  # whoever opens the task next goes on
        return stored

    def _no_place(self, order: str, former: str) -> ConfigError:
        """Return the error for dead letters that were given up in another order of the task."""
        given_up = f"in the order {former!r}" if former else "before the order changed"
        return ConfigError(
            f"some of these dead letters of task {self._store.task!r} cannot be requeued: their "
            f"groups were given up {given_up}, and Redis cannot compute their scores in the order "
            f"{order!r}. Put their samples as new groups, stream.put(letter.items), and drop the "
            "letters."
        )

    def _blocked(self, name: bytes, most: int, groups: int, gives_limit: int) -> ConfigError:
        """Return the error for a rate and a limit, of two processes, that block both sides."""
        setting = name.decode()
        limit, rate = f"{setting}={most}", f"rate with min_size={groups}"
        why = f"Takes would wait for {groups} stored groups, of which puts store at most {most}"
        if gives_limit:
            advice = f"give a {setting} of at least {groups} here"
        else:
            advice = f"give a min_size of at most {most} here, and a min_diff that needs no more"
        if not groups:
            rate, why, advice = "rate", UNREAD_FILL, "leave one of them out here"
        mine, stored = (limit, rate) if gives_limit else (rate, limit)
        return ConfigError(
            f"task {self._store.task!r}: this process gives a {mine}, and another process gave a "
            f"{stored}. {why}: {advice}, or clear() the task and open it with other settings."
        )

    def join(self, group: str, start: str = "") -> bool:
        """Register a consumer group, page by page; False when the task does not exist.

        Args:
            group: Name of the consumer group.
            start: "" to see every stored group, "+" to see only later ones, or the first id to see,
                history included.
        """
        *_, outcome = self._store.pages("task/join", [group, start])
        return bool(outcome == b"joined")

    def count(self, group: str, status: Status, where: str) -> int:
        """Return how many groups wait in a status; changes nothing.

        For a consumer group that has not joined: all stored groups of that status.
        """
        total, at = 0, b"0"
        while True:
            found, at = self._store.run("task/count", [group, status, where, at])
            total += int(found)
            if at == b"0":
                return total

    def move(self, group: str, status: Status, ids: Sequence[int]) -> int:
        """Move waiting groups to another status; returns how many wait there now.

        Each group moves atomically; many groups move in several script calls.
        """
        moved = 0
        for start in range(0, len(ids), MOVE_GROUPS):
            part = ids[start : start + MOVE_GROUPS]
            *_, (_, found) = self._store.pages("task/move", [group, status, *part])
            moved += int(found)
        return moved

    def rescore(self, order: str, changes: Sequence[tuple[int, float, Score]]) -> int | None:
        """Change priority and score of groups; returns how many are stored.

        None: the task was deleted, or has another order than the scores.
        """
        flat = [word for seq, priority, score in changes for word in (seq, priority, score)]
        outcome, *found = self._store.run("task/rescore", [order, *flat])
        return int(found[0]) if outcome == b"ok" else None

    def expire(
        self,
        group: str,
        limit: int,
        *,
        mode: ExpireMode,
        version: int,
        max_staleness: int | None,
        max_token_staleness: int | None,
        statuses: Sequence[Status],
    ) -> tuple[int, tuple[int, ...]] | None:
        """Expire at most `limit` groups; None when the task does not index versions.

        Returns:
            How many groups expired; with the mode "look" none, and the ids of groups to expire.
        """
        rules = ["-" if rule is None else rule for rule in (max_staleness, max_token_staleness)]
        arguments: list[Argument] = [group, limit, mode, version, *rules, *statuses]
        *_, (outcome, *found) = self._store.pages("task/expire", arguments)
        if outcome == b"unversioned":
            return None
        return (int(found[0]), tuple(found[1:])) if found else (0, ())

    def discard(self, group: str, ids: Sequence[int]) -> int:
        """Discard groups as expired if they wait; returns how many did."""
        return int(self._store.run("task/discard", [group, *ids]))

    def announce(self, worker: str, announcement: bytes, *, ended: bool) -> None:
        """Announce a worker, as `redrb.stream.worker` packs it, to those who look at the task."""
        self._store.run("task/announce", [worker, announcement, int(ended)])

    def requeue(self, group: str, ids: Sequence[int]) -> int:
        """Let dead letters of a consumer group wait again; returns how many.

        Raises:
            ConfigError: A letter has no place in the order that the task has now.
        """
        requeued = 0
        for start in range(0, len(ids), REQUEUE_LETTERS):
            part = ids[start : start + REQUEUE_LETTERS]
            for outcome, *found in self._store.pages("task/requeue", [group, *part]):
                if outcome == b"unsortable":
                    raise self._no_place(*(word.decode() for word in found))
                requeued += int(found[0])
        return requeued

    def drop_letters(self, group: str, ids: Sequence[int]) -> int:
        """Delete dead letters of a consumer group; returns how many."""
        return sum(
            int(self._store.run("task/drop_letters", [group, *ids[at : at + REQUEUE_LETTERS]]))
            for at in range(0, len(ids), REQUEUE_LETTERS)
        )

    def settle(self, group: str, trained: Mapping[int, int], incarnation: str) -> tuple[int, int]:
        """Acknowledge groups, leased or waiting, of an incarnation of the task.

        Args:
            group: Consumer group.
            trained: Samples of each group, by id.
            incarnation: Incarnation of the task in which they were leased.

        Returns:
            How many were not acknowledged yet, and how many were refused, because their ids may be
            those of other groups by now.
        """
        pairs, settled, refused = list(trained.items()), 0, 0
        for start in range(0, len(pairs), SETTLE_GROUPS):
            flat = itertools.chain.from_iterable(pairs[start : start + SETTLE_GROUPS])
            found = self._store.run("task/settle", [group, incarnation, *flat])
            settled, refused = settled + int(found[0]), refused + int(found[1])
        return settled, refused

    def archived(self, since: str, after: str, until: str, count: int) -> list[tuple[int, str]]:
        """Return ids and times, in ms, of archived groups: a page that follows `since`, `after`."""
        reply = self._store.run("task/archived", [since, after, until, count])
        pairs = zip(reply[::2], reply[1::2], strict=True)
        with Reading("the history of a task"):
            return [(int(member), at.decode()) for member, at in pairs]

    def trim(self) -> None:
        """Delete history beyond the period and the number that the task keeps."""
        for _ in self._store.pages("task/trim", [0]):
            pass

    def trim_page(self, nbytes: int = 0) -> bool:
        """Delete a page of such history, or of that which gives way to a put of so many bytes.

        Returns:
            Whether there is more.
        """
        return bool(self._store.run("task/trim", [nbytes]) == b"more")

    def versions(self, group: str) -> list[tuple[str, int, int]]:
        """Return kind, version and number of groups; for taken groups staleness and number.

        It is read in pages: a kind and version may come several times, and groups that move
        meanwhile may be counted twice or not at all.

        The first letter of a kind says waiting, leased or taken, the second one by oldest or newest
        token. The kinds `tf` and `tq` are parts of `to`: stale at put, and by waiting.
        """
        found: list[tuple[str, int, int]] = []
        place = b""
        while True:
            place, *reply = self._store.run("task/versions", [group, place])
            rows = zip(reply[::3], reply[1::3], reply[2::3], strict=True)
            with Reading("the staleness of groups"):
                found += (
                    (kind.decode(), int(version), int(groups)) for kind, version, groups in rows
                )
            if not place:
                return found

    def advance(self, version: int) -> int:
        """Give the task the newest weight version; returns the version that it knows now.

        Without a task: -1.
        """
        outcome, *known = self._store.run("task/advance", [version])
        return int(known[0]) if outcome == b"ok" else -1

    def current_version(self) -> int | None:
        """Return the newest weight version that the task knows; None when it knows none."""
        version = self._store.client.execute("HGET", self._store.keys.task, "version")
        with Reading(f"the weight version of task {self._store.task!r}"):
            return None if version is None else int(version)

    def drop_group(self, group: str) -> int:
        """Remove a consumer group; returns the number of groups deleted with it."""
        return sum(int(found) for _, found in self._store.pages("task/drop_group", [group]))

    def clear(self) -> int:
        """Delete the task; returns the number of groups that were stored.

        A call that is repeated after a broken connection deletes no task that was created since.
        """
        look = Pipeline()
        look.add("HGET", self._store.keys.task, "incarnation")
        look.add("XLEN", self._store.keys.stream)
        incarnation, found = self._store.exchange(look)
        who = caller(self._store)
        arguments: list[Argument] = [incarnation or "", who, REMOVED_TTL_MS]
        outcome, *stored = self._store.run("task/clear", arguments)
        return int(stored[0] if outcome == b"cleared" else found)

    def stats(self, group: str) -> dict[str, int]:
        """Return the task's counters by name; none when there is no such task."""
        reply = self._store.run("task/stats", [group])
        pairs = zip(reply[::2], reply[1::2], strict=True)
        with Reading(f"the counters of task {self._store.task!r}"):
            return {name.decode(): whole(value) for name, value in pairs}


@Reading("the settings of a task")
def _pairs(flat: Sequence[bytes | None]) -> dict[str, str]:
    """Return names and values of a flat reply; "" for no value."""
    return {
        (name or b"").decode(): (value or b"").decode()
        for name, value in zip(flat[::2], flat[1::2], strict=True)
    }
