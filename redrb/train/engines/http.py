"""JSON requests to an inference server: headers, connections and time limits."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from redrb.checks import checked_number, require_package
from redrb.errors import ConfigError, EngineError

MOST_CONNECTIONS = 1024
"""Most requests to one server at a time; further ones wait for a connection."""

_CONNECT_S = 10.0

_KEEPALIVE = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 20),  # seconds of silence before the first probe
    (socket.IPPROTO_TCP, "TCP_KEEPALIVE", 20),  # its name on macOS
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 10),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 60_000),  # milliseconds, for a request on its way
)
"""Options by which a machine that vanished is noticed within a minute, not after `timeout`."""

_SOCKET_OPTIONS = tuple(
    (level, getattr(socket, name), value)
    for level, name, value in _KEEPALIVE
    if hasattr(socket, name)
)


async def _set_keepalive(event: str, info: Mapping[str, Any]) -> None:
    """Set the options of a new connection; httpx calls this with the steps of each request."""
    if event == "connection.connect_tcp.complete":
        connected = info["return_value"].get_extra_info("socket")
        for option in _SOCKET_OPTIONS:
            connected.setsockopt(*option)


def _text_of(reply: Any) -> str:
    """Return the message of an error as servers of OpenAI's kind send it, else the whole reply."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(reply.text)


class JsonClient:
    """Sends JSON to one server; it connects at the first request, and repeats none.

    A machine that vanished in the middle of a request is noticed within a minute, by TCP's probes.
    """

    def __init__(self, url: str, *, timeout: float, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url={url!r:.80}: give the address of a server, http://host:port.")
        self.where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        require_package("httpx", extra="engines")
        import httpx

        self._library = httpx
        seconds = checked_number("timeout", timeout)
        self._client = self._library.AsyncClient(
            base_url=url.rstrip("/"),
            timeout=self._library.Timeout(seconds, connect=min(_CONNECT_S, seconds)),
            limits=self._library.Limits(max_connections=MOST_CONNECTIONS),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def request(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Post JSON, or get without `body`; return the reply, {} for an empty one.

        Raises:
            EngineError: The server does not answer, or with an error.
        """
        try:
            reply = await self._client.request(
                "GET" if body is None else "POST",
                path,
                json=body,
                extensions={"trace": _set_keepalive},
            )
        except self._library.HTTPError as error:
            raise EngineError(
                f"{self.where}{path}: {type(error).__name__}: {error}. Check that the server runs, "
                "or raise timeout.",
                where=self.where,
            ) from error
        if reply.status_code >= 400:
            raise EngineError(
                f"{self.where}{path} answered {reply.status_code}: {_text_of(reply):.2000}",
                where=self.where,
                status=reply.status_code,
            )
        try:
            found = reply.json() if reply.content else {}
        except ValueError:
            found = {}  # control calls of SGLang answer with a text
        return found if isinstance(found, dict) else {}
