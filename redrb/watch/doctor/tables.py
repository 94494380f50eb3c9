"""What a table's index says against the values on all nodes, and what dead processes have left."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from redrb.connection import Client
from redrb.connection.client import Request, scan_hash
from redrb.connection.deadline import here
from redrb.connection.transport import Pipeline, without_errors
from redrb.keys import TableKeys
from redrb.lua.records import read_record, value_of
from redrb.table.payload import Wanted, by_node, exchange, read, unlink
from redrb.table.removal import PAGE, empty_trash, stored_values
from redrb.table.values import TagReader
from redrb.unpacking import Reading
from redrb.watch.state.findings.wording import finding_of, listed, redrb_command, shown
from redrb.watch.state.model import Finding, State
from redrb.words import counted

OLD_S: Final = 900
"""Seconds without a use after which a value that no row has is an orphan: no put takes so long."""

LEFT_S: Final = 2.0
"""Time that is left for the other checks when the search of values ends."""

TRASH_S: Final = 1.0
"""Time after which values are still to be deleted that nobody deletes."""

_LOOKED: Final = 100
"""Most rows whose values are looked for again, and values of the trash."""


@dataclass(frozen=True, slots=True)
class TableExamination:
    """A table at one moment.

    Attributes:
        orphans: Keys of old values that no row has.
        gone: Keys of rows whose values are gone, the first of them.
        differences: Where parts of the index contradict each other.
        trash: Values of cleared or replaced rows that nobody deletes.
        whole: Whether all values were looked at.
        left: Whether there are only values, of a table that was not deleted, or resumed, to the
            end, or is just now.
        beside: Values of no row, and not in the trash, if an earlier table was left when this one
            was created.
    """

    name: str
    orphans: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    trash: int = 0
    whole: bool = True
    left: bool = False
    beside: int = 0

    @property
    def subject(self) -> str:
        """The subject of its findings."""
        return f"table {self.name}"


def examine_table(client: Client, namespace: str, name: str) -> TableExamination:
    """Examine a table; a search of its values that takes too long is left out."""
    keys = TableKeys.of(namespace, name)
    node = client.at(keys.stream)
    left, beside = node.execute("HMGET", keys.task, "left", "beside")
    if left:
        return TableExamination(name, left=True)
    differences = _differences(node, keys) and _differences(node, keys)  # rows change meanwhile
    trash = _trash(node, keys)
    stored: dict[str, bool] = {}  # whether a row has the value
    for page in stored_values(client, keys):
        stored.update((key.decode(errors="replace"), False) for key in page)
        if here().left_s < LEFT_S:
            return TableExamination(name, differences=differences, trash=trash, whole=False)
    lacking: list[bytes] = []
    for records in scan_hash(node, keys.rows):
        for number, record in records:
            for key in _values(keys, record):
                if key in stored:
                    stored[key] = True
                else:
                    lacking.append(number)
        if here().left_s < LEFT_S:
            return TableExamination(name, differences=differences, trash=trash, whole=False)
    unused = [key for key, used in stored.items() if not used]
    gone = _gone(client, node, keys, list(dict.fromkeys(lacking))[:_LOOKED])
    return TableExamination(
        name,
        tuple(_old(client, unused)),
        tuple(gone),
        differences,
        trash,
        beside=_outside_trash(node, keys, unused) if beside else 0,
    )


def _differences(node: Client, keys: TableKeys) -> tuple[str, ...]:
    pipeline, prefix = Pipeline(), keys.prefix
    for command, key in (
        ("HLEN", "keys"),
        ("ZCARD", "changes"),
        ("ZCARD", "cleared"),
        ("HLEN", "rows"),
        ("HLEN", "tags"),
    ):
        pipeline.add(command, f"{prefix}{key}")
    rows, changes, cleared, records, tags = without_errors(node.exchange(pipeline))
    if rows == changes and records == tags == rows + cleared:
        return ()
    text = (
        f"The index has {rows:,} keys of rows, {changes:,} rows by their change, {cleared:,} "
        f"retained ones, {records:,} records and tags of {tags:,}."
    )
    return (text,)


def _trash(node: Client, keys: TableKeys) -> int:
    """Return how many values are to be deleted, if some of them stay so."""
    before = node.execute("SRANDMEMBER", keys.trash, _LOOKED)
    if not before:
        return 0
    threading.Event().wait(TRASH_S)
    if not any(node.execute("SISMEMBER", keys.trash, member) for member in before[:3]):
        return 0
    return int(node.execute("SCARD", keys.trash))


def _outside_trash(node: Client, keys: TableKeys, names: Sequence[str]) -> int:
    """Return how many of these values are not to be deleted soon."""
    outside = 0
    for first in range(0, len(names), PAGE):
        pipeline = Pipeline()
        for name in names[first : first + PAGE]:
            pipeline.add("SISMEMBER", keys.trash, name)
        outside += without_errors(node.exchange(pipeline)).count(0)
    return outside


def _values(keys: TableKeys, record: bytes) -> Iterator[str]:
    with Reading("the record of a row"):
        for segment in read_record(record)[1]:
            yield value_of(keys, segment)


def _old(client: Client, names: Sequence[str]) -> Iterator[str]:
    """Yield values that nobody has used for long, and that are there."""
    for first in range(0, len(names), PAGE):
        page = names[first : first + PAGE]
        requests, places = [], []
        for node, of_node in by_node(client, page).items():
            pipeline = Pipeline()
            for place in of_node:
                pipeline.add("OBJECT", "IDLETIME", page[place])
            places += of_node
            requests.append(Request(node, pipeline, without_errors))
        for place, idle_s in zip(places, chain.from_iterable(exchange(requests)), strict=True):
            if idle_s is not None and idle_s >= OLD_S:
                yield page[place]


def _gone(client: Client, node: Client, keys: TableKeys, numbers: Sequence[bytes]) -> Iterator[str]:
    """Yield the keys of rows whose values are gone, if they are as they were."""
    if not numbers:
        return
    read_tags = TagReader().read
    records = node.execute("HMGET", keys.rows, *numbers)
    tags = node.execute("HMGET", f"{keys.prefix}tags", *numbers)
    for record, packed in zip(records, tags, strict=True):
        places = _values(keys, record) if record else ()
        wanted = [Wanted(key, 0, 1, whole=False) for key in places]
        if packed and None in read(client, wanted):
            yield read_tags(packed)[0]


def find(state: State, table: TableExamination) -> Iterator[Finding]:
    """Yield the findings about an examined table."""
    repair = redrb_command(state, "doctor", table.name, "--repair")
    if table.left:
        text = "It was not deleted, or resumed, to the end: some of its values are left."
        command = redrb_command(state, "rm", table.name)
        yield finding_of("unfinished-table", table.subject, text, command)
    if table.beside:
        text = (
            f"It was created beside {counted(table.beside, 'value')} of an earlier one, which was "
            "not deleted, or resumed, to the end. Its delete takes them, too; the repair takes "
            "those that were unused for 15 minutes."
        )
        yield finding_of("unfinished-table", table.subject, text, repair)
    for text in table.differences:
        command = redrb_command(state, "stats", table.name)
        yield finding_of("different-storage", table.subject, text, command)
    if table.gone:
        keys = listed([shown(key) for key in table.gone], most=3)
        text = f"Rows that lack values: {len(table.gone):,}, such as {keys}."
        command = redrb_command(state, "inspect", table.name, table.gone[0])
        yield finding_of("lost-values", table.subject, text, command)
    if table.orphans:
        text = f"{counted(len(table.orphans), 'value')} of no row, unused for 15 minutes."
        yield finding_of("orphaned-values", table.subject, text, repair)
    if table.trash:
        text = f"{counted(table.trash, 'value')} of cleared or replaced rows, not deleted yet."
        yield finding_of("undeleted-values", table.subject, text, repair)


def delete_orphans(client: Client, namespace: str, table: TableExamination) -> tuple[str, bool]:
    """Delete old values that no row has, unless a row has them now."""
    keys, orphans = TableKeys.of(namespace, table.name), set(table.orphans)
    for _, record in chain.from_iterable(scan_hash(client.at(keys.stream), keys.rows)):
        orphans.difference_update(_values(keys, record))
    names = list(_old(client, sorted(orphans)))
    for first in range(0, len(names), PAGE):
        unlink(client, names[first : first + PAGE])
    return f"deleted {counted(len(names), 'value')} of no row", True


def delete_trash(client: Client, namespace: str, table: TableExamination) -> tuple[str, bool]:
    """Delete the values of cleared and replaced rows."""
    empty_trash(client, TableKeys.of(namespace, table.name))
    return f"deleted {counted(table.trash, 'value')} of cleared or replaced rows", True
