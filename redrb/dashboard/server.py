"""Serves the page until a signal comes."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from redrb.errors import ConfigError


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: The address cannot be used; the message says why.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"the page cannot be served at {host}:{port}: {error.strerror}. Choose another --port."
        ) from error
    return listening


def serve(app: Starlette, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve an application until SIGINT, SIGTERM or SIGHUP comes; open pages do not delay the end."""
    asyncio.run(_serve(app, listening, ready))


async def _serve(app: Starlette, listening: socket.socket, ready: Callable[[], None]) -> None:
    server = _Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    )

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    ready()
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await app.state.feed.close()
    server.should_exit = True
    await serving


class _Server(uvicorn.Server):
    """Leaves the signals to `serve`, which ends the events of open pages first."""

    def capture_signals(self):  # type: ignore[no-untyped-def]
        from contextlib import nullcontext

        return nullcontext()
