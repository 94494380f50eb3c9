"""`redrb gateway`: lets agents that speak OpenAI's or Anthropic's protocol fill a task."""

from __future__ import annotations

import argparse
import socket

from redrb.checks import require_package
from redrb.cli.arguments import Commands, add_command
from redrb.errors import ConfigError
from redrb.options import variable_of

PORT = 8123

_LOOPBACK = ("127.0.0.1", "localhost")

_SERVED = {"connections": 4096, "grace_s": 10, "idle_s": 75}
"""Clients close their idle connections sooner, and send nothing on one that is being closed."""


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = (
        "let agents that speak OpenAI's or Anthropic's protocol fill a task. It samples from a "
        "vLLM, gives it each version of weights, and stores exactly the sampled tokens of each "
        "turn before the agent reads them. Needs aiohttp, starlette and uvicorn (redrb's extras "
        "engines and dashboard)."
    )
    parser = add_command(
        commands, "gateway", text, _run, subject=None, json_text="print the URL as JSON"
    )
    parser.add_argument("--engine", required=True, help="address of vLLM: http://host:port")
    parser.add_argument("--task", required=True, help="name of the task")
    parser.add_argument("--weights", required=True, help="name of the weights")
    parser.add_argument("--model", help="the model's name at vLLM (default: its first)")
    parser.add_argument(
        "--host",
        default=_LOOPBACK[0],
        help="address that it is served at (default: 127.0.0.1, for this machine only); with "
        f"another one {variable_of('gateway_token')} must hold a token, which opens sessions",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"port; 0: any (default: {PORT})")
    parser.add_argument(
        "--session-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time after which a session without a request is gone (default: 600)",
    )
    parser.add_argument(
        "--on-edited",
        choices=("branch", "error"),
        default="branch",
        help="what becomes of a history that was edited: it begins one more sample of its session "
        "(branch, the default), or is refused (error)",
    )


def _run(options: argparse.Namespace) -> int:
    import asyncio

    require_package("aiohttp", extra="engines")
    require_package("starlette", extra="dashboard")
    require_package("uvicorn", extra="dashboard")
    from redrb.environment import variable
    from redrb.watch.page.server import bound_socket

    token = variable(variable_of("gateway_token")) or ""
    if options.host not in _LOOPBACK and not token:
        raise ConfigError(
            f"--host {options.host} is reached by other machines: set "
            f"{variable_of('gateway_token')} to a token, which whoever opens sessions sends."
        )
    with bound_socket(options.host, options.port) as listening:
        asyncio.run(_serve(options, listening, token))
    return 0


async def _serve(options: argparse.Namespace, listening: socket.socket, token: str) -> None:
    from redrb.cli.output import show
    from redrb.connection import connect
    from redrb.gateway.app import Gateway
    from redrb.gateway.chat import ChatServer
    from redrb.gateway.store import SessionStore
    from redrb.stream import ExperienceStream
    from redrb.train.engines import EngineWeights
    from redrb.watch.page.server import serve

    names = {"namespace": options.namespace}
    url = f"http://{options.host}:{listening.getsockname()[1]}/"

    def ready() -> None:
        show({"url": url}, [f"{url} fills {options.task!r} until Ctrl-C"], as_json=options.json)

    with (
        connect(options.url) as client,
        ExperienceStream(client, options.task, create=False, **names) as stream,
        SessionStore(stream, timeout_s=options.session_timeout) as store,
    ):
        chat = await ChatServer.open(options.engine, options.model)
        weights = EngineWeights(client, options.weights, chat.engine, **names)
        gateway = Gateway(
            store, chat, weights, stream.worker, token=token, on_edited=options.on_edited
        )
        try:
            hosts = _LOOPBACK if options.host in _LOOPBACK else ("*",)
            await serve(gateway.app(hosts), gateway, listening, ready, **_SERVED)
        finally:
            weights.close()
            await chat.close()
