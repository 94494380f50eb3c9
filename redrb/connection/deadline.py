"""The deadline of a call: its connection attempts, sends, receives and repetitions share it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.connection import SSLConnection, UnixDomainSocketConnection

GRACE_S = 2.0
"""Time that a server has to answer: it may pause, for a fork or a slow disk."""

_SHORTEST_S = 0.05
"""Timeout of a socket when the deadline has passed: enough for a server that answers at once."""

_here = threading.local()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let this block of this thread end its work with Redis within `seconds`.

    A block within another one has the earlier of both deadlines. Only silence is cut short: a long
    reply that keeps arriving is read to its end.
    """
    before: float | None = getattr(_here, "at", None)
    at = time.monotonic() + seconds
    _here.at = at if before is None else min(before, at)
    try:
        yield
    finally:
        _here.at = before


def left_s() -> float | None:
    """Return the seconds until the deadline, at least 0; None if there is none."""
    at: float | None = getattr(_here, "at", None)
    return None if at is None else max(0.0, at - time.monotonic())


def over() -> bool:
    """Return whether the deadline has passed."""
    return left_s() == 0.0


def shortened(timeout: float | None) -> float | None:
    """Return a socket's timeout, cut to what is left until the deadline.

    Where much is left a third of it is used, so that a connection that is frozen costs one attempt
    and not the whole call.
    """
    left = left_s()
    if left is None or timeout is None:
        return timeout
    return min(timeout, max(left, _SHORTEST_S), max(left / 3, GRACE_S))


@contextmanager
def limited(connection: redis.Connection) -> Iterator[None]:
    """Limit sends and receives on an open connection to what is left until the deadline."""
    usual = getattr(connection, "usual_timeout", None)
    limit = shortened(usual)
    if limit == usual:
        yield
        return
    connection.update_current_socket_timeout(limit)
    try:
        yield
    finally:
        connection.update_current_socket_timeout(usual)


class _Punctual:
    """Makes a connection open, with TLS and login, within the deadline of the calling thread.

    Attributes:
        usual_timeout: Seconds without a byte after which the connection counts as broken.
        usual_connect_timeout: Seconds within which the server must accept the connection.
    """

    usual_timeout: float | None = None
    usual_connect_timeout: float | None = None

    def __init__(
        self,
        *args: Any,
        socket_timeout: float | None = None,
        socket_connect_timeout: float | None = None,
        **options: Any,
    ) -> None:
        options |= {
            "socket_timeout": socket_timeout,
            "socket_connect_timeout": socket_connect_timeout,
        }
        super().__init__(*args, **options)
        self.usual_timeout = socket_timeout
        self.usual_connect_timeout = socket_connect_timeout

    @property
    def socket_timeout(self) -> float | None:
        """The timeout that a socket gets when it is opened."""
        return shortened(self.usual_timeout)

    @socket_timeout.setter
    def socket_timeout(self, seconds: float | None) -> None:
        self.usual_timeout = seconds

    @property
    def socket_connect_timeout(self) -> float | None:
        """The timeout of opening a socket."""
        return shortened(self.usual_connect_timeout)

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, seconds: float | None) -> None:
        self.usual_connect_timeout = seconds


class _Tcp(_Punctual, redis.Connection):
    pass


class _Tls(_Punctual, SSLConnection):
    pass


class _Unix(_Punctual, UnixDomainSocketConnection):
    pass


PUNCTUAL: dict[Any, type[Any]] = {
    redis.Connection: _Tcp,
    SSLConnection: _Tls,
    UnixDomainSocketConnection: _Unix,
}
"""The connection classes of redis-py, and those that keep deadlines."""
