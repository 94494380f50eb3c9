"""Sends large values at the speed of the cache, and receives them straight into given memory."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from redrb.connection.transport import read_reply

Seen: TypeAlias = Callable[[memoryview], object]

WakeAt: TypeAlias = Callable[[int], None]

_TCP = (socket.AF_INET, socket.AF_INET6)
_WAKE_BYTES = 256 << 10
_SEND_BUFFER_BYTES = 256 << 10
_LINE = 512  # an error message, at most


def _at_once(_: int) -> None:
    """Wake for any byte."""


@contextmanager
def small_send_buffer(connection: redis.Connection) -> Iterator[None]:
    """Limit the bytes that wait in the kernel, while large values are sent to this machine.

    The kernel gives a fast connection a send buffer of megabytes. Bytes that wait in it for the
    server have left the processor's cache when the server reads them; with a small buffer both
    sides spend a quarter less time. Between machines the buffer is left as it is, because it must
    hold all bytes that are on the way.
    """
    channel: Any = connection._sock  # noqa: SLF001 (redis-py does not show its socket)
    if not _is_within_machine(channel):
        yield
        return
    doubled = channel.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)  # Linux doubles what is set
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    try:
        yield
    finally:
        with suppress(OSError):  # it is closed
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, doubled // 2)


def read_into(
    connection: redis.Connection,
    segments: Sequence[memoryview],
    nbytes: int,
    *,
    seen: Seen = len,
) -> int:
    """Read a string reply into `segments`, which are `nbytes` long together.

    Args:
        connection: The next reply on it is the string.
        nbytes: The length that the string should have.
        seen: Called with each part as it is received, in order, while it is in the CPU's cache.

    Returns:
        The length of the string. If it is not `nbytes`, the segments hold nothing of use, and the
        connection must be closed: replies are left unread on it.

    Raises:
        redis.exceptions.RedisError: An error reply, or the connection broke.
    """
    channel = _channel(connection)
    if channel is None:
        return _from_reply(read_reply(connection), segments, nbytes, seen)
    try:
        line = _line(channel, len(b"$%d\r\n" % nbytes))
        length = _length(connection, line)
        if length == nbytes:
            with _woken_seldom(channel) as wake_at:
                left = nbytes
                for segment in segments:
                    _fill(channel, segment, seen, left, wake_at)
                    left -= len(segment)
            _fill(channel, memoryview(bytearray(2)), len)
        return length
    except TimeoutError as error:
        raise RedisTimeoutError("no reply in time") from error
    except OSError as error:
        raise RedisConnectionError(f"the connection broke: {error}") from error


def _is_within_machine(channel: object) -> bool:
    """Return whether this is a TCP connection whose ends have the same address."""
    if not isinstance(channel, socket.socket) or channel.family not in _TCP:
        return False
    with suppress(OSError):  # it broke: the next request on it fails
        return bool(channel.getsockname()[0] == channel.getpeername()[0])
    return False


def _channel(connection: Any) -> socket.socket | None:
    """Return the socket if the parser has read nothing ahead; None for a fake server."""
    channel = connection._sock  # noqa: SLF001 (redis-py has no way to receive without a copy)
    reader = getattr(connection._parser, "_reader", None)  # noqa: SLF001
    if not isinstance(channel, socket.socket) or reader is None or reader.has_data():
        return None
    return channel


def _from_reply(reply: object, segments: Sequence[memoryview], nbytes: int, seen: Seen) -> int:
    if isinstance(reply, Exception):
        raise reply
    if not isinstance(reply, bytes):
        return -1
    if len(reply) == nbytes:
        begin = 0
        for segment in segments:
            segment[:] = reply[begin : begin + len(segment)]
            begin += len(segment)
            seen(segment)
    return len(reply)


def _line(channel: socket.socket, expected: int) -> bytes:
    """Read the line before a string, and no byte more if it has the expected length."""
    line = b""
    while b"\r\n" not in line:
        more = channel.recv(max(1, expected - len(line)) if line[:1] != b"-" else 1)
        line += more
        if not more or len(line) > _LINE:
            raise RedisConnectionError("the server closed the connection")
    # of a shorter string a part was read: the caller closes the connection
    return line.partition(b"\r\n")[0]


def _length(connection: Any, line: bytes) -> int:
    if line[:1] == b"-":
        error = connection._parser.parse_error(line[1:].decode(errors="replace"))  # noqa: SLF001
        raise error
    if line[:1] != b"$" or not line[1:].removeprefix(b"-").isdigit():
        raise RedisConnectionError(f"the server answered {line!r:.80} instead of a string")
    return int(line[1:])


def _fill(
    channel: socket.socket,
    segment: memoryview,
    seen: Seen,
    left: int = 0,
    wake_at: WakeAt = _at_once,
) -> None:
    """Fill a segment; `left` is the number of bytes of this and all later segments."""
    while segment:
        wake_at(left)
        received = channel.recv_into(segment)
        if not received:
            raise RedisConnectionError("the server closed the connection")
        seen(segment[:received])
        segment = segment[received:]
        left -= received


@contextmanager
def _woken_seldom(channel: socket.socket) -> Iterator[WakeAt]:
    """Let the kernel wake this thread only for many bytes: a sixth faster on loopback."""
    # TLS may hold bytes that it has taken from the socket already
    if type(channel) is not socket.socket or channel.family not in _TCP:
        yield _at_once
        return
    current = 1

    def wake_at(left: int) -> None:
        nonlocal current
        wanted = max(1, min(left, _WAKE_BYTES))
        if wanted != current:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            current = wanted

    try:
        yield wake_at
    finally:
        with suppress(OSError):  # it is closed
            wake_at(1)
