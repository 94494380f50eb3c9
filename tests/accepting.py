"""Servers of asyncio that close while a connection is accepted, as servers of tests do.

CPython takes some turns of its event loop to accept a connection. If the server closes in between,
it drops the connection without closing it (its issue 109564, which is open): the client waits, and
a later test is told of an unclosed socket.
"""

from __future__ import annotations

import socket
from asyncio import Server
from asyncio.selector_events import BaseSelectorEventLoop
from typing import Any

_accept = BaseSelectorEventLoop._accept_connection2  # type: ignore[attr-defined]


async def _accept_or_close(
    self: Any,
    factory: Any,
    connection: socket.socket,
    extra: Any,
    tls: Any = None,
    server: Server | None = None,
    *more: Any,
) -> None:
    if server is not None and not server.sockets:
        connection.close()
    else:
        await _accept(self, factory, connection, extra, tls, server, *more)


def close_what_comes_late() -> None:
    """Let servers of this process close connections that they have accepted as they closed."""
    BaseSelectorEventLoop._accept_connection2 = _accept_or_close  # type: ignore[attr-defined]
