"""Reads tables: one script of bounded work for each, sent together."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import msgspec
from redis.exceptions import ResponseError

from redrb.connection import Client
from redrb.connection.failures import is_denied, translate
from redrb.connection.transport import Pipeline
from redrb.errors import RedrbError, StoreDenied
from redrb.keys import TableKeys, TaskKeys, is_name
from redrb.registry import ODD_NAME
from redrb.table.calls import Count
from redrb.unpacking import Reading
from redrb.watch.state.model import ClaimState, TableState
from redrb.watch.state.tasks import exchanged


def read_tables(client: Client, namespace: str, names: Iterable[str]) -> list[TableState]:
    """Return the states of tables; names without a table are left out."""
    listed = list(names)
    named = [name for name in listed if is_name(name)]
    keys = [TableKeys.of(namespace, name) for name in named]
    nodes = [client.at(each.stream) for each in keys]

    def add(pipeline: Pipeline, number: int) -> None:
        Count().add_to(pipeline, [keys[number].stream])

    found = [TableState(name, readable=False, damage=ODD_NAME) for name in set(listed) - {*named}]
    for name, node, (reply,) in zip(named, nodes, exchanged(nodes, add), strict=True):
        try:
            if isinstance(reply, ResponseError):
                raise translate(reply, node.where)
            with Reading(f"table {name!r}"):
                counts = Count().read(reply)
        except RedrbError as error:
            damage = "" if isinstance(reply, ResponseError) and is_denied(reply) else str(error)
            found.append(TableState(name, readable=False, damage=damage))
            continue
        if counts is not None:
            claims = tuple(
                ClaimState(f"{name}:{task}", tuple(claim.columns), claim.size, claim.consumed)
                for task, claim in sorted(counts.claims.items())
            )
            fields = msgspec.structs.asdict(counts)
            fields |= {"claims": claims, "columns": tuple(counts.columns)}
            found.append(TableState(name, **fields))
    return sorted(found, key=lambda each: each.name)


def is_table(client: Client, name: str, namespace: str) -> bool:
    """Return whether there is a table of this name, and no task that the user may see."""
    if not is_name(name):
        return False
    table, task = TableKeys.of(namespace, name).task, TaskKeys.of(namespace, name).task
    with suppress(StoreDenied):  # the user of a table alone may not see the task
        if client.at(task).execute("EXISTS", task):
            return False
    with suppress(StoreDenied):
        return bool(client.at(table).execute("EXISTS", table))
    return False
