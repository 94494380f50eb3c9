"""Save a task to a file, and resume it from there.

On a resume nothing is changed until all is there, and whatever goes wrong leaves nothing behind
(`docs/decisions/0012-saving.md`).
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from redrb.errors import ConfigError, StoreError
from redrb.stream.saving.file import Ending, Kind, SaveReader, SaveWriter
from redrb.stream.saving.records import Contents
from redrb.stream.saving.restoring import Restoring
from redrb.stream.saving.snapshot import ChangedMeanwhileError, DeadRecord, GroupRecord, TaskReader
from redrb.stream.task.store import TaskStore

AnyPath: TypeAlias = str | os.PathLike[str]

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class SavedTask:
    """What a file of a saved task holds.

    Attributes:
        path: The file.
        groups: Groups in it that wait, history not counted.
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
    """Write a task to a file: a new one replaces an old one when it is complete.

    Makers and trainers may go on: what is stored from the beginning to the end is in the file,
    once. What is leased is saved as waiting.

    Raises:
        ConfigError: There is no such task, or the file cannot be written.
        StoreUnavailable: Redis stayed away; an older file is as it was.
    """
    target = Path(path)
    for _ in range(_ATTEMPTS):
        try:
            with _replacing(target) as file:
                ending = _write(store, file)
        except ChangedMeanwhileError:
            continue
        return _saved(target, ending)
    raise StoreError(f"task {store.task!r} became another one while it was saved: try again.")


def resume_task(store: TaskStore, path: AnyPath) -> SavedTask:
    """Fill an empty task from a file: it is what it was, and what was leased waits.

    Settings of the file are taken over where the task has none of its own. On any error the task is
    as it was.

    Raises:
        ConfigError: The file cannot be read, or the task was used: clear it first.
        TaskMismatch: The task has another order, or other tags.
        DecodeError: The file is damaged, or of a newer format.
        StoreUnavailable: Redis stayed away; `uncertain` where the last step may have been done.
    """
    source = Path(path)
    try:
        file = source.open("rb")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error}.") from error
    with file:
        contents = _checked(file, source)
        restoring = Restoring(store, contents.header, contents.ending)
        try:
            restoring.begin()
            _restore(file, source, restoring)
            restoring.end()
        except BaseException:
            restoring.give_up()
            raise
    return _saved(source, contents.ending)


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `target` when the block ends well."""
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        try:
            with fresh.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(target)
            _sync(target.parent)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from error


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(store: TaskStore, file: BinaryIO) -> Ending:
    reader = TaskReader(store, time.time_ns() // 1_000_000)
    writer = SaveWriter(file)
    writer.header(reader.header)
    counted: Counter[str] = Counter()
    waiting = [0] * len(reader.header.groups)
    for record, payload in reader.groups():
        writer.group(record, payload)
        counted["groups"] += 1
        counted["archived"] += record.archived != ""
        for need in record.needs:
            waiting[need.place] += 1
    for letter in reader.dead_letters():
        writer.dead_letter(letter)
        counted["dead_letters"] += 1
    for terms in reader.terms():
        writer.pairs(Kind.TERMS, terms)
    for producers in reader.producers():
        writer.pairs(Kind.PRODUCERS, producers)
    ending = Ending(**counted, waiting=waiting, cursors=reader.cursors)
    writer.end(ending)
    return ending


def _saved(path: Path, ending: Ending) -> SavedTask:
    return SavedTask(
        path=path,
        groups=ending.groups - ending.archived,
        archived=ending.archived,
        dead_letters=ending.dead_letters,
        nbytes=path.stat().st_size,
    )


def _checked(file: BinaryIO, source: Path) -> Contents:
    """Read all of a file once, to know that it is whole."""
    contents = Contents(str(source))
    for frame in SaveReader(file, str(source)).frames(payloads=False):
        contents.add(frame)
    return contents


def _restore(file: BinaryIO, source: Path, restoring: Restoring) -> None:
    """Read a file again and put what it holds on the stage; it is checked again on the way."""
    contents = Contents(str(source))
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
