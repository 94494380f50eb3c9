"""`Follower`: the groups of a task as they arrive."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from redrb.connection.deadline import Deadline
from redrb.stream.task.entries import entry_id, parse_entry
from redrb.stream.task.lookup import existing_task
from redrb.watch.groups.browser import Browser
from redrb.watch.groups.choice import MOST_LOOKED
from redrb.watch.groups.records import GroupView, Page
from redrb.watch.groups.walk import Walk
from redrb.words import counted

NEWEST: Final = 64
"""Groups that `next` returns, at most; older ones are skipped."""


class Follower(Browser):
    """A `Browser` that follows the arrivals of its task without polling.

    It blocks on the task's stream, which no producer or consumer notices. One thread calls `next`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Begin to follow: groups that are put from now on.

        Raises:
            UnknownTask: There is no such task.
            StoreUnavailable: Redis did not answer in time.
        """
        super().__init__(*args, **options)
        with Deadline(at_most=self._timeout_s):
            self._store = existing_task(self._client, self.task, namespace=self._namespace)
            self._seen = 0
            self._passed = 0  # entries of failed puts are not seen as groups
            self._incarnation = ""
            self._arrived()

    def next(self, timeout_s: float, *, full: bool = False) -> Page:
        """Return the groups that have arrived, the oldest first; none if none came in time.

        Args:
            timeout_s: Seconds to wait for groups.
            full: Whether to decode their samples; else only the rewards.

        Raises:
            StoreUnavailable: Redis did not answer in time; the next call goes on.
        """
        with Deadline(timeout_s):
            self._block(timeout_s)
        with Deadline(at_most=self._timeout_s):
            walk, found, passed, notes = self._arrived()
            views = self._read(walk, found, full=full)
        if passed > len(views):
            notes.append(
                f"{counted(passed - len(views), 'group', 'are')} not shown: they came faster than "
                "they are read, or were gone before"
            )
        return self._page(walk, views, notes)

    def _block(self, seconds: float) -> None:
        store, after = self._store, entry_id(self._passed)
        block_ms = max(1, int(seconds * 1000))
        read = ("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", store.keys.stream, after)
        reply = store.client.execute(*read)
        # a map by RESP3, pairs by RESP2
        for _, entries in reply.items() if isinstance(reply, dict) else reply or ():
            self._passed = parse_entry(entries[0])[0]

    def _arrived(self) -> tuple[Walk, list[GroupView], int, list[str]]:
        walk = Walk(self._store, self._group, where="", looks=MOST_LOOKED, page=NEWEST)
        notes: list[str] = []
        newest = list(islice(walk.through("newest"), NEWEST))
        if walk.incarnation not in ("", self._incarnation):
            self._incarnation = walk.incarnation
            self._seen = self._passed = 0
            notes = ["the task was created anew: its ids begin anew"]
        seen = self._seen
        new = [view for view in reversed(newest) if view.id > seen]
        if new:
            self._seen = new[-1].id
            self._passed = max(self._passed, self._seen)
        return walk, new, self._seen - seen, notes
