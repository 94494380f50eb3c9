"""The settings of the partitions of a task: each partition has its part of the limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.stream.task.configuring import configure
from redrb.stream.task.lookup import existing_task, unknown_task
from redrb.stream.task.reach import Reach
from redrb.stream.task.settings import DIVIDED, TaskSettings
from redrb.stream.task.stored_settings import (
    StoredSettings,
    check_changes,
    read_settings,
    settings_of_partitions,
)


def part_of(settings: TaskSettings, number: int) -> TaskSettings:
    """Return the settings of one partition: its part of each limit, and the rest as it is.

    Raises:
        ConfigError: A limit is smaller than the number of partitions.
    """
    count = settings.partitions or 1
    if count == 1:
        return settings
    limits = {name: getattr(settings, name) for name in DIVIDED}
    parts = divided({name: most for name, most in limits.items() if most}, number, count)
    return replace(settings, **parts)


def divided(settings: Mapping[str, Any], number: int, count: int) -> dict[str, Any]:
    """Return settings for one of `count` partitions; the only one has all. Raises as `part_of`."""
    if count == 1:
        return dict(settings)
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


def whole_settings(
    client: Client, task: str, namespace: str, changes: Mapping[str, Any]
) -> StoredSettings:
    """Change settings of a task, with or without partitions, and return those that it has then.

    Raises:
        UnknownTask: There is no such task.
        ConfigError: A setting cannot change, or cannot have this value.
    """
    if changes:
        check_changes(changes)
    stores = existing_task(client, task, namespace=namespace)
    count = len(stores)
    Reach(stores).each(
        range(count if changes else 0),
        lambda number: configure(stores[number], divided(changes, number, count)),
    )
    found = [settings for settings in map(read_settings, stores) if settings is not None]
    if len(found) < count:  # another process has deleted it meanwhile
        raise unknown_task(client, namespace, task)
    return settings_of_partitions(found)
