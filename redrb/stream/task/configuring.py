"""`open_task`, `configure`: a task is given settings, at first and while others work on it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.errors import ConfigError, TaskMismatch
from redrb.stream.orders import Fifo
from redrb.stream.task.calls import Configure, ConfigureReply, Fill, Open, OpenReply
from redrb.stream.task.lookup import existing_task, unknown_task
from redrb.stream.task.settings import read_too_often, stored_names
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import (
    StoredSettings,
    caller,
    check_changes,
    read_fields,
    read_settings,
    settings_in,
)


def open_task(store: TaskStore, call: Open) -> OpenReply | None:
    """Create a task, or compare its settings; None: it is not to be created, and does not exist.

    Raises:
        TaskMismatch: The task exists with other settings.
        ConfigError: The settings, of which other processes gave some, do not fit together.
    """
    reply = store.call(call)
    if reply.outcome == "unknown":
        return None
    if reply.outcome == "differs":
        asked = call.implied | call.given
        raise TaskMismatch(
            store.task,
            {name: (stored, asked.get(name)) for name, stored in reply.settings.items()},
        )
    _check(store, reply)
    return reply


def configure(store: TaskStore, changes: Mapping[str, Any]) -> ConfigureReply | None:
    """Change settings of a task in one atomic step; returns all of them, as Redis keeps them.

    None is returned for a task that does not exist. The settings that the task is to have are
    checked together, as those of a new task are. The script changes nothing if another process has
    changed settings meanwhile; then they are read and checked again.

    Args:
        changes: Names and values of settings; None removes one.

    Raises:
        ConfigError: A setting cannot have this value.
    """
    check_changes(changes)
    revision = uuid.uuid4().hex
    with Deadline():
        while True:
            before, _ = read_fields(store)
            if not before["revision"]:
                return None
            for name in ("groups_per_version", "max_staleness"):
                if before["groups_per_version"] and changes.get(name, 0) is None:
                    raise ConfigError(
                        f"{name} cannot be removed: makers hold rights counted by it."
                    )
            wanted = replace(settings_in(before), **changes).as_stored()
            if "order" in changes and changes["order"] is None:
                wanted |= {"order": Fifo.name, "sampled": "0"}
            changed = {name: wanted.get(name, "") for name in stored_names(changes)}
            after = store.call(Configure(revision, before["revision"], caller(store), changed))
            if after.outcome == "holds":
                raise ConfigError(
                    f"order cannot change while task {store.task!r} holds groups, now "
                    f"{after.groups:,}: change it when all are acknowledged, or clear() the task."
                )
            if after.outcome != "changed":
                _check(store, after)
                return after
            store.refused(before["revision"])


def changed_settings(
    client: Client, task: str, namespace: str, changes: Mapping[str, Any]
) -> StoredSettings:
    """Change settings of a task that is not open, and return those that it has then.

    Raises:
        UnknownTask: There is no such task.
        ConfigError: A setting cannot change, or cannot have this value.
    """
    if changes:
        check_changes(changes)
    store = existing_task(client, task, namespace=namespace)
    if changes:
        configure(store, changes)
    found = read_settings(store)
    if found is None:  # another process has deleted it meanwhile
        raise unknown_task(client, namespace, task)
    return found


def _check(store: TaskStore, reply: OpenReply | ConfigureReply) -> None:
    """Refuse settings that do not fit together; else do the work that a change has left."""
    if reply.outcome == "excluded":
        raise read_too_often(reply.value)
    if reply.unfinished:  # groups are indexed or sorted, in pages
        fill(store)


def fill(store: TaskStore) -> None:
    """Do the work that a change of settings has left; whoever opens the task next goes on."""
    for _ in store.pages(Fill(), all_of_them=False):
        pass
