"""Finds tasks with groups whose names are like that of a task into which nobody ever put."""

from __future__ import annotations

import difflib
import heapq
import logging
from typing import Final

from redis.exceptions import RedisError

from redrb.connection import Client
from redrb.connection.deadline import over, within
from redrb.errors import StoreError
from redrb.keys import TaskKeys, is_name

KEYS_OF_A_CALL: Final = 1000
MOST_CALLS: Final = 20
"""Calls of SCAN on one server: a server with more keys is not searched to its end."""
LOOK_S: Final = 0.5
MOST_NAMES: Final = 3

_log = logging.getLogger("redrb")


def similar_tasks(client: Client, namespace: str, task: str) -> tuple[str, ...]:
    """Return tasks of a namespace that hold or held groups, the most similar name first.

    The search is bounded in keys and time; none is found where the user may not run SCAN, or where
    Redis is away.

    Args:
        client: The client for all nodes.
        namespace: The namespace.
        task: The name that nobody has put into.
    """
    try:
        with within(LOOK_S):
            names = _names(client, namespace)
            names.discard(task)
            nearest = heapq.nlargest(
                MOST_NAMES + MOST_NAMES, sorted(names), key=lambda name: _similarity(name, task)
            )
            used = [name for name in nearest if _is_used(client, namespace, name)]
    except (RedisError, StoreError) as error:
        _log.debug("tasks with names like %r were not searched: %s", task, error)
        return ()
    return tuple(used[:MOST_NAMES])


def _names(client: Client, namespace: str) -> set[str]:
    """Return the names of tasks that are found within the bounds."""
    found: set[str] = set()
    begin = TaskKeys.of(namespace, "-").prefix.removesuffix("-}:")
    end = "}:puts"
    for server in client.primaries():
        cursor = b"0"
        for _ in range(MOST_CALLS):
            cursor, keys = server.once(
                *("SCAN", cursor, "MATCH", f"{begin}*{end}", "COUNT", KEYS_OF_A_CALL)
            )
            texts = (key.decode(errors="replace") for key in keys)
            found.update(text.removeprefix(begin).removesuffix(end) for text in texts)
            if cursor == b"0" or over():
                break
    return set(filter(is_name, found))  # others are partitions, or of another program


def _is_used(client: Client, namespace: str, task: str) -> bool:
    key = TaskKeys.of(namespace, task).puts
    return bool(client.at(key).once("HEXISTS", key, "put"))


def _similarity(name: str, task: str) -> float:
    return difflib.SequenceMatcher(None, name.lower(), task.lower()).ratio()
