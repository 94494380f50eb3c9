"""Puts saved tasks anew: one task, or all tasks of a `ReplayBuffer`.

The records of a file have numbers, their places: header, dead letters, groups, end. They go to the
task by ordinary puts, in order, and a put names the places of its records as sources, as a
stage names groups that it forwards (`redrb/lua/include/sources.lua`). So each record is put once,
whoever dies and however many processes resume the same file
(`docs/contributing/decisions/saving.md`).
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from redrb.codec import EncodedGroup
from redrb.connection.deadline import Deadline, here
from redrb.connection.transport import Pipeline, Replication
from redrb.errors import ConfigError, RedrbError, TaskMismatch
from redrb.experience import Status
from redrb.stream.put.calls import Adopt, Put
from redrb.stream.saving.checking import CheckedContents, CheckedFile, open_saved
from redrb.stream.saving.directory import read_index
from redrb.stream.saving.file import Kind, SaveReader
from redrb.stream.saving.records import (
    SAVED,
    SAVED_FIELDS,
    DeadRecord,
    GroupRecord,
    Need,
    SourceRecord,
    declared_tags,
)
from redrb.stream.saving.saving import AnyPath, SavedTask
from redrb.stream.saving.snapshot import PAGE_BYTES, PAGE_GROUPS
from redrb.stream.task.calls import Join, Open
from redrb.stream.task.configuring import open_task
from redrb.stream.task.settings import STORED_DEFAULTS, WIRE_FORMAT
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import caller, check_whole, shown_settings
from redrb.unpacking import Reading
from redrb.weights.wire.calls import Advance

_MORE, _END = "0", "end:"
"""Digest of the records of a file, and what that of its last one begins with; then comes an id."""


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A task, and the file that it is resumed from."""

    store: TaskStore
    saved: CheckedFile


def resume(store: TaskStore, path: AnyPath) -> SavedTask:
    """Put the groups of a file into an empty task, or go on where an earlier call broke off.

    Settings that the task was not given are those of the save.

    Raises:
        ConfigError: The file cannot be read, or the task holds groups, or was deleted meanwhile.
        TaskMismatch: The task has another order, or other tags.
        DecodeError: The file is damaged, or of another format.
        StoreUnavailable: Redis stayed away. After this and other errors midway the same call goes
            on; before the first put the task is unchanged.
    """
    source = Path(path)
    if source.is_dir():
        raise ConfigError(
            f"{source} is a directory: give a file of `save`. `ReplayBuffer.resume` fills a buffer "
            "from a directory."
        )
    saved = CheckedFile.read(source)
    for each in unresumed([TaskFile(store, saved)]):
        each.run()
    return SavedTask.of(source, saved.ending)


def read_directory(directory: Path) -> dict[str, CheckedFile]:
    """Return the file of each task in a directory.

    Raises:
        ConfigError: There is no index, or a file cannot be read.
        DecodeError: The index or a file is damaged, or of another format.
    """
    index = read_index(directory).files
    missing = [name for name in index.values() if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            f"{directory} lacks {', '.join(missing)}: the save is incomplete. Use another copy."
        )
    return {task: CheckedFile.read(directory / name) for task, name in index.items()}


def unresumed(files: Iterable[TaskFile]) -> list[Resumption]:
    """Return the tasks of one save that are to be filled, or to be filled further.

    Tasks that an earlier call has filled are left out. If it has filled all of them, nothing is to
    be done, unless they were used since.

    Raises:
        ConfigError: A task holds groups, or is being filled from another file.
    """
    found = [(each, _State.of(each.store)) for each in files]
    waiting = [(each, state) for each, state in found if not state.has_all(each.saved)]
    for each, state in waiting or found:
        if waiting and state.file != each.saved.checksum:
            if state.stored:
                raise _not_empty(each.store, state.stored)
            if state.ids and state.complete is None:
                raise _other_file(each.store)
        if not waiting and not state.is_unchanged(each.saved):
            why = " It was resumed from this save before, and used since."
            raise _not_empty(each.store, state.stored, why)
    return [Resumption(each, state) for each, state in waiting]


@dataclass(frozen=True, slots=True)
class _State:
    """What a task has of a file.

    Attributes:
        row: Of the origin `SAVED`: it begins with the checksum of the file that was resumed last;
            b"": none was.
        complete: Newest id of the task when the last record of that file was put; None: it was not.
        ids: Id of each group of the newest put, and perhaps of some earlier ones, by its place; 0
            for a record that is no group.
        last: Newest id of the task.
        groups: Stored groups.
        stored: Stored groups and dead letters, and groups of which some parts wait.
    """

    row: bytes
    complete: int | None
    ids: Mapping[int, int]
    last: int
    groups: int
    stored: int

    @classmethod
    def of(cls, store: TaskStore) -> _State:
        look, prefix = Pipeline(), store.keys.prefix
        look.add("HGET", f"{prefix}sources", SAVED)
        look.add("HGETALL", f"{prefix}sources:{SAVED}")
        look.add("HGET", store.keys.puts, "last")
        look.add("XLEN", store.keys.stream)
        look.add("XLEN", store.keys.dead)
        look.add("HLEN", f"{prefix}part_records")
        row, flat, last, groups, letters, parts = store.exchange(look)
        with Reading(f"the records of the file that task {store.task!r} was resumed from"):
            records = [record.split() for record in flat[1::2]]
            ids = {int(p): int(seq) for p, (seq, _) in zip(flat[::2], records, strict=True)}
            ends = [digest.decode() for _, digest in records if digest.startswith(_END.encode())]
            complete = int(ends[0].removeprefix(_END)) if ends else None
            return cls(row or b"", complete, ids, int(last or 0), groups, groups + letters + parts)

    @property
    def file(self) -> str:
        """Checksum of the file that was resumed last; "": none was."""
        return self.row.partition(b" ")[0].decode(errors="replace")

    @property
    def place(self) -> int:
        """Place of the newest record of the file that was put; 0: none was."""
        return max(self.ids, default=0)

    def has_all(self, saved: CheckedFile) -> bool:
        """Return whether all records of a file were put."""
        return self.file == saved.checksum and self.complete is not None

    def is_unchanged(self, saved: CheckedFile) -> bool:
        """Return whether a task that has all records of a file was not used since."""
        groups, letters = saved.ending.groups, saved.ending.dead_letters
        return (self.groups, self.stored, self.last) == (groups, groups + letters, self.complete)


@dataclass(slots=True)
class _Page:
    """Records of one put: groups, or dead letters.

    Attributes:
        places: Of the records.
        needs, letters: As `redrb/lua/include/saved.lua` reads them.
        words: Fields of the dead letters, name by name and value by value.
    """

    places: list[int] = field(default_factory=list)
    groups: list[EncodedGroup] = field(default_factory=list)
    facts: list[bytes] = field(default_factory=list)
    needs: list[tuple[Any, ...]] = field(default_factory=list)
    letters: list[tuple[Any, ...]] = field(default_factory=list)
    words: list[bytes] = field(default_factory=list)
    nbytes: int = 0

    def fits(self, nbytes: int, *, group: bool) -> bool:
        """Return whether a record of so many bytes belongs here."""
        alike = not self.places or bool(self.groups) == group
        return alike and len(self.places) < PAGE_GROUPS and self.nbytes + nbytes <= PAGE_BYTES


class Resumption:
    """Puts the records of one file that its task does not have yet."""

    def __init__(self, file: TaskFile, state: _State) -> None:
        """Note what the task has; where others resume into it since, they are found by the puts."""
        self._store, self._saved, self._header = file.store, file.saved, file.saved.header
        self._done = state.place if state.file == file.saved.checksum else 0
        self._row = b"" if self._done else state.row
        self._place = 1  # of the record that was read last; the header's is 1
        self._page = _Page(places=[] if self._done else [1])
        self._marks: list[tuple[int, str, int]] = []  # last id, status, train step
        self._producer, self._operation, self._epoch = uuid.uuid4().hex, 0, 0
        self._replication = Replication(file.store.client.min_replicas)

    @property
    def task(self) -> str:
        """Name of the task."""
        return self._store.task

    def run(self) -> None:
        """Put all of them; raises as `resume`."""
        try:
            with Deadline():  # refusals are counted for this resume alone
                self._run()
        except RedrbError as error:
            if self._done:
                error.add_note(
                    f"{self._done} of {self._saved.places} records of {self._saved.path} are in "
                    f"task {self._store.task!r}: resume the file again, and it goes on."
                )
            raise

    def _run(self) -> None:
        saved = self._saved
        contents = CheckedContents(str(saved.path))
        with open_saved(saved.path) as file:
            reader = SaveReader(file, str(saved.path))
            for frame in reader.frames(payloads=True):
                record = contents.add(frame)
                if frame.kind is Kind.HEADER and contents.header == self._header:
                    self._begin()
                elif isinstance(record, SourceRecord):
                    self._keep_sources(record)
                elif isinstance(record, dict):
                    self._marks += [(last, name, step) for name, (step, last) in record.items()]
                elif isinstance(record, DeadRecord):
                    self._dead_letter(record)
                elif isinstance(record, GroupRecord):
                    self._group(record, frame.payload)
                elif frame.kind is Kind.HEADER:
                    break
        if reader.checksum != saved.checksum:
            raise ConfigError(f"{saved.path} was replaced while it was read: resume it again.")
        self._flush()
        self._refresh(self._header.last)
        if self._header.version:
            self._store.call(Advance(self._header.version))
        self._next(0, group=False)
        self._flush()
        self._store.client.execute("HDEL", self._store.keys.puts, self._producer)

    def _begin(self) -> None:
        """Give a task of which nothing was put its settings and consumer groups."""
        if self._done:
            return
        own = self._own_settings()
        merged = self._merged(own)
        new = {name: value for name, value in merged.items() if name not in own}
        implied = set(new.pop("implied", "").split())
        opened = open_task(
            self._store,
            Open(
                uuid.uuid4().hex,
                caller(self._store),
                given={n: v for n, v in new.items() if n not in (implied | STORED_DEFAULTS.keys())},
                implied={name: value for name, value in new.items() if name in implied},
                defaults={name: merged[name] for name in STORED_DEFAULTS},
                configured=frozenset(new.pop("configured", "").split()),
            ),
        )
        self._epoch = opened.epoch if opened else 0
        for group in self._header.groups:
            list(self._store.pages(Join(group)))
        if self._row:  # of an earlier file, whose groups have all ended
            sha = hashlib.sha1(self._row, usedforsecurity=False).hexdigest()
            if not self._store.call(Adopt(SAVED, sha, self._saved.checksum, 0, ())):
                raise _other_file(self._store)

    def _own_settings(self) -> dict[str, str]:
        flat = self._store.client.execute("HGETALL", self._store.keys.task)
        with Reading(f"the settings of task {self._store.task!r}"):
            names = [name.decode() for name in flat[::2]]
            pairs = zip(names, flat[1::2], strict=True)
            return {name: value.decode() for name, value in pairs if name in SAVED_FIELDS}

    def _merged(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the settings that the task was given, and those of the file for all others."""
        saved = self._header.settings
        differing: dict[str, tuple[object, object]] = {}
        defaults = {"format": str(WIRE_FORMAT), "order": "fifo", "sampled": "0"}
        for name, default in defaults.items():
            if name in given and given[name] != saved.get(name, default):
                differing[name] = (given[name], saved.get(name, default))
        if "tags" in given and declared_tags(given) != self._header.tags:
            differing["tags"] = (list(declared_tags(given)), list(self._header.tags))
        if differing:
            raise TaskMismatch(self._store.task, differing)
        merged = {**STORED_DEFAULTS, **saved, **given}
        try:
            check_whole(merged)
        except ConfigError as error:
            own = shown_settings({name: value for name, value in given.items() if value})
            raise ConfigError(
                f"the settings of {self._saved.path} ({_listed(shown_settings(saved))}) and those "
                f"that task {self._store.task!r} was given ({_listed(own)}) do not fit together: "
                f"{error} Open the task with settings that fit, and resume again; it was not "
                "changed."
            ) from error
        return merged

    def _keep_sources(self, record: SourceRecord) -> None:
        """Let the task know groups that were forwarded into it, unless it knows more by now."""
        if self._done:
            return
        made, prefix = Pipeline(), self._store.keys.prefix
        made.add("HSETNX", f"{prefix}sources", record.origin, record.row)
        for seq, digest in record.digests.items():
            made.add("HSETNX", f"{prefix}sources:{record.origin}", seq, f"0 {digest}")
        self._store.exchange(made)

    def _dead_letter(self, record: DeadRecord) -> None:
        fields = dict(record.fields)
        nbytes, words = (
            sum(map(len, fields.values())),
            [word for pair in record.fields for word in pair],
        )
        page = self._next(nbytes, group=False)
        if page is None:
            return
        known = bool(fields.get(b"facts"))  # else it cannot be requeued
        seq = fields[b"seq"].decode() if known else "0"
        source = fields.get(b"source", seq.encode()).decode() if known else "0"
        group = fields[b"group"].decode() if known else ""
        page.letters.append((record.entry_id, group, seq, source, len(words)))
        page.words += words

    def _group(self, record: GroupRecord, payload: bytes) -> None:
        if self._marks and record.seq > min(self._marks)[0]:
            self._flush()
            self._refresh(record.seq - 1)
        page = self._next(len(payload), group=True)
        if page is None:
            return
        facts = record.facts
        page.groups.append(
            EncodedGroup(payload, facts["samples"], facts.get("version"), Status(facts["status"]))
        )
        page.facts.append(msgspec.msgpack.encode({**facts, "size": len(payload)}))
        page.needs += self._needs(record.needs, len(page.groups))

    def _needs(self, needs: Sequence[Need], number: int) -> Iterator[tuple[Any, ...]]:
        """Yield what consumer groups know of a group, beside that they need it."""
        by_place = {need.place: need for need in needs}
        for place, name in enumerate(self._header.groups):
            need = by_place.get(place)
            if need is None:
                yield number, name, False, "", "", "", ""
            elif need != Need(place):
                counts = (str(count or "") for count in (need.failed, need.reads))
                yield number, name, True, need.moved, need.expiry, *counts

    def _next(self, nbytes: int, *, group: bool) -> _Page | None:
        """Return the page of the next record; None if the record was put before."""
        self._place += 1
        if self._place <= self._done:
            return None
        if not self._page.fits(nbytes, group=group):
            self._flush()
        self._page.places.append(self._place)
        self._page.nbytes += nbytes
        return self._page

    def _flush(self) -> None:
        """Put the records of the page, each once."""
        page, self._page = self._page, _Page()
        while page.places and page.places[-1] > self._done:
            self._operation += 1
            request = self._put(page).storing(
                self._store,
                page.groups,
                [*page.facts, *page.words],
                self._replication,
                evict=None,
                whole=self._operation == 1,
            )
            reply = request.result()
            if reply.outcome in ("ok", "again"):
                self._done = page.places[-1]
            elif reply.outcome == "forgotten":
                self._epoch = reply.epoch
            elif reply.outcome == "more":
                if here().pages_over:
                    raise self._store.unfinished()
            else:
                self._look(reply.outcome)

    def _look(self, outcome: str) -> None:
        """Learn how far other processes have come that resume the file, too."""
        state = _State.of(self._store)
        if state.file != self._saved.checksum or state.place < self._done:
            raise _other_file(self._store)
        self._store.refused(outcome, state.place)
        self._done = state.place

    def _put(self, page: _Page) -> Put:
        statuses = {group.status for group in page.groups}
        sources: dict[str, Any] = {
            "origin": SAVED,
            "incarnation": self._saved.checksum,
            "floor": page.places[0] - 1,
            "kept": (),
            "ids": list(map(str, page.places)),
            "digests": [_MORE] * len(page.places),
        }
        if page.places[-1] == self._saved.places:
            sources["digests"] = [f"{_END}{_State.of(self._store).last}"]
        saved = {
            "groups": len(page.groups),
            "needs": page.needs,
            "letters": page.letters,
            "last": self._header.last if page.places[0] == 1 else 0,
        }
        return Put(
            producer=self._producer,
            operation=self._operation,
            epoch=self._epoch,
            samples=sum(group.samples for group in page.groups),
            nbytes=sum(group.nbytes for group in page.groups),
            filtered=0,
            expired=0,
            revision="",
            status=statuses.pop() if len(statuses) == 1 else "",
            kind="",
            rights=None,
            sources=sources,
            parts=None,
            saved=saved,
        )

    def _refresh(self, last: int) -> None:
        """Note refreshes of groups up to an id in the saved task, all of which are put."""
        noted = [mark for mark in self._marks if mark[0] <= last]
        self._marks = [mark for mark in self._marks if mark[0] > last]
        own = _State.of(self._store).ids.get(self._place, 0) if noted else 0
        if own:  # else there is no such group, or others have noted it and gone on
            pairs = [word for _, name, step in noted for word in (name, f"{step} {own}")]
            self._store.client.execute("HSET", self._store.keys.refreshed, *pairs)


def _not_empty(store: TaskStore, stored: int, why: str = "") -> ConfigError:
    return ConfigError(
        f"task {store.task!r} is not new: it holds {stored} groups or dead letters. Resume into "
        "another task or namespace, or delete it first (`redrb rm` deletes it, or clear()); it was "
        f"not changed.{why}"
    )


def _other_file(store: TaskStore) -> ConfigError:
    return ConfigError(
        f"task {store.task!r} was deleted meanwhile, or another file is being resumed into it: "
        "resume that one again, and it goes on; or clear() the task, or take another one."
    )


def _listed(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "none"
