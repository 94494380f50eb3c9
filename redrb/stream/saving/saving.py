"""`save_task` writes a task to a file; `resuming` builds the task anew from it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self, TypeAlias

from redrb.errors import ConfigError, StoreError
from redrb.staging import staging, sync_folder
from redrb.stream.saving.file import Kind, SaveWriter
from redrb.stream.saving.records import TaskEnd
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

    @classmethod
    def of(cls, path: Path, ending: TaskEnd) -> Self:
        """Return the numbers of a complete file with this ending."""
        return cls(
            path=path,
            groups=ending.groups - ending.archived,
            archived=ending.archived,
            dead_letters=ending.dead_letters,
            nbytes=path.stat().st_size,
        )


def save_task(store: TaskStore, path: AnyPath, *, partitions: int = 1) -> SavedTask:
    """Write a task to a file, which replaces an older one when it is complete.

    Makers and trainers may go on: groups that are stored from the beginning to the end are in the
    file, once. Leased groups are saved as waiting.

    Args:
        partitions: Number of partitions that the task has.

    Raises:
        ConfigError: There is no such task, it has another number of partitions, or the file cannot
            be written.
        StoreUnavailable: Redis stayed away; an older file is unchanged.
    """
    target = Path(path)
    for _ in range(_ATTEMPTS):
        try:
            with replacing(target) as file:
                ending = _write(store, file, partitions)
        except TaskChanged:
            continue
        return SavedTask.of(target, ending)
    raise StoreError(f"task {store.task!r} was cleared while it was saved: try again.")


def _write(store: TaskStore, file: BinaryIO, partitions: int) -> TaskEnd:
    reader = TaskReader(store, time.time_ns() // 1_000_000)
    if reader.header.partitions != partitions:
        raise ConfigError(
            f"task {store.task!r} has {reader.header.partitions} partitions, not {partitions}: "
            "give that number."
        )
    writer = SaveWriter(file)
    writer.write(Kind.HEADER, reader.header)
    numbers: Counter[str] = Counter()
    waiting = [0] * len(reader.header.groups)
    for record, payload in reader.groups():
        writer.write(Kind.GROUP, record, payload)
        numbers["groups"] += 1
        numbers["archived"] += record.archived != ""
        for need in record.needs:
            waiting[need.place] += 1
    for letter in reader.dead_letters():
        writer.dead_letter(letter)
        numbers["dead_letters"] += 1
    for producers in reader.producers():
        writer.write(Kind.PRODUCERS, producers)
    for sources in reader.sources():
        writer.write(Kind.SOURCES, sources)
    ending = TaskEnd(**numbers, waiting=waiting)
    writer.end(ending)
    return ending


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Open a new file, in a folder of `staging`, that replaces `target` after the block."""
    try:
        with staging(target) as folder:
            fresh = folder / target.name
            with fresh.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(target)
            sync_folder(target.parent)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from error
