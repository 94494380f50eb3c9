"""`replacing`: a file gets its name, and replaces an older one, only when it is complete."""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from redrb.errors import ConfigError

_RANDOM = re.compile(r"[0-9a-f]{32}")


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `target` when the block ends without an error.

    Until then it has another name, and a lock that ends with its process: files of processes that
    were killed are deleted first.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        _delete_abandoned(target)
        with _locked_file(target) as file:
            fresh = Path(file.name)
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                fresh.replace(target)
                _sync(target.parent)
            finally:
                fresh.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from error


def _locked_file(target: Path) -> BinaryIO:
    """Open a new file beside `target` under a random name, and lock it."""
    while True:
        file = target.with_name(f".{target.name}.{uuid.uuid4().hex}").open("xb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # another process has deleted it before it was locked


def _delete_abandoned(target: Path) -> None:
    """Delete the files for `target` that no process holds open."""
    prefix = f".{target.name}."
    for found in target.parent.iterdir():
        if not found.name.startswith(prefix) or not _RANDOM.fullmatch(found.name, len(prefix)):
            continue
        try:
            file = found.open("rb")
        except FileNotFoundError:  # its process is done
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # its process is still writing
                continue
            found.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
