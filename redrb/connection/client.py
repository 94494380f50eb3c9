"""A client of Redis: connections, retries and our own errors around them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Generic, Self, TypeVar

import redis
from redis.exceptions import RedisError
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from redrb.connection import stopping
from redrb.connection.failures import is_moving, is_transient, may_have_landed, translate
from redrb.connection.lending import Lender, refuse_closed
from redrb.connection.transport import Argument, Pipeline, Reply, read_reply
from redrb.errors import ConfigError, StoreUnavailable

T = TypeVar("T")

_log = logging.getLogger("redrb")


class Client:
    """A connection to Redis, shared by streams, publishers and subscribers; safe among threads.

    Made by `redrb.connect`. Everything that goes through `retrying` is safe to repeat: redis-py's
    own retries, which replay writes, are off.

    Attributes:
        where: Host and port, of a cluster those that were named, or the socket's path; never a
            password.
        url: URL under which other processes reach the same server; it holds the password.
        server_version: The server's version, such as (7, 0, 15).
        retry_s: Seconds for which a request is repeated while Redis is away.
    """

    def __init__(
        self,
        lender: Lender,
        *,
        where: str,
        url: str,
        server_version: tuple[int, ...],
        retry_s: float,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._lender = lender
        self._on_close = on_close
        self.where = where
        self.url = url
        self.server_version = server_version
        self.retry_s = retry_s

    def __repr__(self) -> str:
        return f"<redrb.Client {self.where}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection, and end the server where this client is its owner.

        What is used over it afterwards raises `StoreClosed`, and heartbeats end: leases that were
        not ended go to others once they have expired. So close streams first.
        """
        self._lender.close()
        if self._on_close is not None:
            self._on_close()

    def retrying(self, attempt: Callable[[], T], *, retry_s: float | None = None) -> T:
        """Run `attempt`, and again while Redis is away; it must be safe to repeat.

        Args:
            attempt: What to do; raises redis-py's exceptions.
            retry_s: Seconds after which no further attempt starts; default: the client's.

        Raises:
            StoreUnavailable: Redis stayed away.
            StoreError: Redis answered with an error.
        """
        try:
            return attempt()  # the ordinary case; what follows costs more than a small request
        except RedisError as error:
            if not is_transient(error):
                raise translate(error, self.where) from error
            if self._lender.closed:
                refuse_closed()
            again = _FailedOnce(error, attempt)
        patience = stop_after_delay(self.retry_s if retry_s is None else min(retry_s, self.retry_s))
        retries = Retrying(
            retry=retry_if_exception(is_transient),
            stop=lambda state: stopping.asked() or patience(state),
            wait=wait_random_exponential(multiplier=0.02, max=1.0),
            sleep=stopping.pause,
            before_sleep=self._log_retry,
            reraise=True,
        )
        try:
            return retries(again)
        except RedisError as error:
            failure = translate(error, self.where)
            if isinstance(failure, StoreUnavailable):
                failure.uncertain = again.may_have_landed
            raise failure from error.with_traceback(None)  # tenacity's frames tell nothing
        finally:
            del retries  # it knows what was raised, and that holds the frames of all callers

    def connection(self) -> AbstractContextManager[redis.Connection]:
        """Lend one connection; it is dropped when an exception leaves replies unread on it."""
        return self._lender.lend()

    def at(self, _key: str | bytes) -> Client:
        """Return the client for requests on `key` and on others of its hash tag.

        One server has all keys: there it is this client. On a cluster it is one whose connections
        are those of the node that serves the key's slot at the moment.
        """
        return self

    def primaries(self) -> list[Client]:
        """Return a client for each server that has keys, for what looks at all keys."""
        return [self]

    def transaction(self, _absent: str) -> Pipeline:
        """Return a pipeline that begins a transaction; EXEC is the caller's to add.

        Args:
            _absent: A key of the transaction's slot that is never made. On a cluster it keeps a
                part of the transaction from being done while the slot moves to another node.
        """
        pipeline = Pipeline()
        pipeline.add("MULTI")
        return pipeline

    def exchange(self, pipeline: Pipeline) -> list[Reply]:
        """Send a pipeline once and return its replies; an error reply is an item of the list."""
        with self._lender.lend() as connection:
            return pipeline.exchange(connection)

    def begin(self, pipeline: Pipeline) -> Sent:
        """Send a pipeline once; its replies are read later. Raises redis-py's exceptions."""
        with ExitStack() as scope:
            connection = scope.enter_context(self._lender.lend())
            pipeline.send(connection)
            return Sent(connection, pipeline.commands, scope.pop_all())

    def execute(self, *arguments: Argument, retry_s: float | None = None) -> Reply:
        """Run one command that is safe to repeat and return its reply.

        Raises:
            StoreUnavailable: Redis stayed away.
            StoreError: Redis answered with an error.
        """
        return self.retrying(lambda: self.once(*arguments), retry_s=retry_s)

    def once(self, *arguments: Argument) -> Reply:
        """Run one command without retries; raises redis-py's exceptions."""
        pipeline = Pipeline()
        pipeline.add(*arguments)
        with self._lender.lend() as connection:
            pipeline.send(connection)
            reply = read_reply(connection)
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def _log_retry(self, state: RetryCallState) -> None:
        outcome = state.outcome
        cause: Any = outcome.exception() if outcome is not None else None
        level = logging.WARNING if state.attempt_number in (1, 10) else logging.DEBUG
        _log.log(
            level,
            "Redis at %s %s (%s); attempt %d, trying for %.0f s more",
            self.where,
            "moves keys" if cause is not None and is_moving(cause) else "is away",
            type(cause).__name__,
            state.attempt_number + 1,
            max(0.0, self.retry_s - (state.seconds_since_start or 0.0)),
        )


def check_client(client: object) -> None:
    """Refuse what is no client.

    Raises:
        ConfigError: It is none; what it is is not told, for it may be a URL with a password.
    """
    if not isinstance(client, Client):
        raise ConfigError(
            f"a {type(client).__name__} is given as client: redrb.connect(url) makes one."
        )


class Sent:
    """A pipeline on its way: it keeps its connection until the replies are read, or dropped."""

    def __init__(self, connection: redis.Connection, commands: int, scope: ExitStack) -> None:
        self._connection = connection
        self._commands = commands
        self._scope = scope

    def replies(self) -> list[Reply]:
        """Read the replies, once; an error reply is an item of the list."""
        with self._scope:
            return [read_reply(self._connection) for _ in range(self._commands)]

    def drop(self) -> None:
        """Close the connection: what was sent may be done, and nobody will know."""
        with suppress(_Dropped), self._scope:
            raise _Dropped


class _Dropped(Exception):
    """Makes a connection be closed, since its replies were not read."""


class _FailedOnce(Generic[T]):
    """An attempt as a retry loop sees it that starts after the first failure.

    Attributes:
        may_have_landed: Whether the server may have done what any of the attempts asked for.
    """

    def __init__(self, first: RedisError, attempt: Callable[[], T]) -> None:
        self._first: RedisError | None = first.with_traceback(None)
        self._attempt = attempt
        self.may_have_landed = may_have_landed(first)

    def __call__(self) -> T:
        if self._first is not None:
            first, self._first = self._first, None
            try:
                raise first
            finally:
                del first  # it holds this frame
        try:
            return self._attempt()
        except RedisError as error:
            self.may_have_landed |= may_have_landed(error)
            raise
