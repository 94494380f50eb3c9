"""Finds the tasks of a namespace whose names are like a name that is most likely mistyped."""

from __future__ import annotations

import difflib
import heapq
import logging
import operator
from itertools import islice
from typing import Final

from redis.exceptions import RedisError

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.errors import StoreError, UnknownTask
from redrb.keys import TaskKeys, is_name
from redrb.registry import Registry

NAMES_COMPARED: Final = 2000
"""A namespace with more names is not searched to its end."""
LOOK_S: Final = 0.5
MOST_NAMES: Final = 3
SIMILAR: Final = 0.6
"""Share of common characters from which names are similar: the default of difflib."""

_log = logging.getLogger("redrb")


def similar_tasks(
    client: Client, namespace: str, task: str, *, with_groups: bool = True, least: float = 0.0
) -> tuple[str, ...]:
    """Return tasks of a namespace, the most similar name first.

    The search is bounded in names and time; none is found where the user may not read the
    registry, or where Redis is away.

    Args:
        with_groups: Only tasks that hold or held groups.
        least: Least similarity, from 0 to 1.
    """
    try:
        with Deadline(at_most=LOOK_S):
            listed = islice(Registry(client, namespace).names("task"), NAMES_COMPARED)
            names = (name for name in listed if is_name(name) and name != task)
            rated = ((_similarity(name, task), name) for name in names)
            near = (each for each in rated if each[0] >= least)
            nearest = heapq.nlargest(2 * MOST_NAMES, near, key=operator.itemgetter(0))
            found = []
            for _, name in nearest:
                keys = TaskKeys.of(namespace, name)
                look = ("HEXISTS", keys.puts, "put") if with_groups else ("EXISTS", keys.task)
                if client.at(keys.task).execute(*look):
                    found.append(name)
    except (RedisError, StoreError) as error:
        _log.debug("tasks with names like %r were not searched: %s", task, error)
        return ()
    return tuple(found[:MOST_NAMES])


def unknown_task(client: Client, namespace: str, task: str) -> UnknownTask:
    """Return the error for a task that does not exist; it names similar ones."""
    similar = similar_tasks(client, namespace, task, with_groups=False, least=SIMILAR)
    return UnknownTask(task, namespace=namespace, where=client.where, similar=similar)


def _similarity(name: str, task: str) -> float:
    name, task = name.lower(), task.lower()
    if name.startswith(task) or task.startswith(name):
        return 1.0
    return difflib.SequenceMatcher(None, name, task).ratio()
