"""`redrb engine-weights`: brings inference servers to each published version, until Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from redrb import environment
from redrb.cli.arguments import Commands, add_command
from redrb.cli.output import show
from redrb.errors import ConfigError

if TYPE_CHECKING:
    from redrb.connection import Client
    from redrb.train.engines.fleet import Fleet

_RETRY_S = 2.0
"""Seconds for which a request to Redis is repeated: they delay the end of the command."""


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = (
        "bring vLLM servers to each published version of weights. For servers that no maker of "
        "redrb updates, such as those behind a router. It follows the versions until Ctrl-C, and "
        "logs each update. Servers may come, go and be started again at their addresses. Needs "
        "aiohttp (redrb's extra engines)."
    )
    json_text = "print each event as one line of JSON"
    parser = add_command(commands, "engine-weights", text, _run, subject=None, json_text=json_text)
    parser.add_argument(
        "servers", metavar="SERVER", nargs="+", help="address of a server: http://host:port"
    )
    parser.add_argument("--weights", required=True, help="name of the weights")
    parser.add_argument(
        "--model",
        default="actor",
        help="which of the trainer's models the servers have (default: actor); empty: weights of "
        "one model, whose names have no prefix",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="most servers that load at the same time (default: 1); the others answer requests",
    )
    parser.add_argument(
        "--pause",
        choices=("keep", "wait", "abort"),
        default="keep",
        help="what becomes of requests in flight: they stay over the update (keep, the default), "
        "end before it (wait), or return what they have (abort)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="write versions here for servers without redrb's weight transfer backend; they must "
        "be able to read it",
    )
    parser.add_argument(
        "--api-key-from", metavar="VARIABLE", help="environment variable with the servers' API key"
    )


def _run(options: argparse.Namespace) -> int:
    import asyncio

    from redrb.checks import require_package
    from redrb.connection import connect

    if options.at_once < 1:
        raise ConfigError(f"--at-once {options.at_once}: give 1 or more.")
    name = options.api_key_from
    if name is not None and environment.variable(name) is None:
        raise ConfigError(f"--api-key-from: there is no variable {name}, or it is empty.")
    require_package("aiohttp", extra="engines")
    with connect(options.url, retry_s=_RETRY_S) as client, _logged(as_json=options.json):
        asyncio.run(_until_signal(_fleet(client, options)))
    return 0


def _fleet(client: Client, options: argparse.Namespace) -> Fleet:
    from redrb.train.engines import EngineWeights, VLLMEngine
    from redrb.train.engines.fleet import Fleet

    key = None if options.api_key_from is None else environment.variable(options.api_key_from)
    first, *others = (
        # who samples there does not name versions: adapters are merged
        VLLMEngine(url, model="", pause=options.pause, adapters=False, retry_s=0.0, api_key=key)
        for url in dict.fromkeys(options.servers)
    )
    weights = EngineWeights(
        client,
        options.weights,
        first,
        options.folder,
        namespace=options.namespace,
        model=options.model,
    )
    servers = [(first, weights), *((engine, weights.beside(engine)) for engine in others)]
    return Fleet(
        client, options.weights, servers, namespace=options.namespace, at_once=options.at_once
    )


async def _until_signal(fleet: Fleet) -> None:
    """Run until SIGINT or SIGTERM; a second signal does not wait for pauses to be taken back."""
    import asyncio

    running = asyncio.ensure_future(fleet.run())
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def end() -> None:
        running.cancel()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, end)
    with suppress(asyncio.CancelledError):
        await running


@contextmanager
def _logged(*, as_json: bool) -> Iterator[None]:
    """Print what redrb logs in this block."""
    log, handler = logging.getLogger("redrb"), _Printer()
    handler.as_json = as_json
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Printer(logging.Handler):
    as_json = False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        event = {"time": record.created, "level": record.levelname.lower(), "event": text}
        show(event, [f"{at} {text}"], as_json=self.as_json)
