"""Removal of a table with its values on all nodes, or of a task that claims its rows."""

from __future__ import annotations

from redrb.connection import Client
from redrb.errors import UnknownTask
from redrb.keys import TableKeys
from redrb.stream.task.removal import remove_task


def remove_table(client: Client, name: str, *, namespace: str) -> int:
    """Delete a table with its values on all nodes, and the tasks that claim its rows.

    What is left of one goes, too, where a process died that deleted or resumed it.

    Returns:
        The rows that it had, without the retained ones.

    Raises:
        UnknownTask: There is no such table.
    """
    from redrb.table import Table
    from redrb.table.calls import Delete
    from redrb.table.removal import remove

    keys = TableKeys.of(namespace, name)
    node = client.at(keys.stream)
    if node.execute("HGET", keys.task, "left"):
        remove(client, keys, lambda token: Delete(token).run(node, [keys.stream]), everywhere=True)
        return 0
    return Table(client, name, namespace=namespace, create=False).delete(everywhere=True)


def remove_claims(client: Client, name: str, *, namespace: str) -> int:
    """Unregister the task TABLE:TASK from its table; returns the groups of rows that it had.

    Raises:
        UnknownTask: There is no such task.
    """
    from redrb.table import Table

    name_of_table, _, task = name.partition(":")
    try:
        table = Table(client, name_of_table, namespace=namespace, create=False)
    except UnknownTask:  # it was deleted between two steps of another process
        return remove_task(client, name, namespace=namespace)
    return table.unregister(task)
