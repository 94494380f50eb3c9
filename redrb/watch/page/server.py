"""Serves an application until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from redrb.errors import ConfigError
from redrb.words import bracketed

MOST_CONNECTIONS = 256
"""Most open connections of the page. Another one closes the one that has waited longest without a
request; if all have one, requests get status 503."""


OTHER_FILES = 2048
"""Open files beside connections: those to Redis and to inference servers, among others."""

_log = logging.getLogger("redrb")


class Beside(Protocol):
    """What runs beside the application."""

    async def run(self) -> None:
        """Run until it is cancelled; an error ends the server."""

    async def close(self) -> None:
        """End the responses that would not end by themselves."""


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens, or raise ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends without delay only on sockets of this protocol: others wait 40 ms for the client
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # whoever reads the URL may connect at once
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"this cannot be served at {bracketed(host)}:{port}: {error.strerror}. Choose another "
            "--port."
        ) from error
    return listening


async def serve(
    app: Starlette,
    beside: Beside,
    listening: socket.socket,
    ready: Callable[[], None],
    *,
    connections: int = MOST_CONNECTIONS,
    grace_s: int = 2,
    idle_s: int = 5,
    stopped: asyncio.Event | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP comes; open pages do not delay the end.

    Args:
        ready: Called when the server takes requests.
        connections: Most that are open.
        grace_s: Seconds that requests get to end.
        idle_s: Seconds after which a connection without a request is closed.
        stopped: Ends the server when it is set; signals are left to whoever sets it.
    """
    _allow_files(connections + OTHER_FILES)
    server = _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=grace_s,
            timeout_keep_alive=idle_s,
            limit_concurrency=connections,
            http=type("_Connection", (_Connection,), {"idle": {}}),  # of this server
            ws="none",
        )
    )
    if stopped is None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stopped.set)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    running = asyncio.create_task(beside.run())
    stopping = asyncio.create_task(stopped.wait())
    ready()
    await asyncio.wait((serving, running, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await beside.close()
    server.should_exit = True
    await serving
    running.cancel()
    await asyncio.wait({running}, timeout=grace_s)  # its caller closes what it uses
    if running.done() and not running.cancelled():
        running.result()  # raises what ended it


def _allow_files(count: int) -> None:
    """Let this process open so many files, or as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < count:
        _log.warning(
            "this process may open %d files, which is too few for as many connections as it may "
            "have: raise the hard limit to %d, as `ulimit -Hn` does.",
            most,
            count,
        )


class _Connection(H11Protocol):
    """A connection that makes room for another one while it has no request.

    Attributes:
        idle: The connections of the server without a request, the one that has waited longest
            first.
    """

    idle: dict[_Connection, None]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection that has waited longest if there are too many."""
        super().connection_made(transport)
        if len(self.connections) >= (self.limit_concurrency or 0) and self.idle:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            self.connections.discard(oldest)
            oldest.transport.abort()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that it waits for nothing any more."""
        super().connection_lost(exc)
        self.idle.pop(self, None)

    def handle_events(self) -> None:
        """Note whether a request has begun."""
        super().handle_events()
        self._note()

    def on_response_complete(self) -> None:
        """Note that it waits for a request."""
        super().on_response_complete()
        self._note()

    def _note(self) -> None:
        """Note whether it waits for a request, or for the rest of one's head."""
        done = self.cycle is None or self.cycle.response_complete
        if done and self in self.connections:  # not one that is aborted, or has another protocol
            self.idle.setdefault(self)
        else:
            self.idle.pop(self, None)


class _Server(uvicorn.Server):
    """Leaves signals to `serve`, which ends the events of open pages first."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Catch no signals."""
        yield
