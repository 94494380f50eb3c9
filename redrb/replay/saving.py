"""A buffer saved in a directory: one file for each task or partition, and an index of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from redrb.damage import Reading
from redrb.errors import ConfigError, DecodeError
from redrb.replay.tasks import Tasks
from redrb.stream.saving.checked_file import CheckedFile
from redrb.stream.saving.directory import saving_beside
from redrb.stream.saving.resuming import TaskFile, restore_tasks, unrestored
from redrb.stream.saving.saving import save_task

INDEX = "replay_buffer.json"


class SaveIndex(msgspec.Struct, frozen=True):
    """The index of a save.

    Attributes:
        files: Part -> name of its file. A part is the name of a task; its further partitions are
            "<task>:<number>".
        refreshes: "<part> <status>" -> last refresh, "<train step> <newest id>".
    """

    order: str
    files: dict[str, str]
    refreshes: dict[str, Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,16} [0-9]{1,16}\Z")]]
    format: Literal[1] = 1


def save(tasks: Tasks, directory: Path) -> None:
    """Write every task of a buffer, then delete the files of an earlier save.

    Raises:
        ConfigError: The directory cannot be written to; an earlier save is unchanged.
        StoreUnavailable: Redis could not be reached; an earlier save is unchanged.
    """
    with saving_beside(directory / INDEX, lambda: read_index(directory).files.values()) as files:
        parts = {
            f"{task}:{number}" if number else task: store
            for task in tasks.names()
            for number, store in enumerate(tasks.stores(task))
        }
        for store in parts.values():
            tasks.open(store.task)
            files.add(partial(save_task, store, partitions=tasks.partitions))
        refreshes: dict[str, str] = {}
        for part, store in parts.items():
            flat = iter(store.client.execute("HGETALL", store.keys.refreshed))
            with Reading(f"the refreshes of task {store.task!r}"):
                for status, mark in zip(flat, flat, strict=True):
                    refreshes[f"{part} {status.decode()}"] = mark.decode()
        names = dict(zip(parts, files.names, strict=True))
        files.commit(msgspec.structs.asdict(SaveIndex(tasks.order, names, refreshes)))


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
        _task_file(tasks, part, directory / name, index.refreshes)
        for part, name in sorted(index.files.items())
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


def _task_file(tasks: Tasks, part: str, path: Path, refreshes: Mapping[str, str]) -> TaskFile:
    saved = CheckedFile.read(path)
    task, _, number = part.partition(":")
    if saved.header.partitions != tasks.partitions:
        raise ConfigError(
            f"{path.parent} holds tasks with {saved.header.partitions} partitions, this buffer has "
            f"{tasks.partitions}: resume into a buffer with "
            f"partitions={saved.header.partitions}."
        )
    if number and not (number.isdecimal() and 0 < int(number) < tasks.partitions):
        raise DecodeError(f"{path.parent / INDEX} is malformed: it has a part {part!r:.80}.")
    marks = {}
    for name, mark in refreshes.items():
        refreshed, _, status = name.rpartition(" ")
        if refreshed == part:
            train_step, last = map(int, mark.split())
            # later ids are given to other groups
            marks[status] = f"{train_step} {min(last, saved.header.last)}"
    return TaskFile(tasks.stores(task)[int(number or 0)], saved, marks)


def read_index(directory: Path) -> SaveIndex:
    """Return the index of a save, checked, or raise ConfigError or DecodeError."""
    path = directory / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=SaveIndex)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{directory} holds no {INDEX}: give the directory that was given to save()."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DecodeError(
            f"{path} is no index of a saved buffer in format 1: {error}. Upgrade redrb, or give "
            "another directory."
        ) from error
    for name in index.files.values():
        if Path(name).name != name:
            raise DecodeError(f"{path} names the file {name!r:.80}, not one beside it.")
    return index
