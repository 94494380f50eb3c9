"""Tasks that are not opened: whether they exist, their counters, names like a mistyped one."""

from __future__ import annotations

import difflib
import heapq
import logging
import operator
from contextlib import suppress
from itertools import islice
from typing import Final

from redis.exceptions import RedisError

from redrb.connection import Client
from redrb.connection.client import scan
from redrb.connection.deadline import Deadline
from redrb.errors import StoreError, UnknownTask
from redrb.experience import Status
from redrb.keys import TaskKeys, is_name, is_task
from redrb.registry import Registry
from redrb.stream.task.calls import Count, Stats
from redrb.stream.task.ledger import StreamStats
from redrb.stream.task.store import TaskStore

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
            names = (name for name in listed if is_task(name) and name != task)
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
    """Return the error for a task that does not exist; it names similar ones, and namespaces."""
    elsewhere = _elsewhere(client, namespace, task)
    similar = similar_tasks(client, namespace, task, with_groups=False, least=SIMILAR)
    where = client.where
    return UnknownTask(task, namespace=namespace, where=where, similar=similar, elsewhere=elsewhere)


def _elsewhere(client: Client, namespace: str, name: str) -> tuple[str, ...]:
    """Return other namespaces with a task or table of this name, as far as they are found."""
    found: set[str] = set()
    if not is_name(name):  # TABLE:TASK, or a sum of shards
        return ()
    with suppress(RedisError, StoreError), Deadline(at_most=LOOK_S) as deadline:
        for primary in client.primaries():
            for key in scan(primary, TaskKeys.in_any_namespace(name), until=deadline):
                tag = key.decode(errors="replace").removeprefix("redrb:{")
                found.add(tag.partition(":")[0])
    return tuple(sorted(filter(is_name, found - {namespace})))[:MOST_NAMES]


def _similarity(name: str, task: str) -> float:
    name, task = name.lower(), task.lower()
    if name.startswith(task) or task.startswith(name):
        return 1.0
    return difflib.SequenceMatcher(None, name, task).ratio()


def existing_task(client: Client, task: str, *, namespace: str) -> TaskStore:
    """Return the store of a task.

    Raises:
        UnknownTask: There is no such task; the message names similar ones.
        StoreError: Its settings are lost, and its groups are not.
    """
    store = TaskStore.of(client, namespace, task)
    if not store.client.execute("EXISTS", store.keys.task):
        if store.client.execute("EXISTS", *store.keys.contents):
            raise StoreError(
                f"the key {store.keys.task} is lost, with the settings of groups that are stored. "
                f"Run `redrb doctor {task} --repair`, after which processes can give the settings "
                "again."
            )
        raise unknown_task(client, namespace, task)
    return store


def task_stats(client: Client, task: str, *, namespace: str, group: str) -> StreamStats:
    """Return a task's counters as a consumer group sees them; raises UnknownTask."""
    return stats_of(existing_task(client, task, namespace=namespace), group)


def stats_of(store: TaskStore, group: str) -> StreamStats:
    """Return the counters of a task as a consumer group sees them."""
    figures = store.call(Stats(group))
    return StreamStats.of(figures or {})


def count_waiting(store: TaskStore, group: str, status: Status, where: str) -> int:
    """Return how many groups wait for a consumer group; before it joins, how many it would find."""
    page = store.call(Count(group, status, where))
    found = page.found
    while page.place != "0":
        page = store.call(Count(group, status, where, page.place))
        found += page.found
    return found
