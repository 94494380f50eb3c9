"""`Http`: requests to HTTP servers, any number of them at a time. Needs aiohttp.

Its work for a request does not grow with its connections; that of httpx grows with their square.
"""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from redrb.checks import require_package

_CONNECT_S = 10.0

_IDLE_S = 4.0
"""Seconds for which an idle connection is kept: servers, such as uvicorn, close theirs after 5."""

_KEEPALIVE = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 20),  # seconds of silence before the first probe
    (socket.IPPROTO_TCP, "TCP_KEEPALIVE", 20),  # its name on macOS
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 10),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 60_000),  # milliseconds, for a request on its way
)
"""Options by which a machine that vanished is noticed within a minute, not after the timeout."""

_SOCKET_OPTIONS = tuple(
    (level, getattr(socket, name), value)
    for level, name, value in _KEEPALIVE
    if hasattr(socket, name)
)


@dataclass(frozen=True, slots=True)
class HttpReply:
    """The reply to a request, of any status."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.data.decode(errors="replace")

    def json(self) -> Any:
        """Return the value of the body; raises ValueError if it is no JSON."""
        try:
            return msgspec.json.decode(self.data)
        except msgspec.DecodeError:
            return json.loads(self.data)  # servers in Python write NaN


class Http:
    """Sends requests from one event loop; it connects at the first one, and repeats no POST.

    A machine that vanished in the middle of a request is noticed within a minute, by TCP's probes.
    Proxies and passwords of the environment are not used: to look them up, aiohttp waits for a
    thread before each request, and a gateway of this machine must not be asked through a proxy.

    Attributes:
        errors: What `request` raises where no reply came.
    """

    def __init__(self, *, most: int = 0) -> None:
        """Make it.

        Args:
            most: Most requests at a time; further ones wait. 0: any number.
        """
        require_package("aiohttp", extra="engines")
        import aiohttp

        self._library, self._most = aiohttp, most
        self._session: aiohttp.ClientSession | None = None
        self.errors = (aiohttp.ClientError, TimeoutError)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> HttpReply:
        """Send a request, with a body as JSON; follows no redirection.

        Args:
            timeout_s: Longest silence of the server.
        """
        if self._session is None:
            connector = self._library.TCPConnector(
                limit=self._most, keepalive_timeout=_IDLE_S, socket_factory=_socket
            )
            self._session = self._library.ClientSession(connector=connector)
        data, kind = None, {}
        if body is not None:
            data, kind = io.BytesIO(msgspec.json.encode(body)), {"content-type": "application/json"}
        timeout = self._library.ClientTimeout(
            connect=timeout_s, sock_connect=min(_CONNECT_S, timeout_s), sock_read=timeout_s
        )
        async with self._session.request(
            method,
            url,
            data=data,
            headers={**headers, **kind},
            timeout=timeout,
            allow_redirects=False,
        ) as reply:
            return HttpReply(reply.status, reply.headers, await reply.read())


def _socket(address: Any) -> socket.socket:
    made = socket.socket(*address[:3])
    for option in _SOCKET_OPTIONS:
        made.setsockopt(*option)
    return made
