"""Keeps the page to itself: checks Host and the token, and sends headers that browsers obey."""

from __future__ import annotations

import hmac

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrb.words import is_loopback

TOKEN_HEADER = "X-Redrb-Token"  # noqa: S105 (a name, no secret)

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Refuses requests to other host names: a foreign page may have resolved its name to here.

    A browser sends such a page's requests to this server, as if it were the page's own ("DNS
    rebinding"); the name in the header Host tells.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on and add the headers to its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        host = Request(scope).headers.get("host", "")
        if self._hosts and host.lower() not in self._hosts:
            text = (
                f"this page is not served as {host!r}: open the URL that redrb dashboard printed.\n"
            )
            await PlainTextResponse(text, 421)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def hosts_of(host: str, port: int) -> frozenset[str]:
    """Return the values of the header Host for a loopback address; empty for any other address."""
    if not is_loopback(host):
        return frozenset()
    names = ("127.0.0.1", "localhost", "[::1]")
    ports = (f":{port}", "") if port == 80 else (f":{port}",)  # browsers leave out port 80
    return frozenset(f"{name}{each}" for name in names for each in ports)


def is_token(given: str, token: str) -> bool:
    """Return whether a header's value is the token, in UTF-8; it takes the same time for all."""
    return hmac.compare_digest(given.encode("latin-1"), token.encode())
