"""Short messages between processes, through a Redis stream: msgpack maps of bounded size."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgpack

from redrb.connection.client import Client
from redrb.connection.transport import Pipeline, Reply, first_error
from redrb.errors import DecodeError, EncodeError
from redrb.unpacking import MAX_CONTAINERS, unpack

MAX_MESSAGE_BYTES: Final = 64 << 20

BLOCK_S = 5.0
"""Longest blocking read; far below the connection's timeout."""


def post(
    client: Client,
    keys: Sequence[str],
    message: dict[str, Any],
    *,
    keep_newest: bool = False,
    expire_ms: int | None = None,
) -> None:
    """Append a message to streams, which wakes the readers that wait on them.

    After a broken connection a message may be in a stream twice.

    Args:
        client: From `redrb.connect`.
        keys: The streams, on any nodes of a cluster.
        message: Values that msgpack can hold.
        keep_newest: Delete all earlier messages of these streams.
        expire_ms: Milliseconds after which a stream vanishes; default: never.

    Raises:
        EncodeError: The message is larger than `MAX_MESSAGE_BYTES`.
        StoreUnavailable: Redis stayed away; some streams may have the message.
    """
    packed: bytes = msgpack.packb(message)
    if len(packed) > MAX_MESSAGE_BYTES:
        raise EncodeError(f"a message of {len(packed)} bytes; the limit is {MAX_MESSAGE_BYTES}.")
    limit: tuple[str | int, ...] = ("MAXLEN", 1) if keep_newest else ()
    pipelines: dict[Client, Pipeline] = {}
    for key in keys:
        pipeline = pipelines.setdefault(client.at(key), Pipeline())
        pipeline.add("XADD", key, *limit, "*", "m", packed)
        if expire_ms is not None:
            pipeline.add("PEXPIRE", key, expire_ms)
    for node, pipeline in pipelines.items():
        node.retrying(partial(_send, node, pipeline))


class MessageReader:
    """One reader's position in a stream of messages, at first before the oldest."""

    def __init__(self, client: Client, key: str, *, containers: int = MAX_CONTAINERS) -> None:
        """Make a reader.

        Args:
            client: From `redrb.connect`.
            key: The stream.
            containers: Most lists and maps of a message.
        """
        self._client = client.at(key)
        self._key = key
        self._containers = containers
        self._last = "0-0"

    def next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message; None if none comes until `deadline` (monotonic).

        Raises:
            DecodeError: The message is damaged; the next call goes on after it.
            StoreUnavailable: Redis stayed away.
        """
        while (message := self._read("XRANGE", f"({self._last}", "+")) is None:
            if not self._block(deadline):
                return None
        return message

    def newest(self, deadline: float = -math.inf) -> dict[str, Any] | None:
        """Return the newest message, unless it was returned before; earlier ones are skipped.

        Args:
            deadline: Until when to wait for one (monotonic); default: do not wait.

        Raises:
            DecodeError, StoreUnavailable: As `next` does.
        """
        while (message := self._read("XREVRANGE", "+", f"({self._last}")) is None:
            if not self._block(deadline):
                return None
        return message

    def delete_read(self) -> None:
        """Delete the messages up to the last one that was returned."""
        number, _, sequence = self._last.partition("-")
        self._client.execute("XTRIM", self._key, "MINID", f"{number}-{int(sequence) + 1}")

    def delete(self) -> None:
        """Delete the stream."""
        self._client.execute("UNLINK", self._key)

    def _read(self, command: str, first: str, last: str) -> dict[str, Any] | None:
        found = self._client.execute(command, self._key, first, last, "COUNT", 1)
        if not found:
            return None
        entry_id, fields = found[0]
        self._last = entry_id.decode()
        return _unpacked(self._key, fields, self._containers)

    def _block(self, deadline: float) -> bool:
        """Wait for a message, without polling; returns False when `deadline` has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        retry_s = min(left, self._client.retry_s)
        block_on_stream(self._client, self._key, self._last, min(left, BLOCK_S), retry_s=retry_s)
        return True


def block_on_stream(
    client: Client, key: str, after: str, seconds: float, *, retry_s: float
) -> list[Reply]:
    """Wait on the server until a stream has entries after the id `after`.

    Args:
        client: Client of the stream's node.
        key: The stream.
        after: Id of an entry.
        seconds: Longest wait; it is shortened to half of the connection's timeout.
        retry_s: Seconds to repeat the request while Redis is away.

    Returns:
        All entries after `after`, the newest last; none if none came in time.

    Raises:
        StoreUnavailable: Redis stayed away.
    """

    def attempt() -> list[Reply]:
        with client.connection() as connection:
            silence = connection.socket_timeout
            block_s = seconds if silence is None else min(seconds, silence / 2)
            block_ms = max(1, math.ceil(block_s * 1000))
            pipeline = Pipeline()
            pipeline.add("XREAD", "BLOCK", block_ms, "STREAMS", key, after)
            [reply] = pipeline.exchange(connection)
        if isinstance(reply, Exception):
            raise reply
        return reply[0][1] if reply else []

    return client.retrying(attempt, retry_s=retry_s)


def _send(client: Client, pipeline: Pipeline) -> None:
    error = first_error(client.exchange(pipeline))
    if error is not None:
        raise error


def _unpacked(key: str, fields: Reply, containers: int) -> dict[str, Any]:
    try:
        packed = dict(zip(fields[::2], fields[1::2], strict=True))[b"m"]
        if len(packed) > MAX_MESSAGE_BYTES:
            raise ValueError(f"{len(packed)} bytes")
        message = unpack(packed, "message", containers=containers)
    except (KeyError, ValueError) as error:
        raise DecodeError(f"a message in {key} is damaged: {error!s:.80}") from error
    if not isinstance(message, dict):
        raise DecodeError(f"a message in {key} is not a map.")
    return message
