"""Lends the connections to one server, each to one thread at a time, within its deadline."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, Protocol

import redis
from redis import exceptions as upstream

from redrb.connection.deadline import here
from redrb.connection.stop import Stop
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
        deadline, usual = here(), getattr(connection, "usual_timeout", None)
        try:
            if deadline.budget is None and deadline.shortened(usual) == usual:
                yield connection
            else:
                with limited(connection):
                    yield connection
        except BaseException:
            self._drop(connection)
            self.renew()  # most likely they broke too
            raise
        budget = deadline.budget
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


@contextmanager
def limited(connection: redis.Connection) -> Iterator[None]:
    """Limit sends and receives on an open connection to what is left until the deadline.

    When the time of a process that was asked to end is up, they are interrupted.
    """
    usual = getattr(connection, "usual_timeout", None)
    deadline = here()
    limit = deadline.shortened(usual)
    if limit == usual and deadline.budget is None:
        yield
        return
    with interruptible(connection, deadline.budget):
        if limit != usual:
            try:
                connection.update_current_socket_timeout(limit)
            except OSError as error:  # another thread has just closed all connections
                raise upstream.ConnectionError("The connection was closed.") from error
        try:
            yield
        finally:
            if limit != usual:
                with suppress(OSError):  # closed meanwhile: whoever uses it next finds it so
                    connection.update_current_socket_timeout(usual)


@contextmanager
def interruptible(connection: Any, budget: Stop | None) -> Iterator[None]:
    """Break a connection that is in use when the time on Redis is up."""
    if budget is None:
        yield
        return
    interrupt = partial(_break, connection)
    budget.interrupts.add(interrupt)
    try:
        yield
    finally:
        budget.interrupts.discard(interrupt)


def _break(connection: Any) -> None:
    """Let the thread that waits for a connection's socket find it broken; never blocks."""
    channel = getattr(connection, "_sock", None)
    if isinstance(channel, socket.socket):
        with suppress(OSError):  # it is closed already
            # that of an SSLSocket would take the session from under the thread that uses it
            socket.socket.shutdown(channel, socket.SHUT_RDWR)
