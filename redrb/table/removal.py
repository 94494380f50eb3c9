"""Deletion of a table and of its values, on all nodes; after any step the same call goes on."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from itertools import islice

from redrb.connection import Client
from redrb.connection.client import scan
from redrb.keys import TableKeys
from redrb.lua.pages import PAGES
from redrb.registry import Registry
from redrb.table.calls import Deleted, Forget
from redrb.table.payload import unlink

PAGE = PAGES["table_rows"]
"""Values that are looked at, or deleted, together."""


def stored_values(client: Client, keys: TableKeys) -> Iterator[list[bytes]]:
    """Yield the keys of a table's values on all nodes, in pages, whether a row has them or not."""
    for primary in client.primaries():
        found = scan(primary, keys.values)
        while page := list(islice(found, PAGE)):
            yield page


def empty_trash(client: Client, keys: TableKeys, pages: int | None = None) -> None:
    """Delete the values of rows that are gone; what is left the next call deletes."""
    node = client.at(keys.trash)
    while pages is None or pages > 0:
        found = node.execute("SRANDMEMBER", keys.trash, PAGE)
        if not found:
            return
        unlink(client, [key.decode() for key in found])
        node.execute("SREM", keys.trash, *found)
        pages = pages and pages - 1


def remove(
    client: Client, keys: TableKeys, delete: Callable[[str], Deleted], *, everywhere: bool
) -> None:
    """Delete a table, or what is left of one; what its tasks have claimed was deleted before.

    First goes the index. Until the values are gone, too, the table is `left` there: `redrb ls`
    lists it, and `redrb rm` goes on.

    Args:
        delete: Deletes a page of the index, which is left under this token then.
        everywhere: Delete also values that neither a row nor the trash has. So it is done, too,
            where a process that deleted or resumed the table before has left some.
    """
    token = uuid.uuid4().hex
    while (page := delete(token)).more:
        pass
    empty_trash(client, keys)
    if everywhere or page.beside:
        remove_left(client, keys, token)
    forget(client, keys, token)


def forget(client: Client, keys: TableKeys, token: str) -> None:
    """Forget a table that is left under a token, and whose values are deleted, and its name."""
    registry, node = Registry(client, keys.namespace), client.at(keys.stream)
    registry.remove("table", keys.table)
    while (page := Forget(token).run(node, [keys.stream])).more:
        empty_trash(client, keys)
    if not page.found and node.execute("EXISTS", keys.task):  # created anew, or left by another
        registry.add("table", keys.table)


def remove_left(client: Client, keys: TableKeys, token: str) -> None:
    """Delete all values of a table that is left under a token, and what died beside its index.

    These are indexes of other resumes, and tasks that were not registered yet. It ends where the
    table is created anew, or another process deletes or resumes it.
    """
    node, registry = client.at(keys.task), Registry(client, keys.namespace)
    for page in stored_values(client, keys):  # before the look, so that they belong to no newer one
        if node.execute("HGET", keys.task, "left") != token.encode():
            return
        unlink(client, [key.decode() for key in page])
    names = (key.decode().removeprefix(keys.prefix) for key in scan(node, f"{keys.prefix}*"))
    beside = (name for name in names if name.startswith(("restoring:", "claims:")))
    others = (name for name in beside if not name.startswith(f"restoring:{token}:"))
    while some := tuple(islice(others, PAGE)):
        if not Forget(token, some).run(node, [keys.stream]).found:
            return
        for task in (name.split(":")[1] for name in some if name.endswith(":task")):
            registry.remove("task", f"{keys.table}:{task}")
