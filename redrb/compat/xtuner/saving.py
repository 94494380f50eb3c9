"""A buffer saved in a directory: `redrb/stream/saving`."""

from __future__ import annotations

import logging
from pathlib import Path

from redrb.compat.xtuner.tasks import Tasks
from redrb.errors import ConfigError, StoreError
from redrb.stream.saving.directory import read_index
from redrb.stream.saving.resuming import TaskFile, read_directory, unresumed
from redrb.stream.saving.saving import save_tasks
from redrb.words import counted

_log = logging.getLogger("redrb")


def save(tasks: Tasks, directory: Path) -> None:
    """Write every task of a buffer, then delete the files of an earlier save.

    Tasks that Redis has lost are left out with a warning, unless nothing would be left to save.

    Raises:
        ConfigError: The directory cannot be written to; an earlier save is unchanged.
        StoreUnavailable: Redis could not be reached; an earlier save is unchanged.
        StoreError: Redis has lost every task; an earlier save is unchanged.
    """
    tasks.enter()
    known = tasks.names()
    names = [name for name in known if tasks.exists(name)]
    lost = [name for name in known if name not in names and not tasks.removed(name)]
    if lost:
        listed = ", ".join(map(repr, lost))
        if not names:
            raise StoreError(
                f"Redis has lost all tasks of the buffer, {listed}: nothing was saved, and an "
                f"earlier save in {directory} is unchanged. Resume that into a new ReplayBuffer; "
                "or, if they were deleted on purpose, save a new one."
            )
        _log.warning(
            "tasks that Redis has lost are not in the save in %s, which replaces an earlier one: "
            "%s",
            directory,
            listed,
        )
    run = "" if tasks.run is None else tasks.run.name
    save_tasks({name: tasks.store(name) for name in names}, directory, run=run)


def resume(tasks: Tasks, directory: Path) -> None:
    """Fill an empty buffer from a save, or go on with a resume of this save that was interrupted.

    A run goes on with what Redis holds of it: nothing is put then.

    Raises:
        ConfigError: There is no save, it is of another order, or the buffer holds groups, but those
            of this run, or a task was deleted meanwhile.
        DecodeError: The save is malformed, or of another redrb.
        StoreUnavailable: Redis stayed away. After this and other errors midway the same call goes
            on; errors before the first put change nothing.
    """
    index, run = read_index(directory), tasks.run
    exists = any(map(tasks.exists, {*tasks.names(), *index.files}))
    if run is not None and run.goes_on(index.run, exists=exists):
        for task in index.files:
            if not (tasks.exists(task) or tasks.removed(task)):
                _log.warning("Redis has lost task %r, which is not restored: %s", task, directory)
        return
    saved = read_directory(directory)
    for file in saved.values():
        order = file.header.settings.get("order", "fifo")
        if order != tasks.stream_order:
            raise ConfigError(
                f"{directory} holds tasks in the order {order!r}, those of this buffer have "
                f"{tasks.stream_order!r}: resume into a buffer of the same order."
            )
    stored = tasks.stored(leaving_out=saved)
    if stored:
        raise ConfigError(
            f"the buffer holds {counted(stored, 'group')} in tasks that the save lacks: delete "
            f"these (`redrb ls` and `redrb rm`, with --namespace {tasks.namespace}) and resume "
            "again, or resume into another namespace."
        )
    waiting = unresumed(TaskFile(tasks.store(task), file) for task, file in sorted(saved.items()))
    for each in waiting:
        tasks.open(each.task, of_any_run=True)
    for each in waiting:
        each.run()
    if run is not None:
        run.take_over(index.run)
