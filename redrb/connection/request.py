"""A request whose reply is read later, and which is repeated while Redis is away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from redis.exceptions import RedisError, ResponseError

from redrb.connection.client import Client, Sent
from redrb.connection.failures import name_scripts
from redrb.connection.transport import Pipeline, Reply
from redrb.forks import mark
from redrb.unpacking import Reading

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Request(Generic[T]):
    """A pipeline that is safe to repeat, and the function that reads its replies.

    The function raises redis-py's exceptions.
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
        self._sender = mark()
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
        if sent is not None and self._sender is mark():
            sent.drop()

    def _attempt(self) -> T:
        sent, self._sent = self._sent, None
        broke, self._broke = self._broke, None
        if broke is not None:
            raise broke
        try:
            if sent is not None and self._sender is mark():
                replies = self.pipeline.named(sent.replies())
            else:
                self.attempts += 1
                replies = self._client.exchange(self.pipeline)
            with Reading("a reply of the server"):
                return self._read(replies)
        except ResponseError as error:
            name_scripts(error, self.pipeline.scripts)
            raise
