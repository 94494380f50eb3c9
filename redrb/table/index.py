"""`Index`: the index of a table, as one process has opened it."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias, TypeVar

from msgspec.structs import replace

from redrb.connection import Client
from redrb.connection.client import Request
from redrb.connection.deadline import here
from redrb.connection.transport import Pipeline, Replication, Reply, without_errors
from redrb.errors import ConfigError, OutcomeUnknown, StaleRun, StoreError, UnknownTask
from redrb.forks import in_child
from redrb.keys import TableKeys
from redrb.lua.calls import Call, R
from redrb.lua.pages import PAGES
from redrb.lua.records import Segment, columns_of, read_record, sizes_of, value_of
from redrb.registry import Registry
from redrb.stream.put.pending import ProducerIdentity
from redrb.stream.task.store import QUEUE_TTL_MS
from redrb.stream.task.wakes import wait_for_any
from redrb.table.calls import Answer, BeginRun, Open, Opened, Watch
from redrb.unpacking import Reading

W = TypeVar("W", bound=Answer)

ROWS_OF_A_CALL: Final = PAGES["table_rows"]

MOST_ROWS: Final = PAGES["put_rows"]
"""Most rows of one put, which appears as a whole."""

MOST_CELLS: Final = 65_536
"""Most values of one put, rows times columns: its script takes some 100 ms for them."""


class Row:
    """A row in the index.

    Attributes:
        ids: The number of each column of the table, by name.
        layout: Of each string of the row the columns in it, 0 for one that was replaced.
    """

    __slots__ = ("_keys", "_segments", "ids", "layout", "number")

    def __init__(
        self, keys: TableKeys, number: int, segments: Sequence[Segment], ids: dict[str, int]
    ) -> None:
        self.number, self.ids = number, ids
        self._keys, self._segments = keys, segments
        self.layout: Layout = tuple([tuple(columns_of(segment)) for segment in segments])

    def stored(self, string: int) -> tuple[str, Sequence[int]]:
        """Return the key of a string of the row, and the bytes of each column in it."""
        segment = self._segments[string]
        return value_of(self._keys, segment), sizes_of(segment)

    @property
    def places(self) -> dict[str, Place]:
        """Where each column lies, by name."""
        found: dict[int, Place] = {}
        for string, columns in enumerate(self.layout):
            key, sizes = self.stored(string)
            for column, size, end in zip(columns, sizes, accumulate(sizes), strict=True):
                found[column] = Place(key, end - size, size)
        return {name: found[column] for name, column in self.ids.items() if column in found}


class Place(NamedTuple):
    """Where a column of a row lies.

    Attributes:
        key: The string that holds it.
        begin, length: The part of it that is the column.
    """

    key: str
    begin: int
    length: int


Layout: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Writing:
    """One call that changes rows, and the names by which a repetition is recognized.

    Attributes:
        last: Whether its time is up: this request leaves the queue, and none follows it.
    """

    identity: ProducerIdentity
    opened: Opened
    attempts: int = 0
    last: bool = False

    @property
    def names(self) -> dict[str, str | int]:
        """What the calls of the scripts have in common."""
        return {
            "writer": self.identity.name,
            "operation": self.identity.operation,
            "epoch": self.opened.epoch,
            "incarnation": self.opened.incarnation,
            "in_run": self.opened.run,
        }


class Index:
    """The index of a table: all scripts of a table run through it; safe among threads."""

    def __init__(
        self, client: Client, table: str, namespace: str, given: dict[str, str], *, create: bool
    ) -> None:
        self.keys = TableKeys.of(namespace, table)
        self.table, self.namespace = table, namespace
        self.client = client.at(self.keys.stream)
        self.replication = Replication(client.min_replicas)
        self._home, self._given, self._create = client, given, create
        self.opened = Opened("unknown")
        self._begin()
        in_child(self._begin)
        self.open()

    def _begin(self) -> None:
        self._idle: deque[ProducerIdentity] = deque()

    def open(self) -> None:
        """Learn incarnation, run and settings; create the table where it is not there.

        Raises:
            ConfigError: It has other settings than those given here.
            UnknownTask: There is no such table, and it must not be created.
        """
        found = self.call(Open(uuid.uuid4().hex, self._create, self.opened.run, self._given))
        if found.outcome == "unknown":
            raise self.unknown()
        if found.outcome == "differs":
            listed = ", ".join(
                f"{name} is {stored or 'not set'}, not {self._given[name]}"
                for name, stored in sorted(found.settings.items())
            )
            raise ConfigError(
                f"table {self.table!r} exists with other settings: {listed}. Open it without them, "
                "change limit and max_bytes with table.configure(...), or use another name."
            )
        if self.opened.outcome == "ok":  # a process stays in the run in which it began
            found = replace(found, run=self.opened.run)
        self.opened = found
        if not found.reads_only:
            Registry(self._home, self.namespace).add("table", self.table)

    def reopen(self, refused: str) -> None:
        """Open the table again, whose incarnation is not `refused` any more."""
        self.open()
        if self.opened.incarnation == refused:
            raise StoreError(
                f"table {self.table!r}: its scripts refuse what Redis has just returned: its keys "
                "are damaged."
            )

    def begin_run(self) -> int:
        """Begin a run, in which this process is from now on; returns its number."""
        run = self.do(BeginRun, token=uuid.uuid4().hex).run
        self.open()
        self.opened = replace(self.opened, run=run)
        return run

    def unknown(self) -> UnknownTask:
        """Return the error of a table that is not there."""
        where = self.client.where
        return UnknownTask(self.table, namespace=self.namespace, where=where, kind="table")

    def call(self, call: Call[R], *beside: bytes) -> R:
        """Run a script on the index, and repeat it while Redis is away."""
        return call.run(self.client, [self.keys.stream], *beside)

    def request(
        self, call: Call[R], *beside: bytes, before: Callable[[Pipeline], None] | None = None
    ) -> Request[R]:
        """Return the request of a script, in one transaction with the commands of `before`.

        Without these it is no transaction: at its memory limit a server refuses every one.
        """
        replication = self.replication
        made = Pipeline()
        if before is not None:
            made = self.client.transaction(f"{self.keys.prefix}none")
            before(made)
        call.add_to(made, [self.keys.stream], *beside)
        if before is not None:
            made.add("EXEC")
        replication.add_to(made)

        def result(replies: list[Reply]) -> R:
            done, confirmed = replication.divide(replies)
            replies = without_errors(done)
            reply = call.read((replies if before is None else without_errors(replies[-1]))[-1])
            if replication.min_replicas:
                replication.check(confirmed)
            return reply

        return Request(self.client, made, result)

    def change(
        self,
        make: Callable[[Writing], Request[W]],
        refused: Callable[[Writing, W], object] | None = None,
    ) -> W:
        """Do a call that changes the table, once however often its request is repeated.

        Where the table is not the one that was opened any more it is opened again.

        Args:
            refused: Called after a request that has not changed the table, or not this time. It
                raises, or prepares the next attempt, after outcomes that only this call has.

        Raises:
            StaleRun: A newer run has begun.
            OutcomeUnknown, ConfigError, StoreUnavailable: As `Table.put` says.
        """
        try:
            identity = self._idle.pop()
        except IndexError:
            identity = ProducerIdentity()
        identity.operation += 1
        writing = Writing(identity, self.opened)
        try:
            while True:
                writing.last = here().over
                request = make(writing)
                try:
                    reply = request.result()
                finally:
                    writing.attempts += request.attempts
                if reply.outcome == "ok":
                    return reply
                if refused is not None:
                    refused(writing, reply)
                if reply.outcome == "again":
                    return reply
                self._renew(writing, reply)
        finally:
            self._idle.append(identity)

    def do(
        self,
        kind: type[Call[W]],
        *beside: bytes,
        refused: Callable[[Writing, W], object] | None = None,
        **asked: object,
    ) -> W:
        """Do a call with these fields as `change` does; the fields that name it are filled in."""
        names = kind.__struct_fields__

        def request(writing: Writing) -> Request[W]:
            own = {name: value for name, value in writing.names.items() if name in names}
            return self.request(kind(**own, **asked), *beside)

        return self.change(request, refused)

    def _renew(self, writing: Writing, reply: Answer) -> None:
        """Let the next attempt of a call that was refused be about the table of now."""
        before = writing.opened
        if reply.outcome == "stale":
            raise StaleRun(self.table, run=before.run, newest=reply.run)
        if reply.outcome == "gone":
            self.reopen(before.incarnation)
        elif reply.outcome == "forgotten":
            if writing.attempts > 1:
                raise OutcomeUnknown(
                    f"table {self.table!r}: nobody knows whether these rows are stored: the "
                    "connection broke, and the table had forgotten this writer when Redis was "
                    "reached again. Put them again: columns and tags that are stored already stay "
                    "as they are.",
                    groups=reply.count,
                )
            self.opened = replace(before, epoch=reply.epoch)
        else:  # `refused` has prepared it
            return
        writing.opened = self.opened
        if writing.opened.incarnation != before.incarnation:
            writing.attempts = 0

    def newest_change(self, waiter: str = "", after: int = -1, ttl_ms: int = 0) -> int:
        """Return the newest change; a waiter queues if it is `after`. A lost table is made anew."""
        while True:
            incarnation = self.opened.incarnation
            newest = self.call(Watch(incarnation, waiter, after, ttl_ms))
            if newest >= 0:
                return newest
            self.reopen(incarnation)

    def refuse_stale(self) -> None:
        """Raise StaleRun before a change that no script refuses."""
        [run] = self.client.execute("HMGET", self.keys.task, "run")
        newest = int(run or 0)
        if newest > self.opened.run:
            raise StaleRun(self.table, run=self.opened.run, newest=newest)

    @property
    def ttl_ms(self) -> int:
        """Time for which a call that waits stays in its queue; 0 when its time is up."""
        return 0 if here().over else QUEUE_TTL_MS

    def wait(self, waiter: str) -> bool:
        """Block until `waiter` is woken, a second at most, or until the call's time is up."""
        return wait_for_any([(self.client, self.keys.wake(waiter))])

    def retained_values(self, after: int) -> Iterator[str]:
        """Return the keys of the values of rows that were cleared after a change and retained."""
        while True:
            found = self.client.execute(
                "ZRANGEBYSCORE", self.keys.cleared, f"({after}", "+inf", "WITHSCORES", "LIMIT", 0,
                ROWS_OF_A_CALL,
            )  # fmt: skip
            if not found:
                return
            with Reading(f"the index of table {self.table!r}"):
                after = int(float(found[-1]))
                for record in filter(
                    None, self.client.execute("HMGET", self.keys.rows, *found[::2])
                ):
                    for segment in read_record(record)[1]:
                        yield value_of(self.keys, segment)

    def find(self, rows: Sequence[str]) -> list[Row | None]:
        """Return rows by key, None where there is none."""
        return [
            row
            for first in range(0, len(rows), MOST_ROWS)
            for row in self._find(rows[first : first + MOST_ROWS])
        ]

    def _find(self, rows: Sequence[str]) -> list[Row | None]:
        pipeline = Pipeline()
        pipeline.add("HMGET", self.keys.keys, *rows)
        pipeline.add("HGETALL", self.keys.columns)
        numbers, columns = Request(self.client, pipeline, without_errors).result()
        wanted = [number for number in numbers if number is not None]
        # a row that is cleared meanwhile has no record
        records = self.client.execute("HMGET", self.keys.rows, *wanted) if wanted else []
        with Reading(f"the index of table {self.table!r}"):
            names = [name.decode() for name in columns[::2]]
            ids = dict(zip(names, map(int, columns[1::2]), strict=True))
            found = {
                number: Row(self.keys, int(number), read_record(record)[1], ids)
                for number, record in zip(wanted, records, strict=True)
                if record
            }
            return [found.get(number) for number in numbers]
