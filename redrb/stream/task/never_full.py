"""The error of a take that asks for more groups than its task may ever hold."""

from __future__ import annotations

from contextlib import suppress

from redrb.errors import ConfigError, RedrbError
from redrb.stream.task.stored_settings import SettingChange, StoredSettings
from redrb.stream.task.task import Task


def never_full(task: Task, count: int, most: int) -> ConfigError:
    """Return the error; it names the setting, who set it, and the command that removes it.

    Args:
        task: The task of the take.
        count: Groups that the take asks for.
        most: Most groups that the task holds by its limit or max_waiting.
    """
    stored = None
    with suppress(RedrbError):  # the first error matters more
        stored = task.stored_settings()
    name = _bound(stored, most)
    change = stored.last_change(name) if stored else None
    return ConfigError(
        f"task {task.name!r} holds at most {most} groups: a batch of {count} can never be full."
        f"{_who(change)} Take fewer, or change it: "
        f"`{set_command(task.name, task.namespace, f'{name}=none')}`."
    )


def set_command(task: str, namespace: str, change: str) -> str:
    """Return the command that changes a setting of a task."""
    options = "" if namespace == "default" else f" --namespace {namespace}"
    return f"redrb set {task} {change}{options}"


def _bound(stored: StoredSettings | None, most: int) -> str:
    """Return the setting that bounds how many groups the task holds."""
    values = stored.values if stored else {}
    return "max_waiting" if values.get("max_waiting") == str(most) else "limit"


def _who(change: SettingChange | None) -> str:
    if change is None or not change.new:
        return ""
    user = f"user {change.user}, " if change.user else ""
    return (
        f" {change.setting}={change.new} was set by {user}{change.host}, process {change.pid}, "
        f"at {change.time:%Y-%m-%d %H:%M:%S} UTC."
    )
