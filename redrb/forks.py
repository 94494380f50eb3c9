"""What a forked child starts anew; the one place that notices a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

guard = threading.RLock()
"""Held during each fork: who holds it is never forked in the middle of its work."""

_resets: WeakKeyDictionary[Any, Callable[[Any], None] | None] = WeakKeyDictionary()
process = object()
"""Stands for this process: a child has another one. Read it as `forks.process`."""


def in_child(reset: Callable[[], None]) -> None:
    """Call a function in each child forked from now on, or a method as long as its object lives.

    Those of an earlier call are called first, all before anything else runs in the child. An object
    has one such method.
    """
    # no WeakMethod: its callback fails where an object and its class are collected together
    _resets[getattr(reset, "__self__", reset)] = getattr(reset, "__func__", None)


def _start_anew() -> None:
    global process
    guard.release()
    process = object()
    for owner, method in list(_resets.items()):
        if method is None:
            owner()
        else:
            method(owner)


os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=_start_anew)
