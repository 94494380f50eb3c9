"""Names that say which process holds something, and whether that process is known to have ended."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from functools import cache
from pathlib import Path

_MOST_HOST = 64
_PLACE = 8
"""Characters that stand for a running kernel and a namespace of process ids in it."""


def process_name() -> str:
    """Return a new name for something that this process holds.

    It is "<host>-<process id>-<place><random>": a place has the same eight characters.
    """
    return f"{this_process(os.getpid())}{uuid.uuid4().hex[:12]}"


def this_process(pid: int) -> str:
    """Return how the names begin of the process with an id in this place.

    Another machine may have the same name, and a container the same ids.
    """
    return f"{socket.gethostname()[:_MOST_HOST]}-{pid}-{_place()}"


def has_ended(name: str) -> bool:
    """Return whether the process of a name is known to have ended.

    Only processes of this machine, and of this namespace of process ids, are known. False for all
    others, for one whose id another process has now, and for names of another form.
    """
    words = name.rsplit("-", 2)
    if len(words) != 3 or not (words[1].isascii() and words[1].isdecimal()):
        return False
    host, pid, place = words[0], words[1], words[2][:_PLACE]
    here = (socket.gethostname()[:_MOST_HOST], _place())
    return (host, place) == here and _known() and len(pid) < 10 and _is_gone(int(pid))


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is there, and belongs to another user
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # its parent has not read its exit status yet
    return stat.rpartition(b")")[2].split()[:1] in ([b"Z"], [b"X"])


@cache
def _place() -> str:
    """Return the characters of this place; random ones where it has no name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (no file that is opened)
    except (OSError, ValueError):
        return uuid.uuid4().hex[:_PLACE]
    return hashlib.sha256(f"{boot}{namespace}".encode()).hexdigest()[:_PLACE]


@cache
def _known() -> bool:
    return Path("/proc/self/ns/pid").is_symlink()
