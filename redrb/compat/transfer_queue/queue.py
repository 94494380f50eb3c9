"""`Queue`: the partitions of a run as one process sees them. Each is a table."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from redrb.connection import Client
from redrb.connection.cluster import Cluster
from redrb.errors import ConfigError, StaleRun, StoreError
from redrb.table import Table
from redrb.table.index import MOST_CELLS, MOST_ROWS

RUNS = "partitions"
"""The table that names the current run and its partitions; no partition can have this name."""

_RUN, _PARTITION, _CHECKPOINTS, _TASKS = "run", "partition:", "checkpoints", "tasks"

CREATED = "created"
"""Mark of a partition's beginning, for checkpoints that are older than the partition."""


class Partition:
    """One partition: its table, and the tags of its rows as this process saw them last."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._rows: dict[str, dict[str, Any]] = {}
        self._change: int | None = None
        self._lock = threading.Lock()

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the tags of all rows; from Redis comes only what changed since the last call."""
        with self._lock:
            news = self.table.tags(self._change)
            if news.whole:
                self._rows = {}
            for key in news.gone:
                self._rows.pop(key, None)
            self._rows.update(news.rows)
            self._change = news.change
            return dict(self._rows)

    def put(
        self,
        keys: Sequence[str],
        columns: Mapping[str, Any],
        tags: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Put rows; more than a table takes at once become visible part by part."""
        most = min(MOST_ROWS, MOST_CELLS // max(len(columns), 1))
        if len(keys) > most:
            columns = {name: _sliceable(values) for name, values in columns.items()}
        for first in range(0, len(keys), most):
            part = slice(first, first + most)
            self.table.put(
                keys[part],
                {name: values[part] for name, values in columns.items()}
                if len(keys) > most
                else columns,
                tags and tags[part],
            )

    def tags_and_columns(self, keys: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the tags of rows, and the columns that all of them have."""
        rows = self.rows()
        return [rows.get(key, {}) for key in keys], self.columns(keys)

    def columns(self, keys: Sequence[str]) -> list[str]:
        """Return the columns that all of the rows have, sorted."""
        found = [set(columns or ()) for columns in self.table.columns(keys)]
        return sorted(set.intersection(*found)) if found else []


class Queue:
    """The partitions of a run.

    Rows that were cleared stay until they are older than the checkpoint before the newest one, so
    that a trainer which restarts from a checkpoint finds what its lost steps had consumed.

    Attributes:
        run: Random name of the run that this process has begun or joined; "" before.
        guard: Keeps the actor of the run alive, in the driver.
    """

    def __init__(self, client: Client, namespace: str, secret: str | None) -> None:
        self.client, self.namespace, self.secret = client, namespace, secret
        self.run = ""
        self.guard: Any = None
        self._runs = Partition(Table(client, RUNS, namespace=namespace))
        self._partitions: dict[str, Partition] = {}
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        """Server and namespace, without a password."""
        return f"{self.client.where}, namespace {self.namespace!r}"

    def join(self) -> str:
        """Join the current run; returns its name, "" if there is none."""
        self.run = self._newest()
        return self.run

    def begin(self) -> int:
        """Begin a run: writers of earlier ones are refused, and their rows are cleared.

        The run's own table comes first: a writer of an earlier run that opens a partition after
        this is refused there, so each table that it has opened was opened before its run ends.

        Returns:
            How many rows were cleared; `load_checkpoint` brings them back.
        """
        self._runs.table.begin_run()
        cleared = 0
        for name in self.names():
            table = self.partition(name).table
            table.begin_run()
            cleared += table.clear(None)
        self._runs.table.put([_RUN], tags=[{"name": uuid.uuid4().hex}])
        self.join()
        return cleared

    def expect_checkpoints(self) -> None:
        """Let partitions be marked at their beginning from now on, in later runs, too."""
        self.names()  # raises where Redis has lost the run
        if not self._runs.rows().get(_RUN, {}).get(_CHECKPOINTS):
            self._runs.table.put([_RUN], tags=[{_CHECKPOINTS: True}])

    def names(self) -> list[str]:
        """Return the names of the partitions.

        Raises:
            StaleRun: A newer run has begun.
            StoreError: Redis has lost the run.
        """
        rows = self._runs.rows()
        newest = self._newest(rows)
        if self.run and not newest:
            raise StoreError(
                f"the rows of this run are gone from {self.where}: the server was started without "
                "its data, or somebody deleted them. Start the job again from its checkpoint."
            )
        if self.run and newest != self.run:
            table = self._runs.table
            raise StaleRun(RUNS, run=table.run, newest=table.stats().counts.run)
        return [row.removeprefix(_PARTITION) for row in rows if row.startswith(_PARTITION)]

    def _newest(self, rows: Mapping[str, Mapping[str, Any]] | None = None) -> str:
        found = self._runs.rows() if rows is None else rows
        name: str = found.get(_RUN, {}).get("name", "")
        return name

    def partition(self, name: str) -> Partition:
        """Return a partition, made if it is missing; raises StaleRun if a newer run has begun."""
        with self._lock:
            if name == RUNS:
                raise ConfigError(f"partition {name!r}: redrb uses this name itself.")
            if name not in self._partitions:
                table = Table(
                    self.client,
                    name,
                    namespace=self.namespace,
                    retain="checkpoint",
                    secret=self.secret,
                )
                self._runs.table.put([_PARTITION + name], tags=[{}])
                if self._runs.rows().get(_RUN, {}).get(_CHECKPOINTS):
                    counts = table.stats().counts
                    if not counts.made and not counts.marks:
                        table.mark(CREATED)
                self._partitions[name] = Partition(table)
            return self._partitions[name]

    def declare(self, name: str, tasks: Sequence[str]) -> None:
        """Make a partition, and name the tasks that claim its rows."""
        self.partition(name)
        self._runs.table.put([_PARTITION + name], tags=[{_TASKS: list(tasks)}])

    def tasks(self, name: str) -> list[str] | None:
        """Return the tasks that were declared for a partition; None if none ever were."""
        tags = self._runs.rows().get(_PARTITION + name, {})
        return list(tags[_TASKS]) if _TASKS in tags else None

    def known(self, name: str) -> Partition | None:
        """Return a partition, or None if it is missing."""
        found = self._partitions.get(name)
        return found or (self.partition(name) if name in self.names() else None)


def _sliceable(values: Any) -> Any:
    nested = isinstance(values, torch.Tensor) and values.is_nested
    return list(values.unbind()) if nested else values


def durability(client: Client) -> str:
    """Return in a sentence what a crash of the server loses."""
    node = client.primaries()[0] if isinstance(client, Cluster) else client
    try:
        flat = node.execute("CONFIG", "GET", "append*", "save")
    except StoreError as error:
        return f"How durable its server is, is unknown: {error}"
    words = [word.decode(errors="replace") for word in flat]
    settings = dict(zip(words[::2], words[1::2], strict=True))
    if settings.get("appendonly") != "yes":
        return (
            "Its server writes snapshots only: if it stops, the rows since the last one are lost."
            if settings.get("save")
            else "Its server keeps NOTHING on disk: if it stops, all rows are lost."
        )
    return {
        "always": "Its server syncs each write: a put that has returned survives a power failure.",
        "everysec": "Its server syncs every second: a power failure loses the last second.",
    }.get(settings.get("appendfsync", ""), "Its server syncs when the system does.")
