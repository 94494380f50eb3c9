"""`redrb dashboard`: serves the live page of a namespace."""

from __future__ import annotations

import argparse
import secrets
import sys

from redrb.checks import install_command
from redrb.cli.arguments import Commands, add_command, add_flag
from redrb.errors import ConfigError
from redrb.options import variable_of
from redrb.words import bracketed, is_loopback

PORT = 8642


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = (
        "serve a live page of a namespace. The page only reads; requeuing dead letters needs a "
        "token, which the command prints. It needs starlette and uvicorn (redrb's extra dashboard)."
    )
    parser = add_command(
        commands, "dashboard", text, _run, subject=None, json_text="print URL and token as JSON"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address that it is served at (default: 127.0.0.1, for this machine only)",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"port; 0: any (default: {PORT})")
    add_flag(
        parser,
        "--expose",
        "allow a --host that other machines reach: whoever reaches it sees prompts, responses "
        "and rewards, unencrypted and without a password",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="Hugging Face folder, or tokenizer.json, that turns tokens of rollouts into text; "
        "without one the page shows their ids",
    )


def _run(options: argparse.Namespace) -> int:
    _check(options)
    import asyncio

    try:
        from redrb.watch.page.app import make_app
        from redrb.watch.page.feed import Feed
        from redrb.watch.page.server import bound_socket, serve
    except ImportError as error:
        command = install_command("dashboard")
        raise ConfigError(f"{error.name} is not installed: {command}.") from error
    from redrb.cli.output import show
    from redrb.connection import connect
    from redrb.environment import variable
    from redrb.watch.page.groups import TaskGroups
    from redrb.watch.page.guard import hosts_of
    from redrb.watch.state.observer import Observer

    tokenizer = None
    if options.tokenizer:
        from redrb.watch.groups import Tokenizer  # it loads numpy

        tokenizer = Tokenizer.open(options.tokenizer)
    token = variable(variable_of("dashboard_token")) or secrets.token_urlsafe(24)
    with (
        bound_socket(options.host, options.port) as listening,
        connect(options.url) as client,
        Observer(client, options.namespace) as observer,
    ):
        port = listening.getsockname()[1]
        url = f"http://{bracketed(options.host)}:{port}/"
        feed = Feed(observer)
        app = make_app(
            feed,
            TaskGroups(client, options.namespace, tokenizer=tokenizer),
            token=token,
            hosts=hosts_of(options.host, port),
        )

        def ready() -> None:
            lines = (f"{url} shows namespace {options.namespace!r} until Ctrl-C", f"token: {token}")
            show({"url": url, "token": token}, lines, as_json=options.json)

        asyncio.run(serve(app, feed, listening, ready))
    return 0


def _check(options: argparse.Namespace) -> None:
    if not 0 <= options.port <= 65_535:
        raise ConfigError(f"--port {options.port} must be between 0 and 65535.")
    if not is_loopback(options.host) and not options.expose:
        raise ConfigError(
            f"--host {options.host} is reached by other machines, and the page shows prompts, "
            "responses and rewards to everybody, unencrypted. Keep the default, and use a tunnel: "
            f"ssh -L {options.port}:127.0.0.1:{options.port} THIS_HOST; or add --expose."
        )
    if not is_loopback(options.host):
        print(f"redrb: everybody who reaches {options.host} sees the page.", file=sys.stderr)
