"""`redrb server`: runs a Redis for the processes of this machine."""

from __future__ import annotations

import argparse
import signal
from contextlib import closing, suppress

from redrb.cli.arguments import Commands, add_json
from redrb.cli.output import show
from redrb.errors import StoreUnavailable
from redrb.options import variable_of


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "server",
        help="run a Redis for this machine until Ctrl-C",
        description="Run a Redis for the processes of this machine until Ctrl-C: it listens on a "
        "unix socket and on no port. If the server ends, the command ends with status 1.",
    )
    parser.add_argument(
        "directory", nargs="?", default="", help="keep data here; default: keep none"
    )
    add_json(parser, "print one line of JSON when it serves")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from redrb.cli.run.worker_process import Death
    from redrb.connection.embedded import EmbeddedServer

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with closing(EmbeddedServer(options.directory)) as server, suppress(KeyboardInterrupt):
        url, name = f"unix://{server.socket}", server.program.name
        lines = (f"{name} serves this machine at", f"  {variable_of('url')}={url}", "until Ctrl-C")
        show({"url": url, "program": name}, lines, as_json=options.json)
        status, log = server.wait()
        # the log of a killed server says nothing of it
        last = "" if status < 0 else f"; the last line of its log: {log.rpartition(chr(10))[2]}"
        again = "the same command starts it again, and programs wait for up to a minute"
        raise StoreUnavailable(
            f"the server at {server.socket} {Death(status, 0.0, log).why}{last}. "
            f"{again if options.directory else 'It kept no data'}.",
            where=str(server.socket),
        )
    return 0
