"""Closes the streams that a program has left open, when its process or their client ends."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize, register_after_fork
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from redrb.connection import Client
from redrb.connection.deadline import EXIT_S, Deadline
from redrb.errors import StoreError
from redrb.stream.announcement import end_unended
from redrb.stream.take.read_ahead import ReadAhead

T = TypeVar("T")

_log = logging.getLogger("redrb")

_open: WeakKeyDictionary[object, Callable[..., None]] = WeakKeyDictionary()

_ahead: WeakKeyDictionary[object, WeakSet[ReadAhead[Any]]] = WeakKeyDictionary()


def close_at_end(stream: T, close: Callable[[T, bool], None], client: Client) -> None:
    """Call `close(stream, requeue)` when the process or the client ends, unless it was dropped.

    `requeue` is False after an exception: leased groups are then left to the end of the lease, and
    count a failed delivery, since they may be the reason.
    """
    _open[stream] = close
    dropped = ref(stream)

    def end(failed: bool) -> None:  # noqa: FBT001 (as the client calls it)
        one = dropped()
        if one is not None:
            _close(one, requeue=not failed)

    client.before_close[stream] = end


def was_closed(stream: object) -> None:
    """Note that a stream needs no end any more."""
    _open.pop(stream, None)


def takes_ahead(stream: object, ahead: ReadAhead[Any]) -> None:
    """Note a thread that takes ahead from a stream: the stream closes it first."""
    _ahead.setdefault(stream, WeakSet()).add(ahead)


def close_ahead(stream: object, *, requeue: bool) -> None:
    """Close all that take ahead from a stream; `requeue` is that of `close_at_end`."""
    for ahead in list(_ahead.pop(stream, ())):
        ahead.close(requeue=requeue)


def _close(stream: object, *, requeue: bool) -> None:
    close = _open.get(stream)
    try:
        if close is not None:
            close(stream, requeue)
    except StoreError as failure:
        _log.debug("a stream is not closed at the end: %s", failure)


def _close_all() -> None:
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    with Deadline(at_most=EXIT_S):
        for stream in list(_open):
            _close(stream, requeue=not isinstance(error, Exception))
        end_unended()


def _arm(_: object = None) -> None:
    Finalize(None, _close_all, exitpriority=0)


# children of multiprocessing run no functions of atexit, unless they were spawned
atexit.register(_close_all)
register_after_fork(_open, _arm)
if multiprocessing.parent_process() is not None:
    _arm()
