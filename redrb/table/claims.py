"""Claims: leases of rows, which are leases of groups that name them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from redrb.checks import checked_int
from redrb.codec import encode_groups
from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.connection.transport import without_errors
from redrb.errors import BatchTimeout, ConfigError, StaleRun
from redrb.experience import BufferItem
from redrb.keys import TABLE_KEYS, check_name
from redrb.lua.pages import PAGES
from redrb.scopes import Entered, closed_on_error
from redrb.stream import ExperienceStream, Lease, StreamStats
from redrb.stream.task.lookup import task_stats
from redrb.stream.task.removal import remove_task
from redrb.table.calls import Register, Registered
from redrb.table.index import Index, Writing
from redrb.table.reading import Reader, checked_columns
from redrb.table.rows import Rows

REGISTER_AGAIN_S = 10.0
"""Time after which a claim that waits makes sure that its task is registered."""

_PREFIX = 12
"""Bytes of an encoded group before the length of its extras."""


def _frame() -> tuple[bytes, bytes]:
    """Return what stands before and after the length of the extras in the groups of claims."""
    [group] = encode_groups([[BufferItem(None, None, extras={"rows": []})]])
    blob = bytes(group.blob)
    extras = int.from_bytes(blob[_PREFIX : _PREFIX + 4], "little")
    return blob[:_PREFIX], blob[_PREFIX + 4 : -extras]


class Claims:
    """The tasks that claim rows of a table from this process; safe among threads."""

    def __init__(self, client: Client, index: Index, reader: Reader) -> None:
        self._client, self._index, self._reader = client, index, reader
        self._open: dict[str, ClaimingTask] = {}
        self._lock = threading.Lock()

    def open(
        self, task: str, columns: Sequence[str] | None, group_size: int | None
    ) -> ClaimingTask:
        """Return a task that claims, registered; raises ConfigError as `Table.register`."""
        task = check_name("task", task)
        names = None if columns is None else checked_columns(columns)
        known = self._open.get(task)
        if known is None or (names is not None and names != known.columns):
            if names is None:
                raise ConfigError(
                    f"table {self._index.table!r}: task {task!r} was not registered from here: "
                    "give the columns that it needs."
                )
            if not names:
                raise ConfigError(f"columns={columns!r:.80}: give the names of columns.")
            size = 1 if group_size is None else group_size
            checked_int("group_size", size, 1, PAGES["claim_size"])
            with self._lock:
                stream = ExperienceStream(
                    self._client, f"{self._index.table}:{task}", namespace=self._index.namespace
                )
                with closed_on_error(stream):
                    stream.join_group()
                    self.fill(task, names, size)
                fill = partial(self.fill, task, names, size)
                known = ClaimingTask(self._index, self._reader, names, size, stream, fill)
                self._open[task] = known
        elif group_size is not None and group_size != known.size:
            raise ConfigError(f"task {task!r} claims groups of {known.size} rows.")
        return known

    def register(self, task: str, columns: Sequence[str], group_size: int | None) -> None:
        """Register a task, also where Redis has lost one that is open here."""
        known = self._open.get(check_name("task", task))
        if self.open(task, columns, group_size) is known:
            known.stream.join_group()  # creates its stream anew where that is lost
            known.register()

    def fill(self, task: str, columns: list[str], size: int) -> None:
        """Register a task, and let the rows arrive that are complete."""

        def refused(_: Writing, reply: Registered) -> None:
            if reply.outcome == "claims":
                self.delete(task)
                raise ConfigError(
                    f"table {self._index.table!r} has {PAGES['claims']} tasks that claim: no more "
                    "can be registered."
                )
            if reply.outcome == "differs":
                raise ConfigError(
                    f"table {self._index.table!r}: task {task!r} needs the columns "
                    f"{list(reply.columns)} in groups of {reply.size} rows, not {columns} in "
                    f"groups of {size}: use these, or another name."
                )

        asked = {"task": task, "columns": columns, "size": size}
        while self._index.do(Register, *_frame(), refused=refused, **asked).more:
            pass

    def stats(self, task: str) -> StreamStats:
        """Return ledger and counters of a task; writes nothing."""
        name = f"{self._index.table}:{task}"
        return task_stats(self._client, name, namespace=self._index.namespace, group="default")

    def unregister(self, task: str) -> int:
        """Forget a task, so that no rows arrive any more, and delete what it has claimed."""
        task = check_name("task", task)
        self._index.refuse_stale()
        node, prefix = self._index.client, self._index.keys.prefix
        pipeline = node.transaction(f"{prefix}none")
        pipeline.add("HDEL", self._index.keys.claims, task)
        pipeline.add("UNLINK", *(f"{prefix}{kind}:{task}" for kind in TABLE_KEYS["claim"]))
        pipeline.add("EXEC")
        node.retrying(lambda: without_errors(without_errors(node.exchange(pipeline))[-1]))
        return self.delete(task)

    def delete(self, task: str) -> int:
        """Delete what a task has claimed; returns its groups of rows, or raises UnknownTask."""
        known = self._open.pop(task, None)
        name = f"{self._index.table}:{task}"
        groups = remove_task(self._client, name, namespace=self._index.namespace)
        if known is not None:
            known.stream.close()
        return groups


class ClaimingTask:
    """A task that claims rows, opened by this process."""

    def __init__(
        self,
        index: Index,
        reader: Reader,
        columns: list[str],
        size: int,
        stream: ExperienceStream,
        register: Callable[[], None],
    ) -> None:
        self._index, self._reader, self.register = index, reader, register
        self.columns, self.size, self.stream = columns, size, stream

    def take(self, count: int, at_least: int | None, timeout: float | None) -> Claim:
        """Claim rows; raises as `Table.claim` does."""
        groups = self._groups("count", count)
        self.stream.worker.begins()  # it may wait for long
        least = None if at_least is None else self._groups("at_least", at_least)
        if least is not None and least > groups:
            raise ConfigError(
                f"claim({count}, at_least={at_least}): at_least is at most the count."
            )
        with Deadline(timeout) as deadline:
            while True:
                last = deadline.waits_s <= REGISTER_AGAIN_S
                try:
                    lease = self.stream.take(
                        groups,
                        at_least=least if last else None,
                        timeout=min(deadline.waits_s, REGISTER_AGAIN_S),
                    )
                except BatchTimeout as error:
                    self.register()  # Redis may have lost its data meanwhile
                    if last or deadline.over:
                        raise self._in_rows(error, deadline.waited_s) from None
                    text = f"a claim of {count} rows waits on {self.stream!r}"
                    deadline.log(text, self._index.namespace)
                else:
                    try:
                        claim = Claim(self._index, self._reader, self.columns, lease)
                        claim.refuse_stale()
                    except BaseException:  # nobody gets these rows
                        lease.abandon()
                        raise
                    return claim

    def _in_rows(self, error: BatchTimeout, waited_s: float) -> BatchTimeout:
        """Return the error of a take in terms of the table: a group is `size` rows."""
        return replace(
            error,
            wanted=error.wanted * self.size,
            available=error.available * self.size,
            fates={name: groups * self.size for name, groups in error.fates.items()},
            waited_s=waited_s,
            table=self.stream.task.partition(":")[0],
        )

    def _groups(self, name: str, rows: int) -> int:
        groups, rest = divmod(checked_int(name, rows, 1), self.size)
        if rest:
            raise ConfigError(f"{name}={rows}: the task claims rows in groups of {self.size}.")
        return groups


class Claim(Entered):
    """Rows that a task has leased, held by a heartbeat until they are acknowledged or released.

    As a context manager it acknowledges at the end of the block; an exception requeues the rows and
    counts as a failed delivery, an interrupt requeues them unharmed.

    Attributes:
        keys: Keys of the rows, group after group.
        lease: The lease on the groups that name them.
    """

    def __init__(self, index: Index, reader: Reader, columns: Sequence[str], lease: Lease) -> None:
        self._index, self._reader, self._columns, self.lease = index, reader, columns, lease
        self.keys: tuple[str, ...] = tuple(
            key for item in lease.items() for key in item.extras["rows"]
        )

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.keys)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.refuse_stale()
        self.lease.__exit__(kind, error, trace)

    def get(self, columns: Sequence[str] | None = None) -> Rows:
        """Return columns of the rows, as `Table.get` does; default: those that the task needs."""
        return self._reader.get(self.keys, self._columns if columns is None else columns)

    def batch(self, columns: Sequence[str] | None = None, **options: Any) -> dict[str, Any]:
        """Return columns of the rows as `Table.batch` does."""
        return self.get(columns).batch(**options)

    def ack(self) -> None:
        """Acknowledge the rows: this task claims them no more.

        Raises:
            LeaseLost: Another process has taken them over; they were not acknowledged.
            StaleRun: A newer run has begun: they wait for its processes.
            StoreUnavailable: Redis stayed away: the rows are still leased, or will be claimed
                again if this process dies.
        """
        self.refuse_stale()
        self.lease.ack()

    def refuse_stale(self) -> None:
        """Release the rows and raise StaleRun if a newer run of the table has begun."""
        try:
            self._index.refuse_stale()
        except StaleRun:
            self.lease.release()
            raise

    def release(self) -> None:
        """Let the rows wait again, unharmed."""
        self.lease.release()

    def fail(self, reason: str | BaseException) -> None:
        """Let the rows wait again, and count a failed delivery of each group."""
        self.lease.fail(reason)
