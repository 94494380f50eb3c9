"""A task with partitions, saved in a directory: a file for each partition, and an index of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from redrb.errors import ConfigError, DecodeError
from redrb.stream.saving.checked_file import CheckedFile
from redrb.stream.saving.directory import saving_beside
from redrb.stream.saving.resuming import TaskFile, restore_tasks, unrestored
from redrb.stream.saving.saving import AnyPath, SavedTask, save_task
from redrb.stream.task.store import TaskStore

INDEX = "partitions.json"
FORMAT = 1


def save_partitions(stores: Sequence[TaskStore], directory: AnyPath) -> SavedTask:
    """Write each partition to a file, one after the other.

    Each file is a save of its partition as `save_task` makes it. The files of earlier saves, and
    of saves whose process was killed, are deleted.

    Raises:
        ConfigError: There is no such task, or the directory cannot be written to.
        StoreUnavailable: Redis stayed away; an earlier save is unchanged.
    """
    target = Path(directory)
    with saving_beside(target / INDEX, lambda: read_index(target)) as files:
        saved = [files.add(partial(save_task, each, partitions=len(stores))) for each in stores]
        files.commit({"format": FORMAT, "files": files.names})
    return _summed(target, saved)


def resume_partitions(stores: Sequence[TaskStore], directory: AnyPath) -> SavedTask:
    """Fill the partitions of a task that holds no groups from a save, or complete such a resume.

    Partitions on one server are restored in one step, all or none. On a cluster this holds for each
    partition: a call that failed or was killed is completed by the next one.

    Raises:
        ConfigError: The save cannot be read, it has another number of partitions, or the task holds
            groups.
        TaskMismatch: The task has another order, or other tags.
        DecodeError: The save is damaged, or of a newer format.
        StoreError: Another process began to resume the task meanwhile.
        StoreUnavailable: Redis stayed away; `uncertain` is set if the last step may be done.
    """
    source = Path(directory)
    files = [CheckedFile.read(source / name) for name in read_index(source)]
    for number, file in enumerate(files):
        if file.header.partitions != len(files):
            raise DecodeError(f"{file.path} is not partition {number} of {len(files)}.")
    home = stores[0].client
    known = stores[0].partitions if home.execute("EXISTS", stores[0].keys.task) else len(stores)
    if len(stores) != len(files) or known != len(files):
        raise ConfigError(
            f"{source} holds a task with {len(files)} partitions, this one has {known}: resume "
            f"into a task with partitions={len(files)}. To change the number, forward its groups "
            "into another task, as docs/scaling.md shows."
        )
    waiting = unrestored(map(TaskFile, stores, files))
    if waiting:
        seconds, microseconds = map(int, home.execute("TIME"))
        restore_tasks(waiting, number=seconds * 1_000_000 + microseconds)
    return _summed(source, [SavedTask.of(file.path, file.ending) for file in files])


def read_index(directory: Path) -> list[str]:
    """Return the names of the files in a directory, by partition.

    Raises:
        ConfigError: It holds no index.
        DecodeError: The index is malformed, or of a newer format.
    """
    path = directory / INDEX
    try:
        index = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Give the directory of a saved task with partitions."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{path} is no index of a saved task: {error}.") from error
    names = index.get("files") if isinstance(index, dict) else None
    if not isinstance(names, list) or index.get("format") != FORMAT or len(names) < 2:
        raise DecodeError(
            f"{path} is no index of a saved task in format {FORMAT}: upgrade redrb, or give "
            "another directory."
        )
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise DecodeError(f"{path} names the file {name!r:.80}, not one beside it.")
    return names


def _summed(directory: Path, parts: Sequence[SavedTask]) -> SavedTask:
    return SavedTask(
        directory,
        sum(part.groups for part in parts),
        sum(part.archived for part in parts),
        sum(part.dead_letters for part in parts),
        sum(part.nbytes for part in parts),
    )
