"""Replacing a folder by another one in a single step."""

from __future__ import annotations

import ctypes
import errno
import os
import uuid
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def exchange(fresh: Path, target: Path) -> None:
    """Exchange the folders `fresh` and `target`; if `target` does not exist, only rename `fresh`.

    `target` exists at every moment, except on file systems without `renameat2` (Linux's manual,
    rename(2)), such as NFS: there it is missing between two renames.

    Raises:
        OSError: The exchange failed; `target` is unchanged.
    """
    if not target.exists():
        fresh.rename(target)
        return
    try:
        _exchange(fresh, target)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        target.rename(aside)
        try:
            fresh.rename(target)
        except OSError:
            aside.rename(target)
            raise
        aside.rename(fresh)


def _exchange(one: Path, other: Path) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:  # glibc before 2.28
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    names = os.fsencode(one), os.fsencode(other)
    if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))
