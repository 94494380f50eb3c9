"""`redrb gateway`: lets agents that speak OpenAI's or Anthropic's protocol fill a task."""

from __future__ import annotations

import argparse
import socket
from urllib.parse import urlsplit

from redrb.checks import require_package
from redrb.cli.arguments import Commands, add_command
from redrb.errors import ConfigError
from redrb.options import variable_of
from redrb.words import bracketed, is_loopback

PORT = 8123

_LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Values of the header Host for this machine."""


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
        default="127.0.0.1",
        help="address that it is served at (default: 127.0.0.1, for this machine only); with "
        f"another one {variable_of('gateway_token')} must hold a token, which opens sessions",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"port; 0: any (default: {PORT})")
    parser.add_argument(
        "--public-url",
        default="",
        metavar="URL",
        help="address at which agents reach it, such as that of a proxy for TLS: the URLs of "
        "sessions begin with it (default: the address that a request came to)",
    )
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
    public_host = _host_of(options.public_url)
    if not (token or (is_loopback(options.host) and is_loopback(public_host or options.host))):
        raise ConfigError(
            f"{options.public_url or options.host} is reached by other machines: set "
            f"{variable_of('gateway_token')} to a token, which whoever opens sessions sends."
        )
    with bound_socket(options.host, options.port) as listening:
        asyncio.run(_serve(options, listening, token))
    return 0


def _host_of(url: str) -> str:
    """Return the host of --public-url, "" without one."""
    try:
        parts = urlsplit(url)
        if not url or (parts.scheme in ("http", "https") and parts.hostname):
            return parts.hostname or ""
    except ValueError:  # brackets that are not closed
        pass
    raise ConfigError(f"--public-url {url}: give https://host, or http://host:port.")


async def _serve(options: argparse.Namespace, listening: socket.socket, token: str) -> None:
    from redrb.cli.output import show
    from redrb.connection import connect
    from redrb.gateway.app import Gateway
    from redrb.gateway.chat import ChatServer
    from redrb.gateway.store import SessionStore
    from redrb.stream import ExperienceStream
    from redrb.train.engines import EngineWeights

    names = {"namespace": options.namespace}
    url = f"http://{bracketed(options.host)}:{listening.getsockname()[1]}/"
    hosts = [*_LOCAL_HOSTS, bracketed(_host_of(options.public_url) or options.host)]

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
            store,
            chat,
            weights,
            stream.worker,
            token=token,
            on_edited=options.on_edited,
            public_url=options.public_url,
        )
        served = hosts if is_loopback(options.host) else ("*",)
        await gateway.serve(listening, hosts=served, ready=ready)
