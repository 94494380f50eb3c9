"""Serves a gateway: as the command `redrb gateway`, or within a maker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from redrb.gateway.app import Gateway
from redrb.gateway.chat import ChatServer
from redrb.train.engines import EngineWeights
from redrb.watch.page.server import serve

_SERVED = {"connections": 4096, "grace_s": 10, "idle_s": 75}
"""Clients close their idle connections sooner, and send nothing on one that is being closed."""


async def serve_gateway(
    gateway: Gateway,
    chat: ChatServer,
    weights: EngineWeights,
    listening: socket.socket,
    *,
    hosts: Sequence[str],
    ready: Callable[[], None] = lambda: None,
    stopped: asyncio.Event | None = None,
) -> None:
    """Serve sessions until a signal comes, or `stopped` is set; then close `chat` and `weights`.

    Args:
        chat, weights: Those of the gateway.
        listening: Socket of the server.
        hosts: Values of the header Host that are served.
        ready: Called when the server takes requests.
        stopped: Ends it; signals are left to whoever sets it.

    Raises:
        RedrbError: The first weights could not be loaded.
    """
    try:
        app = gateway.app(hosts)
        await serve(app, gateway, listening, ready, **_SERVED, stopped=stopped)
    finally:
        weights.close()
        await chat.close()
