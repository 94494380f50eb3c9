"""Tells errors of a disk that may pass, as when it is full, from wrong paths and rights."""

from __future__ import annotations

import errno

_MAY_PASS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE}
)


def may_pass(error: OSError) -> bool:
    """Return whether the same file may be written later: the disk is full, read-only or failing."""
    return error.errno in _MAY_PASS
