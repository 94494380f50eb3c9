"""Several saved tasks in a directory, and an index that names their files.

The index is written last and replaced in one step, so an interrupted save leaves the earlier one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from redrb.errors import ConfigError, DecodeError
from redrb.staging import staging, staging_folders, sync_folder

T = TypeVar("T")

INDEX: Final = "saved_tasks.json"

_SAVED = re.compile(r"([0-9a-f]{12,32})-[0-9]+\.redrb\Z")

FileName: TypeAlias = Annotated[str, Meta(pattern=rf"\A{_SAVED.pattern}")]


class SavedIndex(msgspec.Struct, frozen=True):
    """The index of a directory.

    Attributes:
        files: The file of each task, which is beside the index.
        run: The run of a `ReplayBuffer`; "": of none.
    """

    files: dict[str, FileName]
    run: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._/@+-]{0,128}\Z")] = ""
    format: Literal[2] = 2


def read_index(directory: Path) -> SavedIndex:
    """Return the names of the files in a directory, by task, and the run.

    Raises:
        ConfigError: There is no index, or it cannot be read.
        DecodeError: The index is malformed, or of a newer format.
    """
    try:
        found = _indexed(directory)
    except OSError as error:
        raise ConfigError(f"{directory / INDEX} cannot be read: {error.strerror}.") from error
    if found is None:
        raise ConfigError(
            f"{directory} holds no {INDEX}, the index of saved tasks: give a file or directory "
            "that `save` has written."
        )
    return found


def _indexed(directory: Path) -> SavedIndex | None:
    """Return what `read_index` does, None if there is no index; raises DecodeError or OSError."""
    path = directory / INDEX
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedIndex)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise DecodeError(
            f"{path} is no index of saved tasks in format 2: {error}. Upgrade redrb, or give "
            "another directory."
        ) from error


class NewFiles:
    """The files of one save: they are written in its staging folder, and then moved beside it."""

    def __init__(self, directory: Path, folder: Path) -> None:
        self._directory = directory
        self._folder = folder
        self.names: list[str] = []

    def add(self, write: Callable[[Path], T]) -> T:
        """Let `write` make the next file at a path, move it to its place, and return the result."""
        name = f"{_stamp(self._folder)}-{len(self.names)}.redrb"
        self.names.append(name)
        written = write(self._folder / name)
        (self._folder / name).rename(self._directory / name)
        return written

    def commit(self, files: dict[str, str], run: str = "") -> None:
        """Replace the index by one that names the file of each task, and a run."""
        fresh = self._folder / INDEX
        with fresh.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(SavedIndex(files, run)), indent=1))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._directory)  # the files before the index that names them
        fresh.replace(self._directory / INDEX)


@contextmanager
def saving_into(directory: Path) -> Iterator[NewFiles]:
    """Save several files; at the end those of earlier and of killed saves are deleted.

    The files get their names from the folder in which the index is staged, so that those of a
    process that was killed are known, and are deleted by the next save. If the block raises, its
    files are deleted, and an earlier save is unchanged. The directory is made if it is missing.

    Raises:
        ConfigError: The directory cannot be written to; an earlier save is unchanged.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(
            f"{directory} is a file, and a buffer is saved in a directory: give the name of one."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with staging(directory / INDEX) as folder:
            _delete_unused(directory, but=None)
            files = NewFiles(directory, folder)
            try:
                yield files
            except BaseException:
                for name in files.names:
                    (directory / name).unlink(missing_ok=True)
                raise
            sync_folder(directory)
            _delete_unused(directory, but=_stamp(folder))
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written to: {error.strerror}.") from error


def _delete_unused(directory: Path, *, but: str | None) -> None:
    """Delete the files of earlier and of killed saves, but those that the index names."""
    found = {path: _SAVED.match(path.name) for path in directory.iterdir()}
    saved = {path: match[1] for path, match in found.items() if match}
    # Files of other processes are spared as long as they have a folder, and then the index, which
    # is read after that, names them. `but` is the stamp of a save that is done.
    written = {_stamp(folder) for folder in staging_folders(directory / INDEX)} - {but}
    try:
        index = _indexed(directory)
        used = set(index.files.values()) if index else set()
    except DecodeError:  # nobody knows which files it names
        return
    for path, stamp in saved.items():
        if path.name not in used and stamp not in written:
            path.unlink(missing_ok=True)


def _stamp(folder: Path) -> str:
    """Return the random digits in the name of a staging folder."""
    return folder.name.rpartition(".")[2]
