"""`StoredSettings`: the settings that a task has in Redis, and the record of their changes."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self
from urllib.parse import urlsplit

from redrb.connection.transport import Pipeline
from redrb.errors import ConfigError
from redrb.stream.task.settings import (
    DEFAULT_MAX_READS,
    SETTINGS,
    STORED_NAMES,
    Setting,
    TaskSettings,
)
from redrb.stream.task.store import TaskStore
from redrb.unpacking import Reading, unpack


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One change of one setting.

    Attributes:
        setting: Name of the setting.
        old: Its value before, as text; "" for none.
        new: Its value since then; "" for none.
        time: When it was changed, by the server's clock, in UTC.
        host: Host of the process that changed it.
        pid: Number of that process.
        user: Its user in Redis, as its URL names it; "" for none.
    """

    setting: str
    old: str
    new: str
    time: datetime
    host: str
    pid: int
    user: str

    @classmethod
    @Reading("a change of a setting")
    def of(cls, packed: bytes) -> Self:
        """Return the change that Redis keeps; raises DecodeError or StoreError if it is damaged."""
        name, old, new, ms, who = unpack(packed, "change of a setting")
        host, pid, user = who.split(" ")
        time = datetime.fromtimestamp(ms / 1000, UTC)
        return cls(name, _text(name, old), _text(name, new), time, host, int(pid), user)


@dataclass(frozen=True, slots=True)
class StoredSettings:
    """The settings of a task at one moment.

    Attributes:
        values: Value of each setting that the task was given, as `redrb set` reads it.
        implied: Those of them that no user gave, such as the limit that follows from a trainer's
            `buffer_limit`.
        changes: The last 100 changes, newest first; the first ones set what was not set before.
        revision: Random name of these settings.
    """

    values: Mapping[str, str]
    implied: frozenset[str]
    changes: tuple[SettingChange, ...]
    revision: str

    def last_change(self, setting: str) -> SettingChange | None:
        """Return the newest recorded change of a setting; None if none is recorded."""
        return next((change for change in self.changes if change.setting == setting), None)


@Reading("the settings of a task")
def shown_settings(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the settings among the fields that Redis keeps of a task, as users write them."""
    return {name: setting.text(stored) for name, setting, stored in _given(fields)}


def _given(fields: Mapping[str, str]) -> Iterator[tuple[str, Setting, str]]:
    """Yield the settings that Redis keeps: name, setting, and what it keeps."""
    for name, setting in SETTINGS.items():
        if stored := fields.get(name):
            yield name, setting, stored


def read_settings(store: TaskStore) -> StoredSettings | None:
    """Return the settings of a task; None if there is no such task. Changes nothing."""
    return _settings(*read_fields(store))


@Reading("the settings of a task")
def _settings(fields: Mapping[str, str], stored: Sequence[bytes]) -> StoredSettings | None:
    if not fields["revision"]:
        return None
    return StoredSettings(
        values=shown_settings(fields),
        implied=frozenset(fields["implied"].split()),
        changes=tuple(map(SettingChange.of, stored)),
        revision=fields["revision"],
    )


def read_fields(store: TaskStore) -> tuple[dict[str, str], list[bytes]]:
    """Return the settings as Redis keeps them, "" for those not given; and the packed changes."""
    names = (*STORED_NAMES, "revision", "implied")
    look = Pipeline()
    look.add("HMGET", store.keys.task, *names)
    look.add("LRANGE", store.keys.changes, 0, -1)
    found, changes = store.exchange(look)
    with Reading("the settings of a task"):
        return {n: v.decode() if v else "" for n, v in zip(names, found, strict=True)}, changes


@Reading("the settings of a task")
def settings_in(fields: Mapping[str, str]) -> TaskSettings:
    """Return stored settings as arguments of a stream, except the order."""
    return TaskSettings(
        **{
            name: setting.value(stored)
            for name, setting, stored in _given(fields)
            if name != "order"
        }
    )


@Reading("the settings of a task")
def check_whole(fields: Mapping[str, str]) -> None:
    """Check the settings that a task is to have, as Redis keeps them, before it has them.

    Raises:
        ConfigError: They contradict each other, as those of a new task may not.
    """
    reads = fields.get("max_reads") or fields.get("default_max_reads") or DEFAULT_MAX_READS
    replace(settings_in(fields), max_reads=int(reads)).as_stored()


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings in texts such as "limit=32", None for "none".

    Raises:
        ConfigError: A text has another form, a setting does not exist, or one is given twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r:.80}: write NAME=VALUE, such as limit=32.")
        if name in found:
            raise ConfigError(f"{name} is given twice.")
        check_changes([name])
        try:
            found[name] = None if value == "none" else SETTINGS[name].parsed(value)
        except ConfigError:
            raise
        except ValueError as error:
            form = SETTINGS[name].form
            raise ConfigError(f"{name}={value!r:.80}: write {form}.") from error
    return found


def check_changes(names: Collection[str]) -> None:
    """Raise ConfigError if a setting does not exist or cannot change, or if there is none."""
    known = ", ".join(name for name, setting in SETTINGS.items() if not setting.fixed)
    for name in names:
        if name not in SETTINGS:
            raise ConfigError(f"unknown setting {name!r}: use one of {known}.")
        if SETTINGS[name].fixed:
            why = SETTINGS[name].fixed
            raise ConfigError(f"{name} cannot change while the task exists: {why}.")
    if not names:
        raise ConfigError(f"give at least one setting to change: {known}.")


def setting_text(name: str, value: str) -> str:
    """Return a setting, as Redis keeps it, as `redrb set` reads it, such as "limit=64"."""
    return f"{name}={_text(name, value) or 'none'}"


def caller(store: TaskStore) -> str:
    """Return host, process and user in Redis for the record of changes."""
    user = urlsplit(store.client.url).username or ""
    return f"{socket.gethostname()} {os.getpid()} {user}"


def _text(name: str, value: str) -> str:
    """Return a value that Redis keeps under a name as users write it."""
    setting = SETTINGS.get(name)
    return setting.text(value) if setting and value else value
