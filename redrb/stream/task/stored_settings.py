"""`StoredSettings`: the settings that a task has in Redis, and the record of their changes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self
from urllib.parse import urlsplit

from redrb.connection.transport import Pipeline
from redrb.damage import Reading
from redrb.stream.arguments import period_text
from redrb.stream.task.rate import RateLimit
from redrb.stream.task.setting_texts import shown_value
from redrb.stream.task.settings import NUMBERS, STORED_NAMES, TaskSettings
from redrb.stream.task.store import TaskStore
from redrb.unpacking import unpack


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
        public, old_text, new_text = _PUBLIC.get(name, name), _text(name, old), _text(name, new)
        time = datetime.fromtimestamp(ms / 1000, UTC)
        return cls(public, old_text, new_text, time, host, int(pid), user)


@dataclass(frozen=True, slots=True)
class StoredSettings:
    """The settings of a task at one moment.

    Attributes:
        values: Value of each setting that the task was given, as text.
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


_PUBLIC = {"keep_ms": "keep"}
_HIDDEN = ("sampled",)


def read_settings(store: TaskStore) -> StoredSettings | None:
    """Return the settings of a task; None if there is no such task. Changes nothing."""
    return _settings(*read_fields(store))


@Reading("the settings of a task")
def _settings(fields: Mapping[str, str], stored: Sequence[bytes]) -> StoredSettings | None:
    if not fields["revision"]:
        return None
    values = {
        _PUBLIC.get(name, name): _text(name, fields[name])
        for name in STORED_NAMES
        if fields[name] and name not in _HIDDEN
    }
    return StoredSettings(
        values=values,
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
    """Return stored settings as arguments of a stream, except the order and the partitions."""
    given: dict[str, Any] = {
        name: int(fields[name]) for name in NUMBERS if fields.get(name) and name != "partitions"
    }
    for name in ("on_expired", "eviction"):
        if fields.get(name):
            given[name] = fields[name]
    if fields.get("groups_per_version"):
        given["groups_per_version"] = float(fields["groups_per_version"])
    if fields.get("rate"):
        per_insert, size, least, most = fields["rate"].split(" ")
        given["rate"] = RateLimit(float(per_insert), int(size), float(least), float(most))
    if fields.get("tags"):
        given["tags"] = json.loads(fields["tags"])
    if fields.get("keep_ms"):
        given["keep"] = period_text(int(fields["keep_ms"]))
    return TaskSettings(**given)


def setting_text(name: str, value: str) -> str:
    """Return a setting, as Redis keeps it, as `redrb set` reads it, such as "limit=64"."""
    return f"{_PUBLIC.get(name, name)}={shown_value(name, _text(name, value)) or 'none'}"


def caller(store: TaskStore) -> str:
    """Return host, process and user in Redis for the record of changes."""
    user = urlsplit(store.client.url).username or ""
    return f"{socket.gethostname()} {os.getpid()} {user}"


def _text(name: str, value: str) -> str:
    """Return a stored value as users write it."""
    if not value:
        return ""
    if name == "keep_ms":
        return period_text(int(value))
    return ",".join(json.loads(value)) if name == "tags" else value
