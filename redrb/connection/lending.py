"""Lends the connections to one server, each to one thread at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn, Protocol

import redis

from redrb.connection.deadline import here
from redrb.connection.sockets import limited
from redrb.errors import StoreClosed
from redrb.forks import in_child


class Lender(Protocol):
    """Lends connections to a client."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    def lend(self) -> AbstractContextManager[redis.Connection]:
        """Lend a connection; it is closed if an exception leaves replies unread on it."""

    def renew(self) -> None:
        """Close idle connections: the server at their end may have become a replica."""

    def close(self) -> None:
        """Close every connection, and lend none from now on."""


def refuse_closed() -> NoReturn:
    """Raise the error for a request through a closed client."""
    raise StoreClosed(
        "the client is closed: connect again, and open streams, publishers and subscribers anew."
    )


class Connections:
    """The connections of one server; safe among threads, and on both sides of a fork."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool
        self._closed = False
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        self._idle: deque[redis.Connection] = deque()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @contextmanager
    def lend(self) -> Iterator[redis.Connection]:
        """Lend a connection; it is closed if an exception leaves replies unread on it.

        Returned connections are lent again without asking the pool, whose checks cost more than a
        small request. A connection that broke meanwhile fails when it is used. It is opened, sends
        and receives within the deadline of the calling thread.

        Raises:
            StoreClosed: `close` was called.
        """
        if self._closed:
            refuse_closed()
        idle = self._idle
        connection = self._idle_connection() or self._pool.get_connection()
        try:
            with limited(connection):
                yield connection
        except BaseException:
            self._drop(connection)
            self.renew()  # most likely they broke too
            raise
        budget = here().budget
        # an interrupt may have come after the last reply was read
        if self.closed or (budget is not None and not budget.left_s):
            self._drop(connection)
        else:
            idle.append(connection)

    def renew(self) -> None:
        """Close the idle connections of this process."""
        while connection := self._idle_connection():
            self._drop(connection)

    def close(self) -> None:
        """Close every connection, lent ones too, and lend none from now on."""
        self._closed = True
        self._pool.disconnect()

    def _idle_connection(self) -> redis.Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _drop(self, connection: redis.Connection) -> None:
        connection.disconnect()  # type: ignore[no-untyped-call]
        self._pool.release(connection)
