"""`configure`: changes settings of a task while others work on it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from redrb.connection.deadline import Deadline
from redrb.errors import ConfigError
from redrb.orders import Fifo
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.settings import TaskSettings
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import read_fields, settings_in

FIXED = {
    "partitions": (
        "every process finds a group by the partition that its id names. Save the groups with "
        "`redrb export`, and import them into another task"
    ),
    "max_reads": (
        "the reads that stored groups have had are counted by the old number. Use another task, "
        "or clear() this one"
    ),
}
"""Settings that cannot change, and why."""

_STORED = {"keep": ("keep_ms",), "order": ("order", "sampled")}


def check_changes(changes: Mapping[str, Any]) -> None:
    """Refuse settings that do not exist or cannot change.

    Raises:
        ConfigError: There is such a setting, or there is none at all.
    """
    known = [field.name for field in fields(TaskSettings) if field.name not in FIXED]
    for name in changes:
        if name in FIXED:
            raise ConfigError(f"{name} cannot change while the task exists: {FIXED[name]}.")
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}: use one of {', '.join(known)}.")
    if not changes:
        raise ConfigError(f"give at least one setting to change: {', '.join(known)}.")


def stored_names(changes: Mapping[str, Any]) -> list[str]:
    """Return the names under which Redis keeps some settings."""
    return [each for name in changes for each in _STORED.get(name, (name,))]


def configure(store: TaskStore, changes: Mapping[str, Any]) -> dict[str, str] | None:
    """Change settings of a task in one atomic step; returns all of them, as Redis keeps them.

    None is returned for a task that does not exist. The settings that the task is to have are
    checked together, as those of a new task are. The script changes nothing if another process has
    changed settings meanwhile; then they are read and checked again.

    Args:
        store: The task.
        changes: Names and values of settings; None removes one.

    Raises:
        ConfigError: A setting cannot have this value.
    """
    check_changes(changes)
    scripts, revision = TaskScripts(store), uuid.uuid4().hex
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
            after = scripts.configure(revision, before["revision"], changed)
            if after is not None:
                return after
            store.refused(before["revision"])
