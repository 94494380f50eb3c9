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
"""Groups of each partition that `next` returns, at most; older ones are skipped."""


class Follower(Browser):
    """A `Browser` that follows the arrivals of its task without polling.

    It blocks on the task's stream, which no producer or consumer notices. On a cluster it blocks on
    the node of the first partition; arrivals on other nodes are read when `next` ends. One thread
    calls `next`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Begin to follow: groups that are put from now on.

        Raises:
            UnknownTask: There is no such task.
            StoreUnavailable: Redis did not answer in time.
        """
        super().__init__(*args, **options)
        with Deadline(at_most=self._timeout_s):
            self._stores = existing_task(self._client, self.task, namespace=self._namespace)
            self._seen = [0] * len(self._stores)
            self._passed = [0] * len(self._stores)  # entries of failed puts are not seen as groups
            self._incarnations = [""] * len(self._stores)
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
        """Wait for the next entry in a partition on the node of the first one."""
        client = self._stores[0].client
        places = {
            store.keys.stream.encode(): place
            for place, store in enumerate(self._stores)
            if store.client is client
        }
        after = [entry_id(self._passed[place]) for place in places.values()]
        block_ms = max(1, int(seconds * 1000))
        reply = client.execute("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", *places, *after)
        # a map by RESP3, pairs by RESP2
        for key, entries in reply.items() if isinstance(reply, dict) else reply or ():
            self._passed[places[key]] = parse_entry(entries[0])[0]

    def _arrived(self) -> tuple[Walk, list[GroupView], int, list[str]]:
        """Return the newest groups since the last look, how many there were, and notes."""
        walk = Walk(self._stores, self._group, where="", looks=MOST_LOOKED, page=NEWEST)
        found: list[GroupView] = []
        notes: list[str] = []
        passed = 0
        for place in range(len(self._stores)):
            newest = list(islice(walk.each(place, "newest"), NEWEST))
            if walk.incarnations[place] not in ("", self._incarnations[place]):
                self._incarnations[place] = walk.incarnations[place]
                self._seen[place] = self._passed[place] = 0
                notes = ["the task was created anew: its ids begin anew"]
            seen, seq = self._seen[place], walk.numbering.seq
            new = [view for view in reversed(newest) if seq(view.id) > seen]
            if new:
                last = self._seen[place] = seq(new[-1].id)
                passed += last - seen
                self._passed[place] = max(self._passed[place], last)
            found += new
        return walk, found, passed, notes
