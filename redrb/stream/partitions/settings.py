"""The settings of the partitions of a task: each partition has its part of the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.keys import TaskKeys
from redrb.stream.task.configuring import check_changes, configure
from redrb.stream.task.settings import TaskSettings
from redrb.stream.task.similar_tasks import similar_tasks
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import StoredSettings, checked_settings, read_settings

DIVIDED = ("limit", "max_bytes", "capacity", "keep_groups", "max_dead")
"""Limits of the whole task, of which each partition has a part."""


def part_of(settings: TaskSettings, number: int) -> TaskSettings:
    """Return the settings of one partition: its part of each limit, and the rest as it is.

    Raises:
        ConfigError: A limit is smaller than the number of partitions, or a setting needs one task.
    """
    settings.as_stored()  # checks the values
    count = settings.partitions or 1
    limits = {name: getattr(settings, name) for name in (*DIVIDED, "rate")}
    parts = divided({name: most for name, most in limits.items() if most}, number, count)
    return replace(settings, **parts)


def divided(settings: Mapping[str, Any], number: int, count: int) -> dict[str, Any]:
    """Return some settings for one of `count` partitions.

    Raises:
        ConfigError: As `part_of`.
    """
    if settings.get("rate") is not None:
        raise ConfigError(
            "rate= counts the reads and inserts of one task: with partitions= leave it out, and "
            "give limit= or capacity=."
        )
    parts = dict(settings)
    for name in DIVIDED:
        whole = settings.get(name)
        if isinstance(whole, int) and whole > 0:
            if whole < count:
                raise ConfigError(
                    f"{name}={whole} is divided among {count} partitions: give at least {count}, "
                    "or fewer partitions."
                )
            parts[name] = whole // count + (number < whole % count)
    return parts


def summed_settings(parts: Sequence[StoredSettings]) -> StoredSettings:
    """Return the settings of the whole task."""
    values = dict(parts[0].values)
    for name in DIVIDED:
        if name in values:
            values[name] = str(sum(int(part.values.get(name, 0)) for part in parts))
    return replace(parts[0], values=values)


def whole_settings(
    client: Client, task: str, namespace: str, changes: Mapping[str, Any]
) -> StoredSettings:
    """Change settings of a task, with or without partitions, and return those that it has then.

    Raises:
        ConfigError: There is no such task, or a setting cannot change or have this value.
    """
    first = TaskStore.of(client, namespace, task)
    if changes:
        check_changes(changes)
    if read_settings(first) is None:
        similar = ", ".join(similar_tasks(client, namespace, task))
        hint = f" Tasks with similar names: {similar}." if similar else ""
        raise ConfigError(
            f"there is no task {task!r} in namespace {namespace!r} at {client.where}.{hint}"
        )
    count = int(client.at(first.keys.task).execute("HGET", first.keys.task, "partitions") or 1)
    keys = [TaskKeys.of_partition(namespace, task, number, count) for number in range(1, count)]
    stores = [first, *(TaskStore(client, task, each) for each in keys)]
    for number, store in enumerate(stores if changes else ()):
        configure(store, divided(changes, number, count) if count > 1 else changes)
    return summed_settings([checked_settings(store) for store in stores])
