"""`save` writes a task to a file; `resuming` puts it anew."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Self, TypeAlias

from redrb.errors import ConfigError, StoreError
from redrb.staging import replacing
from redrb.stream.saving.directory import saving_into
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
        dead_letters: Dead letters.
        nbytes: Bytes of the file.
    """

    path: Path
    groups: int
    dead_letters: int
    nbytes: int

    @classmethod
    def of(cls, path: Path, ending: TaskEnd) -> Self:
        """Return the numbers of a complete file with this ending."""
        return cls(
            path=path,
            groups=ending.groups,
            dead_letters=ending.dead_letters,
            nbytes=path.stat().st_size,
        )


def save(store: TaskStore, path: AnyPath) -> SavedTask:
    """Write a task to a file, which replaces an older one when it is complete.

    Makers and trainers may go on: groups that are stored from the beginning to the end are in the
    file, once. Leased groups are saved as waiting.

    Raises:
        ConfigError: There is no such task, or the file cannot be written.
        StoreUnavailable: Redis stayed away; an older file is unchanged.
    """
    target = Path(path)
    if target.is_dir():
        raise ConfigError(
            f"{target} is a directory, and a task is saved in a file: give the name of one, such "
            f"as {target / store.task}.redrb."
        )
    for _ in range(_ATTEMPTS):
        try:
            with replaced(target) as file:
                ending = _write(store, file)
        except TaskChanged:
            continue
        return SavedTask.of(target, ending)
    raise StoreError(f"task {store.task!r} was cleared while it was saved: try again.")


def save_tasks(tasks: Mapping[str, TaskStore], directory: Path, *, run: str = "") -> None:
    """Write tasks to files, one after the other, and delete an earlier save.

    Args:
        run: The run of a `ReplayBuffer`, which the index names.

    Raises:
        ConfigError, StoreUnavailable: As `save`.
    """
    with saving_into(directory) as files:
        for store in tasks.values():
            files.add(partial(save, store))
        files.commit(dict(zip(tasks, files.names, strict=True)), run)


def _write(store: TaskStore, file: IO[bytes]) -> TaskEnd:
    reader = TaskReader(store, time.time_ns() // 1_000_000)
    writer = SaveWriter(file)
    writer.write(Kind.HEADER, reader.header)
    for sources in reader.sources():
        writer.write(Kind.SOURCES, sources)
    for refreshes in reader.refreshes():
        writer.write(Kind.REFRESHES, refreshes)
    numbers: Counter[str] = Counter()
    for letter in reader.dead_letters():
        writer.dead_letter(letter)
        numbers["dead_letters"] += 1
    for record, payload in reader.groups():
        writer.write(Kind.GROUP, record, payload)
        numbers["groups"] += 1
    ending = TaskEnd(**numbers)
    writer.end(ending)
    return ending


@contextmanager
def replaced(target: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `target` after the block; raises ConfigError."""
    try:
        with replacing(target) as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}.") from error
