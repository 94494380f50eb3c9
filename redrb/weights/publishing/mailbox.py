"""Short messages between the ranks that publish one version together."""

from __future__ import annotations

import math
import time
from typing import Any

import msgpack

from redrb.connection import Client
from redrb.connection.transport import Pipeline, first_error
from redrb.errors import DecodeError

_KEPT_MS = 3_600_000
_BLOCK_S = 5.0


class Mailbox:
    """A stream of messages, read in order by one reader; it vanishes an hour after the last."""

    def __init__(self, client: Client, key: str) -> None:
        """Read from the oldest message on."""
        self._client = client.at(key)
        self._key = key
        self._last = "0-0"

    def post(self, message: dict[str, Any]) -> None:
        """Append a message; when a connection breaks it may come twice."""
        packed: bytes = msgpack.packb(message)

        def attempt() -> None:
            pipeline = Pipeline()
            pipeline.add("XADD", self._key, "*", "m", packed)
            pipeline.add("PEXPIRE", self._key, _KEPT_MS)
            error = first_error(self._client.exchange(pipeline))
            if error is not None:
                raise error

        self._client.retrying(attempt)

    def next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message; None when there is none until `deadline` (monotonic).

        Raises:
            DecodeError: It is damaged.
        """
        while (found := self._read()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            with self._client.connection() as connection:
                silence = connection.socket_timeout
            longest = _BLOCK_S if silence is None else min(_BLOCK_S, silence / 2)
            block_ms = max(1, math.ceil(min(left, longest) * 1000))
            self._client.execute("XREAD", "BLOCK", block_ms, "STREAMS", self._key, self._last)
        return found

    def forget_read(self) -> None:
        """Delete the messages that were read."""
        number, _, sequence = self._last.partition("-")
        self._client.execute("XTRIM", self._key, "MINID", f"{number}-{int(sequence) + 1}")

    def delete(self) -> None:
        """Delete all messages."""
        self._client.execute("UNLINK", self._key)

    def _read(self) -> dict[str, Any] | None:
        found = self._client.execute("XRANGE", self._key, f"({self._last}", "+", "COUNT", 1)
        if not found:
            return None
        number, fields = found[0]
        self._last = number.decode()
        try:
            message = msgpack.unpackb(dict(zip(fields[::2], fields[1::2], strict=True))[b"m"])
        except (KeyError, ValueError, TypeError, msgpack.UnpackException) as error:
            raise DecodeError(f"a message in {self._key} is damaged: {error!s:.80}") from error
        if not isinstance(message, dict):
            raise DecodeError(f"a message in {self._key} is no map.")
        return message
