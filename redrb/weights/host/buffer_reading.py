"""Reading a host cache: its newest complete buffer, locked so that nobody writes to it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import Any, Self, cast

import numpy as np

from redrb.errors import WeightError
from redrb.weights.host import locks
from redrb.weights.host.buffer import Buffer, Bytes, Header

_BRIEFLY_LOCKED_S = 1.0
"""How long a complete buffer may stay locked before an older buffer is used instead."""


class HeldBuffer:
    """A complete buffer, under a shared lock until `close` or the end of its `with`.

    Attributes:
        version: Version of the weights in it.
        meta: The bytes that the writer committed with them.
        data: The weights; pages that this process writes to are copied for it. After `close` a
            leader may change them, unless `lend` was called.
    """

    def __init__(self, lock: locks.FileLock, header: Header, meta: bytes, data: Bytes) -> None:
        self._lock = lock
        self._lent = False
        self.version = header.version
        self.meta = meta
        self.data = data

    def lend(self) -> Bytes:
        """Return the data and keep the lock as long as any array of the data exists.

        Arrays in forks of this process count too.

        Raises:
            WeightError: This buffer is closed, or the parent process holds it.
        """
        if not self._lent:
            if not self._lock.is_held:
                raise WeightError("this buffer is not held any more: call newest() again.")
            self._lent = True
            self._lock.hold_while_alive(self.mapped)
        return self.data

    @property
    def mapped(self) -> mmap.mmap:
        """The memory map of the data."""
        memory = self.data
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        found: Any = memory.base.obj if isinstance(memory.base, memoryview) else memory.base
        return cast(mmap.mmap, found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, so that a leader may write to the buffer, unless the data are lent."""
        self._lock.release()


def newest_buffer(buffers: Sequence[Buffer]) -> HeldBuffer | None:
    """Return the complete buffer with the largest version, locked; None if there is none."""
    deadline = time.monotonic() + _BRIEFLY_LOCKED_S
    usable = list(buffers)
    seen = None
    while usable:
        version, buffer = max(
            ((buffer.header().version, buffer) for buffer in usable), key=lambda pair: pair[0]
        )
        if not version:
            return None
        lock = locks.acquire(buffer.lock_path, exclusive=False)
        if lock is not None:
            held, is_damaged = _hold(buffer, lock)
            if held is not None:
                return held
            if is_damaged:
                usable.remove(buffer)
        elif seen == (version, buffer):
            # its writer has not unlocked it yet, or is dying: wait, so that an older version does
            # not pass for the newest. Two equal looks prove that the other buffer is not newer
            left = deadline - time.monotonic()
            if left <= 0 or not locks.wait_released(buffer.lock_path, left):
                usable.remove(buffer)
        seen = (version, buffer)
    return None


def _hold(buffer: Buffer, lock: locks.FileLock) -> tuple[HeldBuffer | None, bool]:
    """Return the held buffer if it is complete, and whether only its header looks complete."""
    try:
        read = buffer.read()
        if not lock.is_at(buffer.lock_path):  # a leader has replaced the file
            lock.release()
            return None, False
        if read is not None:
            return HeldBuffer(lock, *read), False
        is_damaged = buffer.header().version > 0
    except BaseException:
        lock.release()
        raise
    lock.release()
    return None, is_damaged
