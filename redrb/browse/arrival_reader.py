"""`ArrivalReader`: follows the groups that arrive in one partition, in a thread."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Final

from redis.exceptions import RedisError

from redrb.connection.deadline import GRACE_S, within
from redrb.connection.failures import is_transient, translate
from redrb.connection.transport import Pipeline, first_error
from redrb.damage import Reading
from redrb.errors import RedrbError, StoreUnavailable
from redrb.stream.task.entries import entry_id, parse_entry
from redrb.stream.task.store import TaskStore

BEHIND: Final = 64
"""Groups that wait to be shown, at most; older ones are skipped."""

_READ_GROUPS: Final = 16
_READ_BYTES: Final = 4 << 20
_BLOCK_S: Final = 1.0
_AWAY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a reader has seen.

    Attributes:
        place: Number of the partition.
        blobs: Number in the partition and bytes of each group.
        put: Groups put into the partition since the reader began.
        unread: Groups among them that were not read yet.
        version: Newest weight version that the task knows.
        anew: Whether the task was created anew since the report before.
        error: Why Redis cannot be read now; None if it can.
    """

    place: int
    blobs: tuple[tuple[int, bytes], ...] = ()
    put: int = 0
    unread: int = 0
    version: int | None = None
    anew: bool = False
    error: RedrbError | None = None


class ArrivalReader:
    """Reads the groups that arrive from now on, and puts reports into a queue.

    It blocks on the stream as `XREAD` does, which no producer or consumer notices. While reports
    are not taken from the queue it waits, and then goes on with the newest groups.
    """

    def __init__(
        self,
        store: TaskStore,
        place: int,
        reports: queue.Queue[Arrived],
        *,
        closing: threading.Event,
        per_s: float | None,
    ) -> None:
        """Begin to read; returns when the place from which it reads is known.

        Args:
            store: The partition.
            place: Its number.
            reports: Where reports go.
            closing: Ends the thread.
            per_s: Groups to read a second, at most; None: all.
        """
        self._store = store
        self._place = place
        self._reports = reports
        self._closing = closing
        self._per_s = per_s
        self._put = 0
        self._before = 0  # groups put in earlier incarnations
        self._began: int | None = None
        self._seen = 0
        self._count = 1
        self._incarnation = b""
        self._version: int | None = None
        store.client.retrying(self._look)
        self._thread = threading.Thread(target=self._run, name="redrb-arrivals", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread, which ends soon after `closing` is set."""
        self._thread.join(_BLOCK_S + GRACE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with within(_BLOCK_S + GRACE_S):
                    report = self._read()
            except (RedisError, RedrbError) as error:
                if self._closing.is_set():
                    return
                self._failed(error)
                continue
            if not self._send(report):
                return
            if self._per_s is not None and report.blobs:
                self._closing.wait(len(report.blobs) / self._per_s)

    def _failed(self, error: RedisError | RedrbError) -> None:
        where = self._store.client.where
        named = translate(error, where) if isinstance(error, RedisError) else error
        away = isinstance(named, StoreUnavailable) or is_transient(error)
        self._send(Arrived(self._place, error=named))
        if away:
            self._closing.wait(_AWAY_S)
        else:
            self._closing.set()

    def _send(self, report: Arrived) -> bool:
        """Put a report into the queue; returns False if the thread is to end."""
        while not self._closing.is_set():
            try:
                self._reports.put(report, timeout=_BLOCK_S)
            except queue.Full:
                continue
            return True
        return False

    def _read(self) -> Arrived:
        """Wait for groups, for a second at most, and return those that are there."""
        anew, last = self._look()
        self._seen = max(self._seen, last - BEHIND)
        asked = self._count
        reply = self._store.client.once(
            *("XREAD", "COUNT", asked, "BLOCK", int(_BLOCK_S * 1000)),
            *("STREAMS", self._store.keys.stream, entry_id(self._seen)),
        )
        entries = [parse_entry(entry) for entry in _entries(reply)]
        if entries:
            largest = max(len(blob or b"") for _, blob in entries)
            self._count = max(1, min(_READ_GROUPS, _READ_BYTES // max(largest, 1)))
            self._seen = entries[-1][0]
        if len(entries) < asked:  # what was put before the look, and was not read, is gone
            self._seen = max(self._seen, last)
        if entries:
            again, last = self._look()
            anew = anew or again
        blobs = tuple((seq, blob) for seq, blob in entries if blob is not None)
        unread = max(last - self._seen, 0)
        return Arrived(self._place, blobs, self._put, unread, self._version, anew)

    def _look(self) -> tuple[bool, int]:
        """Read the counters; returns whether the task was created anew, and its last id."""
        pipeline = Pipeline()
        pipeline.add("HMGET", self._store.keys.puts, "last", "put")
        pipeline.add("HMGET", self._store.keys.task, "incarnation", "version")
        replies = self._store.client.exchange(pipeline)
        error = first_error(replies)
        if error is not None:
            raise error
        incarnation, version = replies[1]
        with Reading(f"the counters of task {self._store.task!r}"):
            last, put = (int(each or 0) for each in replies[0])
            self._version = int(version) if version else None
        anew = self._began is not None and incarnation != self._incarnation
        if self._began is None:
            self._began, self._seen = put, last
        elif anew:
            self._before, self._began, self._seen = self._put, 0, 0
        self._incarnation = incarnation
        self._put = self._before + max(put - self._began, 0)
        return anew, last


def _entries(reply: object) -> list[object]:
    """Return the entries of the only stream in a reply to XREAD, of either protocol."""
    if not reply:
        return []
    if isinstance(reply, dict):
        ((entries,),) = reply.values()
        return list(entries)
    ((_, entries),) = reply  # type: ignore[misc]
    return list(entries)
