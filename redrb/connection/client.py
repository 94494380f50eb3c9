"""A client of Redis: sends requests, repeats and logs them while Redis is away, maps errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from redrb import forks
from redrb.connection.deadline import EXIT_S, GRACE_S, Deadline, here
from redrb.connection.failures import (
    is_moving,
    is_transient,
    may_have_landed,
    name_scripts,
    translate,
)
from redrb.connection.lending import Lender, limited, refuse_closed
from redrb.connection.outage import Outage, shared_outage
from redrb.connection.transport import SURE_BYTES, Argument, Pipeline, Reply, read_replies
from redrb.errors import ConfigError, EncodeError, StoreError, StoreUnavailable
from redrb.scopes import Entered
from redrb.unpacking import SIGNS, Reading

T = TypeVar("T")

VALUE_LIMITS = {"proto-max-bulk-len": 512 << 20, "client-query-buffer-limit": 1 << 30}
"""Settings of a server that limit the bytes of a value, and what they are by default."""

VALUE = "a value of this request"

_SHORT_S = 5.0
"""Requests with less time are those of heartbeats and loops, which come again."""


class Client(Entered):
    """A connection to Redis that streams, publishers and subscribers share; safe among threads.

    Made by `redrb.connect`. `retrying` repeats only requests that are safe to repeat; the retries
    of redis-py, which replay writes, are off.

    Attributes:
        where: Host and port (of a cluster: of the nodes in the URL), or the socket's path; never a
            password.
        url: URL under which other processes reach the same server; it holds the password.
        server_version: The server's version, such as (7, 0, 15).
        retry_s: Seconds for which a request is repeated while Redis is away.
        min_replicas: Replicas that must confirm a put before it returns.
    """

    retry_s = 60.0
    min_replicas = 0

    def __init__(
        self,
        lender: Lender,
        *,
        where: str,
        url: str,
        server_version: tuple[int, ...],
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._lender = lender
        self._on_close = on_close
        self.where = where
        self.url = url
        self.server_version = server_version
        self._outage: Outage | None = None
        self._most_bytes = SURE_BYTES  # of a value, as far as is known
        self.before_close: WeakKeyDictionary[object, Callable[[bool], None]] = WeakKeyDictionary()
        self.workers: WeakSet[Any] = WeakSet()  # of its streams, which announce what it waits for

    def __repr__(self) -> str:
        return f"<redrb.Client {self.where}>"

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(failed=isinstance(error, Exception))

    def close(self) -> None:
        """Close every connection, and end the embedded server if this client started one.

        Streams that are still open are closed first, as at the end of the process. Later requests
        through this client raise `StoreClosed`.
        """
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        with Deadline(at_most=EXIT_S):
            for end in list(self.before_close.values()):
                end(failed)
        self._lender.close()
        if self._on_close is not None:
            self._on_close()

    def retrying(self, attempt: Callable[[], T], *, retry_s: float | None = None) -> T:
        """Run `attempt`, and repeat it while Redis is away; it must be safe to repeat.

        Args:
            attempt: Sends a request and returns its result; raises redis-py's exceptions.
            retry_s: Seconds after which no further attempt starts; default and most: the client's.
                An attempt that is under way then has `GRACE_S` more to end.

        Raises:
            StoreUnavailable: Redis stayed away.
            StoreError: Redis answered with an error.
        """
        seconds = min(
            self.retry_s if retry_s is None else min(retry_s, self.retry_s), here().repeats_s
        )
        with Deadline(at_most=seconds + GRACE_S) as deadline:
            failed: list[Exception] = []
            try:
                result = attempt()
            except RedisError as error:
                failed.append(error)
            if failed:
                result = self._again(attempt, failed, deadline, seconds)
        if self._outage is not None:
            self._back()
        return result

    def _again(
        self,
        attempt: Callable[[], T],
        failed: list[Exception],
        deadline: Deadline,
        seconds: float,
    ) -> T:
        """Repeat an attempt that failed, for at most `seconds` of the deadline."""
        from redrb.connection.retries import again  # loads tenacity: commands start faster without

        uncertain = False

        def passes(error: BaseException) -> bool:
            nonlocal uncertain
            if not (isinstance(error, RedisError) and is_transient(error)):
                return False
            if self._lender.closed:
                refuse_closed()
            uncertain |= may_have_landed(error)
            return True

        def left_s() -> float:
            return min(deadline.left_s, seconds - deadline.waited_s)

        def note(error: Exception) -> None:
            self._note_outage(error, left_s())
            error.with_traceback(None)  # it holds the frames of all callers

        try:
            return again(
                attempt,
                failed,
                passes=passes,
                over=lambda: left_s() <= 0 or bool(deadline.stop),
                note=note,
                pause=deadline.pause,
            )
        except RedisError as error:
            failure = translate(error, self.where)
            if isinstance(failure, StoreUnavailable):
                failure.uncertain |= uncertain
            try:
                raise failure from error.with_traceback(None)
            finally:
                del failure  # it holds this frame

    @property
    def fails(self) -> bool:
        """Whether Redis was away at its last request."""
        return self._outage is not None

    @property
    def node(self) -> str:
        """Host and port of the server to which requests go, as far as it is known."""
        return self.where

    def connection(self) -> AbstractContextManager[redis.Connection]:
        """Lend a connection; it is closed if an exception leaves replies unread on it."""
        return self._lender.lend()

    def at(self, _key: str | bytes) -> Client:
        """Return the client for requests on `key` and on other keys of its hash tag.

        On one server this is the client itself, on a cluster a client that sends to the node that
        serves the key's slot at the moment.
        """
        return self

    def primaries(self) -> list[Client]:
        """Return a client for each server that has keys, for commands that look at all keys."""
        return [self]

    def transaction(self, _absent: str) -> Pipeline:
        """Return a pipeline that begins a transaction; the caller adds EXEC.

        Args:
            _absent: A key of the transaction's slot that never exists. On a cluster it keeps the
                node from doing a part of the transaction while the slot moves to another node.
        """
        pipeline = Pipeline()
        pipeline.add("MULTI")
        return pipeline

    def exchange(self, pipeline: Pipeline) -> list[Reply]:
        """Send a pipeline once and return its replies; an error reply is an item of the list."""
        self.check_size(pipeline.largest)
        with self._lender.lend() as connection:
            return pipeline.exchange(connection)

    def begin(self, pipeline: Pipeline) -> Sent:
        """Send a pipeline once; its replies are read later. Raises redis-py's exceptions."""
        self.check_size(pipeline.largest)
        with ExitStack() as scope:
            connection = scope.enter_context(self._lender.lend())
            pipeline.send(connection)
            return Sent(connection, pipeline.commands, scope.pop_all())

    def check_size(self, nbytes: int, what: str = VALUE, remedy: str = "") -> None:
        """Refuse a value that is too large for the server, which would end the connection.

        Args:
            remedy: What the caller can do about the value itself, with "or" behind it, and a space.

        Raises:
            EncodeError: The message names the server's limit.
        """
        if nbytes <= self._most_bytes:
            return
        name, self._most_bytes = self._limit()
        if nbytes > self._most_bytes:
            raise EncodeError(
                f"{what} has {nbytes:,} bytes, and Redis at {self.where} takes "
                f"{self._most_bytes:,} at most ({name}): {remedy}raise this setting of "
                f"the server to {nbytes:,} or more. Nothing of it was sent."
            )

    def _limit(self) -> tuple[str, int]:
        """Return the setting of the server that limits the bytes of a value, and these."""
        try:
            flat = self.execute("CONFIG", "GET", *VALUE_LIMITS)
        except StoreUnavailable:
            raise
        except StoreError:  # this user may not look, or nobody may
            flat = []
        with Reading("the settings of the server"):
            pairs = zip(flat[::2], flat[1::2], strict=True)
            found = {name.decode(): int(limit) for name, limit in pairs}
        return min((VALUE_LIMITS | found).items(), key=lambda each: each[1])

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
            [reply] = pipeline.exchange(connection)
        try:
            if isinstance(reply, RedisError):
                raise reply
            return reply
        finally:
            del reply  # as an error it holds this frame, and those of all callers

    def _note_outage(self, error: Exception, left_s: float) -> None:
        """Let the next attempt open a connection, and log that the server is away."""
        # one that cannot write now may have become a replica, and its address another server's
        self._lender.renew()
        what = "moves keys" if is_moving(error) else "is away"
        outage = shared_outage(f"Redis at {self.where} {what}", "")
        if outage is not self._outage:
            self._back()
            self._outage = outage
        repeated = f"a request is repeated for {left_s:.0f} s more"
        if left_s < _SHORT_S:
            repeated = f"a request ends in {left_s:.1f} s, and the next one tries again"
        outage.failed(f"{type(error).__name__}; {repeated}", who=self)

    def _back(self) -> None:
        """Note that the server answers, or fails in another way."""
        outage, self._outage = self._outage, None
        if outage is not None:
            outage.over(who=self)


class Sent:
    """A pipeline that was sent: it holds its connection until the replies are read or dropped."""

    def __init__(self, connection: redis.Connection, commands: int, scope: ExitStack) -> None:
        self._connection = connection
        self._commands = commands
        self._scope = scope

    def fileno(self) -> int:
        """Return the file descriptor of the socket, to wait for replies of several servers."""
        # redis-py has no public way
        socket: Any = self._connection._sock  # noqa: SLF001
        if socket is None:
            raise redis.ConnectionError("the connection was closed")
        return int(socket.fileno())

    def replies(self) -> list[Reply]:
        """Read the replies; call it once. An error reply is an item of the list."""
        return self.read(lambda connection: read_replies(connection, self._commands))

    def read(self, receive: Callable[[redis.Connection], T]) -> T:
        """Let `receive` read all replies; call it once."""
        with self._scope, limited(self._connection):
            return receive(self._connection)

    def drop(self) -> None:
        """Close the connection without reading: the server may have done the commands or not."""
        with suppress(_Dropped), self._scope:
            raise _Dropped


class _Dropped(Exception):
    """Ends the use of a connection, which is then closed: replies on it were not read."""


@dataclass(eq=False, repr=False)
class Request(Generic[T]):
    """A pipeline that is safe to repeat, and the function that reads its replies.

    The function raises redis-py's exceptions, before it changes anything. Where the server lacks a
    script, the pipeline is sent once more, with the texts of its scripts.
    """

    _client: Client
    pipeline: Pipeline
    _read: Callable[[list[Reply]], T]
    attempts: int = 0
    _sent: Sent | None = None
    _broke: RedisError | None = None
    _sender: object = None

    @property
    def retry_s(self) -> float:
        """Seconds for which the client repeats a request while Redis is away."""
        return self._client.retry_s

    def begin(self) -> None:
        """Send it now, once; if the connection breaks, `result` sends it again."""
        self.attempts += 1
        self._sender = forks.process
        self.pipeline.freeze()
        try:
            self._sent = self._client.begin(self.pipeline)
        except RedisError as error:
            self._broke = error

    def result(self) -> T:
        """Return its result; sends it if it was not sent yet, or if the connection broke.

        Raises:
            StoreUnavailable: Redis stayed away.
            StoreError: Redis answered with an error.
        """
        return self._client.retrying(self._attempt)

    def drop(self) -> None:
        """Give up the reply: the server may have done the request or not."""
        sent, self._sent = self._sent, None
        if sent is not None and self._sender is forks.process:
            sent.drop()

    def _attempt(self) -> T:
        sent, self._sent = self._sent, None
        broke, self._broke = self._broke, None
        if broke is not None:
            raise broke
        try:
            if sent is not None and self._sender is forks.process:
                replies = self.pipeline.named(sent.replies())
            else:
                self.attempts += 1
                replies = self._client.exchange(self.pipeline)
            try:
                return self._read(replies)
            except NoScriptError as error:
                error.with_traceback(None)  # it holds the frames of all callers, and their objects
            return self._read(self._client.exchange(self.pipeline.with_texts()))
        except ResponseError as error:
            name_scripts(error, [*self.pipeline.scripts])
            raise
        except SIGNS:
            with Reading("a reply of the server"):
                raise


_SCANNED = 1000
"""Keys, or fields of a hash, that one request looks at."""


def scan(client: Client, pattern: str, *, until: Deadline | None = None) -> Iterator[bytes]:
    """Yield the keys of one server that match a pattern, until a deadline; a key may come twice."""
    cursor = b""
    while cursor != b"0" and (until is None or not until.over):
        cursor, found = client.execute("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", _SCANNED)
        yield from found


def scan_hash(client: Client, key: str) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield the fields of a hash with their values, in pages; a field may come twice."""
    cursor = b""
    while cursor != b"0":
        cursor, flat = client.execute("HSCAN", key, cursor or b"0", "COUNT", _SCANNED)
        yield list(zip(flat[::2], flat[1::2], strict=True))


def check_client(client: object) -> None:
    """Raise ConfigError for another object; it names the type only: a URL may have a password."""
    if not isinstance(client, Client):
        raise ConfigError(
            f"the client is a {type(client).__name__}: pass the client that redrb.connect(url) "
            "returns."
        )
