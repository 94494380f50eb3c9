"""A table: makers put rows in two puts, trainers claim and clear them, one marks and restores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import redrb
from redrb.connection import Client
from redrb.errors import ConfigError, MissingRows
from redrb.watch.values import remove_table
from tests.chaos import options
from tests.chaos.makers import TIMEOUTS_S, Maker
from tests.chaos.worker import Worker

TABLE, TASK = "rows", "actor"


def opened(client: Client) -> redrb.Table:
    return redrb.Table(client, TABLE, namespace=options.NAMESPACE, retain="checkpoint")


class _Uses(Worker):
    """Opens the table."""

    def open(self, client: Client) -> None:
        with self.journal.call("table_open", options.RETRY_S):
            self._table = opened(client)

    def close(self) -> None:
        """Nothing is to be closed."""


class Writes(_Uses, Maker):
    """Puts rows, and a further column of them later."""

    def step(self) -> None:
        self.pause(self.dice.uniform(0, 0.1))
        names, timeout = self.new_names(self.dice.randint(1, 5)), self.dice.choice(TIMEOUTS_S)
        with self.journal.call("table_put", timeout):
            tags = [{"name": name} for name in names]
            self._table.put(names, {"x": names}, tags, timeout=timeout)
        with self.journal.call("table_put", timeout) as outcome:
            self._table.put(names, {"y": names}, timeout=timeout)
            outcome["rows"] = names


class Claims(_Uses):
    """Claims rows that have both columns, acknowledges them, and clears some."""

    def open(self, client: Client) -> None:
        super().open(client)
        with self.journal.call("table_open", options.RETRY_S):
            self._table.register(TASK, ["x", "y"])

    def step(self) -> None:
        with self.journal.call("table_claim", 1.0):
            claim = self._table.claim(TASK, count=self.dice.randint(1, 8), at_least=1, timeout=1.0)
        with suppress(MissingRows):  # another one has cleared them
            found = claim.get()
            assert found["x"] == found["y"] == list(claim.keys), (claim.keys, dict(found))
        with self.journal.call("table_ack", options.RETRY_S):
            claim.ack()
        if self.dice.random() < 0.7:
            with self.journal.call("table_clear", options.RETRY_S, clearing=claim.keys):
                self._table.clear(claim.keys)


class Marks(_Uses):
    """Marks, and returns to a mark now and then."""

    def step(self) -> None:
        self.pause(self.dice.uniform(0.2, 1.5))
        with self.journal.call("table_mark", options.RETRY_S):
            self._table.mark(f"m{self.dice.randrange(3)}")
        if self.dice.random() < 0.3:
            with self.journal.call("table_restore", options.RETRY_S), suppress(ConfigError):
                self._table.restore(self.dice.choice(list(self._table.marks())))


def check(url: str, journals: Iterable[Sequence[dict[str, Any]]]) -> list[str]:
    """Return findings: each row whose second put returned is there, unless somebody cleared it."""
    owed: set[str] = set()
    cleared: set[str] = set()
    for line in (line for lines in journals for line in lines):
        owed.update(line.get("rows", ()))
        cleared.update(line.get("clearing", ()))
    with redrb.connect(url, retry_s=options.RETRY_S) as client:
        table = opened(client)
        stats, rows = table.stats(), table.tags().rows
        findings = [f"row {name} of the table is lost" for name in owed - cleared - rows.keys()]
        counts = stats.counts
        if counts.made != counts.rows + counts.cleared + counts.dropped or counts.rows != len(rows):
            findings.append(f"the table's ledger does not balance: {counts}")
        findings += [
            f"the ledger of claims of {task} does not balance: {one.ledger}"
            for task, one in stats.tasks.items()
            if not one.ledger.balanced
        ]
        for name, tags in rows.items():
            found = table.get([name])
            wrong = {column for column in found if found[column] != [name]}
            if wrong or tags != {"name": name} or (name in owed and len(found) < 2):
                findings.append(f"row {name} of the table is torn: {tags}, {dict(found)}")
    return findings


def delete(url: str) -> None:
    """Delete the table as `redrb rm` does: with values that a killed process had put for no row."""
    with redrb.connect(url, retry_s=options.RETRY_S) as client:
        opened(client)  # it is there, even if nobody has put
        remove_table(client, TABLE, namespace=options.NAMESPACE)
