"""Short messages between processes, through a Redis stream: msgpack maps of bounded size."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgpack

from redrb.connection.client import Client
from redrb.connection.deadline import Deadline
from redrb.connection.transport import Pipeline, Reply, without_errors
from redrb.errors import DecodeError, EncodeError
from redrb.unpacking import unpack

MAX_MESSAGE_BYTES: Final = 64 << 20

BLOCK_S = 5.0
"""Longest blocking read; far below the connection's timeout."""


def post(client: Client, keys: Sequence[str], message: dict[str, Any]) -> None:
    """Write the newest message of streams, which wakes the readers that wait on them.

    Args:
        keys: The streams, on any nodes of a cluster; their earlier messages are deleted.

    Raises:
        EncodeError: The message is larger than `MAX_MESSAGE_BYTES`.
        StoreUnavailable: Redis stayed away; some streams may have the message.
    """
    packed: bytes = msgpack.packb(message)
    if len(packed) > MAX_MESSAGE_BYTES:
        raise EncodeError(f"a message of {len(packed)} bytes; the limit is {MAX_MESSAGE_BYTES}.")
    pipelines: dict[Client, Pipeline] = {}
    for key in keys:
        pipeline = pipelines.setdefault(client.at(key), Pipeline())
        pipeline.add("XADD", key, "MAXLEN", 1, "*", "m", packed)
    for node, pipeline in pipelines.items():
        node.retrying(partial(_send, node, pipeline))


class MessageReader:
    """One reader's position in a stream of messages, at first before the oldest."""

    def __init__(self, client: Client, key: str) -> None:
        self._client = client.at(key)
        self._key = key
        self._last = "0-0"

    def newest(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """Return the newest message, unless it was returned before; wait so long for one.

        Raises:
            DecodeError: The message is damaged; the next call goes on after it.
            StoreUnavailable: Redis stayed away.
        """
        ends = time.monotonic() + wait_s
        while (found := self._read()) is None and (left := ends - time.monotonic()) > 0:
            with Deadline(left):
                block_on_stream(self._client, self._key, self._last, min(left, BLOCK_S))
        return found

    def _read(self) -> dict[str, Any] | None:
        after = f"({self._last}"
        found = self._client.execute("XREVRANGE", self._key, "+", after, "COUNT", 1)
        if not found:
            return None
        entry_id, fields = found[0]
        self._last = entry_id.decode()
        return _unpacked(self._key, fields)


def block_on_stream(client: Client, key: str, after: str, seconds: float) -> list[Reply]:
    """Wait on the server until a stream has entries after the id `after`.

    Args:
        seconds: Longest wait; it is shortened to half of the connection's timeout.

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

    return client.retrying(attempt)


def _send(client: Client, pipeline: Pipeline) -> None:
    without_errors(client.exchange(pipeline))


def _unpacked(key: str, fields: Reply) -> dict[str, Any]:
    try:
        packed = dict(zip(fields[::2], fields[1::2], strict=True))[b"m"]
        if len(packed) > MAX_MESSAGE_BYTES:
            raise ValueError(f"{len(packed)} bytes")
        message = unpack(packed, "message")
    except (KeyError, ValueError) as error:
        raise DecodeError(f"a message in {key} is damaged: {error!s:.80}") from error
    if not isinstance(message, dict):
        raise DecodeError(f"a message in {key} is not a map.")
    return message
