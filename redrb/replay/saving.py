"""A buffer saved in a directory: one file of the wire format for each task, and an index of them.

The index is written last and replaced in one step, so an interrupted save leaves the earlier one.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from redrb.errors import ConfigError, DecodeError
from redrb.replay.tasks import Tasks
from redrb.stream.saving.checked_file import CheckedFile
from redrb.stream.saving.resuming import TaskFile, restore_tasks, unrestored

INDEX = "replay_buffer.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class SaveIndex:
    """The index of a save.

    Attributes:
        order: Order of the buffer that was saved.
        files: Task -> name of its file.
        refreshes: "<task> <status>" -> last refresh, as `Tasks.refreshes` returns it.
    """

    order: str
    files: dict[str, str]
    refreshes: dict[str, str]


def save(tasks: Tasks, directory: Path) -> None:
    """Write every task of a buffer, then delete the files of an earlier save.

    Raises:
        ConfigError: The directory cannot be written to; an earlier save is unchanged.
        StoreUnavailable: Redis could not be reached; an earlier save is unchanged.
    """
    stamp = uuid.uuid4().hex[:12]
    files = {task: f"{stamp}-{number}.redrb" for number, task in enumerate(tasks.names())}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        before = _files_of(directory)
        try:
            for task, name in files.items():
                tasks.open(task).save(directory / name)
            refreshes = {
                f"{task} {status}": mark
                for task in files
                for status, mark in tasks.refreshes(task).items()
            }
            _write_index(directory, stamp, SaveIndex(tasks.order, files, refreshes))
        except BaseException:
            _remove(directory, files.values())
            raise
        _remove(directory, before)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written to: {error.strerror}.") from error


def _files_of(directory: Path) -> list[str]:
    """Return the names of the files of an earlier save."""
    with suppress(ConfigError, DecodeError):  # there is no index, or it cannot be read
        return list(read_index(directory).files.values())
    return []


def _write_index(directory: Path, stamp: str, index: SaveIndex) -> None:
    fresh = directory / f"{stamp}.json"
    with fresh.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **asdict(index)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(directory / INDEX)


def _remove(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


def resume(tasks: Tasks, directory: Path) -> None:
    """Fill an empty buffer from a save, or complete a resume of this save that was interrupted.

    Raises:
        ConfigError: There is no save, it is of another order, or the buffer holds groups.
        DecodeError: The save is malformed, or of a newer redrb.
        StoreError: Another process began to resume the buffer meanwhile.
        After each of them nothing is changed, except on a cluster, where a note of the error names
        the tasks that are restored.
    """
    index = read_index(directory)
    if index.order != tasks.order:
        raise ConfigError(
            f"{directory} holds a buffer of order {index.order!r}, this one is {tasks.order!r}: "
            "resume into a buffer of the same order."
        )
    missing = [name for name in index.files.values() if not (directory / name).is_file()]
    if missing:
        raise ConfigError(f"{directory} lacks {', '.join(missing)}: the save is incomplete.")
    files = [
        _task_file(tasks, task, directory / name, index.refreshes)
        for task, name in sorted(index.files.items())
    ]
    stored = tasks.stored(leaving_out=index.files)
    if stored:
        raise ConfigError(
            f"the buffer holds {stored} groups: resume into an empty one, or another namespace."
        )
    waiting = unrestored(files)
    for file in waiting:
        tasks.open(file.store.task)
    if waiting:
        restore_tasks(waiting, number=tasks.now_us())
    for file in waiting:
        if file.put:
            tasks.forget(file.store.task)


def _task_file(tasks: Tasks, task: str, path: Path, refreshes: Mapping[str, str]) -> TaskFile:
    saved = CheckedFile.read(path)
    marks = {}
    for name, mark in refreshes.items():
        refreshed, _, status = name.rpartition(" ")
        if refreshed == task:
            train_step, last = map(int, mark.split())
            # later ids are given to other groups
            marks[status] = f"{train_step} {min(last, saved.header.last)}"
    return TaskFile(tasks.store(task), saved, marks)


def read_index(directory: Path) -> SaveIndex:
    """Return the index of a save, checked.

    Raises:
        ConfigError: The directory holds no index.
        DecodeError: The index is malformed, or of a newer redrb.
    """
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{directory} holds no {INDEX}: give the directory that was given to save()."
        ) from error
    except ValueError as error:
        raise DecodeError(f"{directory / INDEX} is no index of a saved buffer: {error}.") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise DecodeError(
            f"{directory / INDEX} is no index of a saved buffer in format {FORMAT}: upgrade "
            "redrb, or give another directory."
        )
    order, files, refreshes = (index.get(name) for name in ("order", "files", "refreshes"))
    if not isinstance(order, str) or not isinstance(files, dict) or not isinstance(refreshes, dict):
        raise DecodeError(f"{directory / INDEX} is malformed: it has no order, files or refreshes.")
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise DecodeError(
                f"{directory / INDEX} names the file {name!r:.80}, not one beside it."
            )
    for name, mark in refreshes.items():
        if not isinstance(mark, str) or not re.fullmatch(r"[0-9]{1,16} [0-9]{1,16}", mark):
            raise DecodeError(f"{directory / INDEX} is malformed: {name!r:.80} is {mark!r:.80}.")
    return SaveIndex(order, files, refreshes)
