"""A folder takes the place of another in one step."""

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
    """Give `fresh` the name of `target`; what had it before is at `fresh`, if anything.

    Nobody sees a moment without `target`, except on file systems without `renameat2` (Linux's
    manual, rename(2)), such as NFS: there it is gone between two renames.

    Raises:
        OSError: It could not be done; `target` is what it was.
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
