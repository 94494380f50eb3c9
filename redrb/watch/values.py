"""The values of a table on all nodes: search for them, and removal of a table or of its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from redrb.connection import Client
from redrb.connection.client import scan
from redrb.keys import TableKeys

PAGE = 1000
"""Values that are looked at, or deleted, together."""


def stored_values(client: Client, keys: TableKeys) -> Iterator[list[bytes]]:
    """Yield the keys of a table's values on all nodes, in pages, whether a row has them or not."""
    for primary in client.primaries():
        found = scan(primary, keys.values)
        while page := list(islice(found, PAGE)):
            yield page


def remove_table(client: Client, name: str, *, namespace: str) -> int:
    """Delete a table with its values on all nodes, and the tasks that claim its rows.

    Returns:
        The rows that it had, without the retained ones.

    Raises:
        UnknownTask: There is no such table.
    """
    from redrb.table import Table
    from redrb.table.payload import unlink

    table = Table(client, name, namespace=namespace, create=False)
    rows = table.delete()
    keys = TableKeys.of(namespace, name)
    for page in stored_values(client, keys):  # of processes that died before a row had them
        if client.at(keys.task).execute("EXISTS", keys.task):
            break  # somebody has created the table anew
        unlink(client, [key.decode() for key in page])
    return rows


def remove_claims(client: Client, name: str, *, namespace: str) -> int:
    """Unregister the task TABLE:TASK from its table; returns the groups of rows that it had.

    Raises:
        UnknownTask: There is no such table, or no such task.
    """
    from redrb.table import Table

    table, _, task = name.partition(":")
    return Table(client, table, namespace=namespace, create=False).unregister(task)
