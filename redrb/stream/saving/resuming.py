"""Builds tasks anew from their files: one task, or all tasks of a `ReplayBuffer`.

Every task is built in a restore area first. The last step puts all areas of one server in the
places of their tasks, or none of them; nothing is ever deleted from a task that holds groups
(`docs/contributing/decisions/saving.md`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from redrb.errors import ConfigError, StoreError
from redrb.stream.saving.calls import EndRestore, FindRestored, PartKind, RestoredTask
from redrb.stream.saving.checking import CheckedContents, CheckedFile, open_saved
from redrb.stream.saving.directory import read_index
from redrb.stream.saving.file import Kind, SaveReader
from redrb.stream.saving.records import DeadRecord, GroupRecord
from redrb.stream.saving.restoring import Restoring
from redrb.stream.saving.saving import AnyPath, SavedTask
from redrb.stream.task.store import TaskStore


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A task, and the file that it is restored from.

    Attributes:
        put: Groups that were ever put into the task, all of which have ended.
    """

    store: TaskStore
    saved: CheckedFile
    put: int = 0


_PARTS: Mapping[Kind, PartKind] = {
    Kind.PRODUCERS: "puts",
    Kind.SOURCES: "sources",
    Kind.REFRESHES: "refreshed",
}


def resume(store: TaskStore, path: AnyPath) -> SavedTask:
    """Fill an unused task from a file. Settings that the task was not given are those of the save.

    Raises:
        ConfigError: The save cannot be read, or the task was used: clear it first.
        TaskMismatch: The task has another order, or other tags.
        DecodeError: The save is damaged, or of a newer format.
        StoreError: Another process began to resume the task meanwhile.
        StoreUnavailable: Redis stayed away; `uncertain` is set if the last step may be done.
        After each of them, unless it is uncertain, the task is unchanged.
    """
    source = Path(path)
    if source.is_dir():
        raise ConfigError(
            f"{source} is a directory: give a file of `save`. `ReplayBuffer.resume` fills a buffer "
            "from a directory."
        )
    saved = CheckedFile.read(source)
    restore_tasks([TaskFile(store, saved)], number=0)
    return SavedTask.of(source, saved.ending)


def read_directory(directory: Path) -> dict[str, CheckedFile]:
    """Return the file of each task in a directory.

    Raises:
        ConfigError: There is no index, or a file cannot be read.
        DecodeError: The index or a file is damaged, or of a newer format.
    """
    index = {task: name for task, (name,) in read_index(directory).files.items()}
    missing = [name for name in index.values() if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            f"{directory} lacks {', '.join(missing)}: the save is incomplete. Use another copy."
        )
    return {task: CheckedFile.read(directory / name) for task, name in index.items()}


def unrestored(files: Iterable[TaskFile]) -> list[TaskFile]:
    """Return the tasks of one save that are still to be restored; nothing is changed.

    If only some of the tasks were restored from their files, a resume was interrupted, and the
    others are returned. If all of them were, and groups were put or taken since, the save is
    restored again, like any other.

    Raises:
        ConfigError: A task that is to be restored holds groups.
    """
    known, others, unchanged, stored_by_known = [], [], True, 0
    stored = 0
    for each in files:
        saved = each.saved
        restored = each.store.call(FindRestored(saved.checksum, saved.ever_put, saved.whole))
        found = replace(each, put=restored.put)
        unchanged = unchanged and restored.how == "unchanged"
        if restored.how == "other":
            others.append(found)
            stored += restored.stored
        else:
            known.append(found)
            stored_by_known += restored.stored
    if unchanged:
        return []
    if stored or (not others and stored_by_known):
        why = "" if others else " It was resumed from this save before, and used since."
        raise ConfigError(
            f"task {found.store.task!r}, or one that was saved with it, holds "
            f"{stored or stored_by_known} groups or dead letters: resume into an empty one "
            f"(`redrb rm` deletes it), or another namespace.{why}"
        )
    return others or known


def restore_directory(files: Sequence[TaskFile]) -> None:
    """Restore tasks of a directory; of processes that do so at the same time the last one goes on.

    Raises as `restore_tasks`.
    """
    if files:
        seconds, microseconds = map(int, files[0].store.client.execute("TIME"))
        restore_tasks(files, number=seconds * 1_000_000 + microseconds)


def restore_tasks(files: Sequence[TaskFile], *, number: int) -> None:
    """Replace tasks that hold nothing by those of their files.

    Tasks on one server are replaced in one step, all or none. On a cluster this holds for each
    slot: an error may leave some tasks restored, which a note of the error names. The first task is
    the first one that is replaced, in every process that gives the tasks in the same order.

    Args:
        number: Attempts with a larger number replace this one; an attempt with 0 replaces every
            other one.

    Raises:
        ConfigError, TaskMismatch, DecodeError, StoreError, StoreUnavailable: As `resume`.
    """
    attempts = [Restoring(each.store, each.saved, put=each.put, number=number) for each in files]
    done: list[str] = []
    try:
        for restoring in attempts:
            restoring.begin()
        for restoring in attempts:
            _fill(restoring)
        for _, together in groupby(attempts, lambda restoring: restoring.store.client):
            batch = list(together)
            _replace_tasks(batch)
            done += [restoring.store.task for restoring in batch]
    except BaseException as error:
        if done:
            error.add_note(f"Tasks {', '.join(done)} are restored: resume again for the others.")
        with suppress(StoreError):  # while Redis is away the restore areas are left to expire
            for restoring in attempts:
                restoring.give_up()
        raise


def _fill(restoring: Restoring) -> None:
    """Read a file again, check it again, and put its records in the restore area."""
    path = restoring.saved.path
    contents = CheckedContents(str(path))
    with open_saved(path) as file:
        for frame in SaveReader(file, str(path)).frames(payloads=True):
            record = contents.add(frame)
            if isinstance(record, GroupRecord):
                restoring.group(record, frame.payload)
            elif isinstance(record, DeadRecord):
                restoring.dead_letter(record)
            elif record:
                restoring.part(_PARTS[frame.kind], record)
    if (contents.header, contents.ending) != (restoring.saved.header, restoring.saved.ending):
        raise ConfigError(f"{path} was replaced while it was read: resume it again.")
    restoring.end()


def _replace_tasks(all_restoring: Sequence[Restoring]) -> None:
    """Replace tasks on one server, or in one slot of a cluster, by their areas: all or none."""
    first = all_restoring[0].store
    by_stream = {each.store.keys.stream: each for each in all_restoring}
    restored = [RestoredTask(each.token, each.put, each.whole) for each in all_restoring]
    reply = EndRestore(restored).run(first.client, list(by_stream))
    if reply.outcome == "ok":
        return
    restoring = by_stream[reply.stream]
    if reply.outcome == "used":
        raise restoring.used()
    if reply.outcome == "differs":
        raise ConfigError(
            f"task {restoring.store.task!r} got another {', '.join(reply.settings)} while it was "
            "restored: nothing was changed; resume it again."
        )
    raise restoring.gone()
