"""`Restoring`: builds a saved task in a restore area, whose keys `resuming` moves to their place.

Parts go to the restore area like puts: the payloads by XADD, and the records to a script, in one
transaction that has its effect once however often it is sent.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redrb.connection.request import Request
from redrb.connection.transport import Argument, Reply, first_error, packed
from redrb.errors import ConfigError, StoreError, TaskMismatch
from redrb.keys import TaskKeys
from redrb.stream.saving.calls import AddToArea, BeginRestore, PartKind
from redrb.stream.saving.checking import CheckedFile
from redrb.stream.saving.file import Kind
from redrb.stream.saving.records import (
    PUT_COUNTERS,
    ConsumerGroup,
    DeadRecord,
    GroupRecord,
    ancestors_of,
    declared_tags,
    settings_of,
)
from redrb.stream.saving.snapshot import PAGE_BYTES, PAGE_GROUPS
from redrb.stream.task.entries import entry_id
from redrb.stream.task.settings import STORED_DEFAULTS, WIRE_FORMAT
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import check_whole, shown_settings

AREA_TTL_MS = 600_000
"""Time after which Redis deletes a restore area that no process continues."""

COMPLETE_TTL_MS = 3_600_000
"""The same of a complete restore area, which waits for those of other tasks, and of its token."""


@dataclass(slots=True)
class _Page:
    """Entries that go to the area in one transaction, and a description of each for the script."""

    commands: list[tuple[list[Argument], bytes]] = field(default_factory=list)
    described: list[Any] = field(default_factory=list)
    nbytes: int = 0

    def fits(self, nbytes: int) -> bool:
        return len(self.commands) < PAGE_GROUPS and self.nbytes + nbytes <= PAGE_BYTES

    def add(self, command: list[Argument], payload: bytes, described: Any = None) -> None:
        self.commands.append((command, payload))
        self.described.append(described)
        self.nbytes += len(payload)


class Restoring:
    """One attempt to restore a task: its restore area, and the parts that were put there."""

    def __init__(
        self, store: TaskStore, saved: CheckedFile, *, put: int = 0, number: int = 0
    ) -> None:
        """Prepare an attempt, without a request to Redis.

        Args:
            put: Groups that were ever put into the task, all of which have ended.
            number: Attempts with a larger number replace this one; an attempt with 0 replaces
                every other one.
        """
        self.store = store
        self.saved = saved
        self.header = saved.header
        self.token = f"{number}-{uuid.uuid4().hex}"
        self.put = put
        self._area = TaskKeys(f"{store.keys.prefix}restoring:{self.token}:")
        self._part = 0
        self._page = _Page()
        self._kind = Kind.GROUP
        self._last = 0
        self._names = [group.name for group in self.header.groups]
        self._late: list[str] = []
        self._settings: dict[str, str] = {}

    def begin(self) -> None:
        """Check that the task may be restored, and begin a restore area.

        Raises:
            ConfigError: The task was used, or its settings do not fit those of the file.
            StoreError: Another process began to resume later.
            TaskMismatch: The task has another order or other tags.
        """
        begun = self.store.call(BeginRestore(self.token, COMPLETE_TTL_MS, self.put))
        if begun.outcome == "used":
            raise self.used()
        if begun.outcome == "overtaken":
            raise self.gone()
        # consumer groups that have joined already find everything, and may wait for it
        self._late = sorted(set(begun.groups) - set(self._names))
        self._settings = self._merged(settings_of(begun.fields))
        self._send("task", {**self._task(), "groups": self._groups()})

    def group(self, record: GroupRecord, payload: bytes) -> None:
        """Put a group in the restore area."""
        needs = [(self._names[place], *others) for place, *others in record.needs]
        needs += [(name, "", "", 0, 0) for name in self._late]
        described = [record.seq, len(payload), record.facts, needs]
        command: list[Argument] = ["XADD", self._area.stream, "NOMKSTREAM"]
        self._add(Kind.GROUP, [*command, entry_id(record.seq), "g"], payload, described)
        self._last = record.seq

    def dead_letter(self, record: DeadRecord) -> None:
        """Put a dead letter in the restore area."""
        *others, (name, value) = record.fields
        words = [word for pair in others for word in pair]
        command: list[Argument] = ["XADD", self._area.dead, record.entry_id, *words, name]
        fields = dict(record.fields)
        has_facts = bool(fields.get(b"facts"))  # else it cannot be requeued
        seq = int(fields[b"seq"]) if has_facts else 0
        source = int(fields.get(b"source", seq))
        described = [fields[b"group"].decode() if has_facts else "", seq, record.entry_id, source]
        self._add(Kind.DEAD_LETTER, command, value, described)

    def part(self, kind: PartKind, records: Any) -> None:
        """Put other records in the restore area."""
        self._flush()
        self._send(kind, records)

    def end(self) -> None:
        """Complete the restore area."""
        self.part("end", [self.header.last, self._last])

    @property
    def whole(self) -> dict[str, Any]:
        """The numbers by which scripts recognize that a restore area is complete."""
        late = dict.fromkeys(self._late, self.saved.ending.groups)
        return {**self.saved.whole, "members": {**self.saved.whole["members"], **late}}

    def give_up(self) -> None:
        """Delete the restore area."""
        self.store.call(BeginRestore(self.token, 0, 0))

    def _add(
        self, kind: Kind, command: list[Argument], payload: bytes, described: Any = None
    ) -> None:
        if kind is not self._kind or not self._page.fits(len(payload)):
            self._flush()
        self._kind = kind
        self._page.add(command, payload, described)

    def _flush(self) -> None:
        page, self._page = self._page, _Page()
        if page.commands:
            self._send("entries" if self._kind is Kind.GROUP else "dead", page.described, page)

    def _send(self, kind: PartKind, records: Any, page: _Page | None = None) -> None:
        """Put the next part in the restore area, once however often it is sent."""
        self._part += 1
        pipeline = self.store.client.transaction(self._area.none)
        for command, payload in page.commands if page is not None else ():
            pipeline.add_payload(packed(*command), len(command) + 1, [payload], len(payload))
        ttl_ms = COMPLETE_TTL_MS if kind == "end" else AREA_TTL_MS
        add = AddToArea(self._part, ttl_ms, kind, records)
        add.add_to(pipeline, [self._area.stream], whole=True)
        pipeline.add("EXEC")

        def outcome(replies: list[Reply]) -> str:
            error = first_error(replies)
            if error is not None:
                raise error
            error, last = first_error(replies[-1]), replies[-1][-1]
            if error is not None and (isinstance(last, Exception) or add.read(last) == "ok"):
                raise error  # of a part that came before, only the entries are refused
            return add.read(last)

        if Request(self.store.client, pipeline, outcome).result() == "gone":
            raise self.gone()

    def _merged(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the settings that the task was given, and those of the file for all others."""
        saved = self.header.settings
        differing: dict[str, tuple[object, object]] = {}
        defaults = {"format": str(WIRE_FORMAT), "order": "fifo", "sampled": "0"}
        for name, default in defaults.items():
            if name in given and given[name] != saved.get(name, default):
                differing[name] = (given[name], saved.get(name, default))
        if "tags" in given and declared_tags(given) != self.header.tags:
            differing["tags"] = (list(declared_tags(given)), list(self.header.tags))
        if differing:
            raise TaskMismatch(self.store.task, differing)
        merged = {**STORED_DEFAULTS, **saved, **given}
        try:
            check_whole(merged)
        except ConfigError as error:
            own = shown_settings({name: value for name, value in given.items() if value})
            raise ConfigError(
                f"the settings of {self.saved.path} "
                f"({_listed(shown_settings(saved))}) and those that task {self.store.task!r} was "
                f"given ({_listed(own)}) do not fit together: {error} Open the task with settings "
                "that fit, and resume again; it was not changed."
            ) from error
        return merged

    def _task(self) -> dict[str, dict[str, str]]:
        counters = _texts(self.header.counters)
        of_puts = {name: counters.pop(name) for name in PUT_COUNTERS if name in counters}
        settings = {**self._settings, "ancestors": ancestors_of(self.header)}
        settings["restored_file"] = self.saved.checksum
        return {"task": {**settings, **counters}, "puts": of_puts}

    def _groups(self) -> dict[str, dict[str, dict[str, str]]]:
        ending, found = self.saved.ending, self.saved.ending.groups
        late = [ConsumerGroup(name, {"waiting": found}, found) for name in self._late]
        waiting = [*ending.waiting, *[found] * len(late)]
        return {
            group.name: {
                "state": _texts(group.ledger(needed)),
                "staleness": _texts(group.staleness),
            }
            for group, needed in zip([*self.header.groups, *late], waiting, strict=True)
        }

    def used(self) -> ConfigError:
        """Return the error for a task that is not as it was, or not new."""
        return ConfigError(
            f"task {self.store.task!r} is not new: something was put into it. Resume into another "
            "task or namespace, or clear() it first; it was not changed."
        )

    def gone(self) -> StoreError:
        """Return the error for a restore area that is not complete any more."""
        return StoreError(
            f"the restored part of task {self.store.task!r} is gone: another process resumes the "
            "task, or Redis was away for too long. The task was not changed; try again."
        )


def _listed(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "none"


def _texts(counts: Mapping[str, int]) -> dict[str, str]:
    return {name: str(count) for name, count in counts.items()}
