"""`save_task` writes a task to a file, `resume_task` builds the task anew from the file.

A resume changes the task in its last step only; a resume that fails leaves nothing behind
(`docs/decisions/0012-saving.md`).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from redrb.errors import ConfigError, StoreError
from redrb.stream.saving.checking import CheckedContents
from redrb.stream.saving.file import Kind, SaveReader, SaveWriter
from redrb.stream.saving.records import DeadRecord, GroupRecord, TaskEnd
from redrb.stream.saving.replacing import replacing
from redrb.stream.saving.restoring import Restoring
from redrb.stream.saving.snapshot import TaskChanged, TaskReader
from redrb.stream.task.store import TaskStore

AnyPath: TypeAlias = str | os.PathLike[str]

_ATTEMPTS = 3
"""Attempts to save a task that is cleared meanwhile."""


@dataclass(frozen=True, slots=True)
class SavedTask:
    """The contents of a saved task's file, in numbers.

    Attributes:
        path: The file.
        groups: Waiting groups; leased groups are saved as waiting.
        archived: Groups of the history.
        dead_letters: Dead letters.
        nbytes: Bytes of the file.
    """

    path: Path
    groups: int
    archived: int
    dead_letters: int
    nbytes: int


def save_task(store: TaskStore, path: AnyPath) -> SavedTask:
    """Write a task to a file, which replaces an older one when it is complete.

    Makers and trainers may go on: groups that are stored from the beginning to the end are in the
    file, once. Leased groups are saved as waiting.

    Raises:
        ConfigError: There is no such task, or the file cannot be written.
        StoreUnavailable: Redis stayed away; an older file is unchanged.
    """
    target = Path(path)
    for _ in range(_ATTEMPTS):
        try:
            with replacing(target) as file:
                ending = _write(store, file)
        except TaskChanged:
            continue
        return _saved(target, ending)
    raise StoreError(f"task {store.task!r} was cleared while it was saved: try again.")


def resume_task(store: TaskStore, path: AnyPath) -> SavedTask:
    """Fill an empty task from a file; settings that the task was not given are those of the file.

    Raises:
        ConfigError: The file cannot be read, or the task was used: clear it first.
        TaskMismatch: The task has another order, or other tags.
        DecodeError: The file is damaged, or of a newer format.
        StoreUnavailable: Redis stayed away; `uncertain` is set if the last step may be done.
        After each of them, unless it is uncertain, the task is unchanged.
    """
    source = Path(path)
    try:
        file = source.open("rb")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error}.") from error
    with file:
        contents = _check(file, source)
        restoring = Restoring(store, contents.header, contents.ending)
        try:
            restoring.begin()
            _restore(file, source, restoring)
            restoring.end()
        except BaseException:
            restoring.give_up()
            raise
    return _saved(source, contents.ending)


def _write(store: TaskStore, file: BinaryIO) -> TaskEnd:
    reader = TaskReader(store, time.time_ns() // 1_000_000)
    writer = SaveWriter(file)
    writer.header(reader.header)
    numbers: Counter[str] = Counter()
    waiting = [0] * len(reader.header.groups)
    for record, payload in reader.groups():
        writer.group(record, payload)
        numbers["groups"] += 1
        numbers["archived"] += record.archived != ""
        for need in record.needs:
            waiting[need.place] += 1
    for letter in reader.dead_letters():
        writer.dead_letter(letter)
        numbers["dead_letters"] += 1
    for terms in reader.terms():
        writer.pairs(Kind.TERMS, terms)
    for producers in reader.producers():
        writer.pairs(Kind.PRODUCERS, producers)
    ending = TaskEnd(**numbers, waiting=waiting)
    writer.end(ending)
    return ending


def _saved(path: Path, ending: TaskEnd) -> SavedTask:
    return SavedTask(
        path=path,
        groups=ending.groups - ending.archived,
        archived=ending.archived,
        dead_letters=ending.dead_letters,
        nbytes=path.stat().st_size,
    )


def _check(file: BinaryIO, source: Path) -> CheckedContents:
    """Read all of a file once, to check that it is complete and undamaged."""
    contents = CheckedContents(str(source))
    for frame in SaveReader(file, str(source)).frames(payloads=False):
        contents.add(frame)
    return contents


def _restore(file: BinaryIO, source: Path, restoring: Restoring) -> None:
    """Read a file again, check it again, and put its records on the stage."""
    contents = CheckedContents(str(source))
    for frame in SaveReader(file, str(source)).frames(payloads=True):
        record = contents.add(frame)
        if isinstance(record, GroupRecord):
            restoring.group(record, frame.payload)
        elif isinstance(record, DeadRecord):
            restoring.dead_letter(record)
        elif record:
            restoring.pairs(frame.kind, record)
    if (contents.header, contents.ending) != (restoring.header, restoring.ending):
        raise ConfigError(f"{source} was replaced while it was read: resume it again.")
