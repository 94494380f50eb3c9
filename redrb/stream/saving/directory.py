"""Several saved tasks in a directory, and an index that names their files.

The index is written last and replaced in one step, so an interrupted save leaves the earlier one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from redrb.errors import ConfigError, DecodeError
from redrb.staging import staging, staging_folders, sync_folder

T = TypeVar("T")

_SAVED = re.compile(r"([0-9a-f]{12,32})-[0-9]+\.redrb\Z")


class NewFiles:
    """The files of one save: they are written in its staging folder, and then moved beside it."""

    def __init__(self, index: Path, folder: Path) -> None:
        self._index = index
        self._folder = folder
        self.names: list[str] = []

    def add(self, write: Callable[[Path], T]) -> T:
        """Let `write` make the next file at a path, move it to its place, and return the result."""
        name = f"{_stamp(self._folder)}-{len(self.names)}.redrb"
        self.names.append(name)
        written = write(self._folder / name)
        (self._folder / name).rename(self._index.with_name(name))
        return written

    def commit(self, index: Mapping[str, object]) -> None:
        """Replace the index by one that names these files."""
        fresh = self._folder / self._index.name
        with fresh.open("w", encoding="utf-8") as file:
            json.dump(index, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._index.parent)  # the files before the index that names them
        fresh.replace(self._index)


@contextmanager
def saving_beside(index: Path, read_names: Callable[[], Iterable[str]]) -> Iterator[NewFiles]:
    """Save several files; at the end those of earlier and of killed saves are deleted.

    The files get their names from the folder in which the index is staged, so that those of a
    process that was killed are known, and are deleted by the next save. If the block raises, its
    files are deleted, and an earlier save is unchanged.

    Args:
        index: Path of the index; its directory is made if it is missing.
        read_names: Returns the names of the files that the index names; raises ConfigError if there
            is none, and DecodeError if it is damaged.

    Raises:
        ConfigError: The directory cannot be written to; an earlier save is unchanged.
    """
    directory = index.parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with staging(index) as folder:
            _delete_unused(index, read_names, but=None)
            files = NewFiles(index, folder)
            try:
                yield files
            except BaseException:
                for name in files.names:
                    (directory / name).unlink(missing_ok=True)
                raise
            sync_folder(directory)
            _delete_unused(index, read_names, but=_stamp(folder))
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written to: {error.strerror}.") from error


def _delete_unused(
    index: Path, read_names: Callable[[], Iterable[str]], *, but: str | None
) -> None:
    """Delete the files of earlier and of killed saves, but those that the index names."""
    found = {path: _SAVED.match(path.name) for path in index.parent.iterdir()}
    saved = {path: match[1] for path, match in found.items() if match}
    # Files of other processes are spared as long as they have a folder, and then the index, which
    # is read after that, names them. `but` is the stamp of a save that is done.
    written = {_stamp(folder) for folder in staging_folders(index)} - {but}
    try:
        used = set(read_names())
    except ConfigError:  # there is no index
        used = set()
    except DecodeError:  # nobody knows which files it names
        return
    for path, stamp in saved.items():
        if path.name not in used and stamp not in written:
            path.unlink(missing_ok=True)


def _stamp(folder: Path) -> str:
    """Return the random digits in the name of a staging folder."""
    return folder.name.rpartition(".")[2]
