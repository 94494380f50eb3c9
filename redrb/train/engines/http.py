"""JSON requests to an inference server: headers, time limits, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from redrb.checks import checked_number
from redrb.errors import ConfigError, EngineError
from redrb.http_client import Http, HttpReply

MOST_CONNECTIONS = 1024
"""Most requests to one server at a time; further ones wait for a connection."""


def _text_of(reply: HttpReply) -> str:
    """Return the message of an error as servers of OpenAI's kind send it, else the whole reply."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text


class JsonClient:
    """Sends JSON to one server; it connects at the first request, and repeats none."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        api_key: str | None = None,
        most: int = MOST_CONNECTIONS,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url={url!r:.80}: give the address of a server, http://host:port.")
        self.where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._url, self._timeout_s = url.rstrip("/"), checked_number("timeout", timeout)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = Http(most=most)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def request(
        self, path: str, body: Mapping[str, Any] | None = None, *, last: bool = False
    ) -> dict[str, Any]:
        """Post JSON, or get without `body`; return the reply, {} for an empty one.

        Args:
            path: Of the request.
            body: Sent as JSON.
            last: Whether its connection is closed then. uvicorn closes it after status 500 without
                saying so, and a request that came next on it would break off.

        Raises:
            EngineError: The server does not answer, or with an error.
        """
        try:
            reply = await self._http.request(
                "GET" if body is None else "POST",
                self._url + path,
                body,
                headers=self._headers | ({"Connection": "close"} if last else {}),
                timeout_s=self._timeout_s,
            )
        except self._http.errors as error:
            raise EngineError(
                f"{self.where}{path}: {type(error).__name__}: {error}. Check that the server runs, "
                "or raise timeout.",
                where=self.where,
            ) from error
        if reply.status >= 400:
            raise EngineError(
                f"{self.where}{path} answered {reply.status}: {_text_of(reply):.2000}",
                where=self.where,
                status=reply.status,
            )
        try:
            found = reply.json()
        except ValueError:
            found = {}  # control calls of SGLang answer with a text, or with nothing
        return found if isinstance(found, dict) else {}
