"""The `redrb` command. Heavy modules are imported by the commands that need them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

from redrb import __version__
from redrb.commands.tables import STATUS
from redrb.commands.tables import figures as lines_of
from redrb.commands.weights import add_weights
from redrb.errors import ConfigError, RedrbError, StoreUnavailable
from redrb.options import add_options, settings_from, variable_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, which means the same for all: `tables.STATUS`.

    Besides, 130 after Ctrl-C, and 141 when nobody reads what it prints any more.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except RedrbError as error:
        print(f"redrb: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # such as `redrb stats | head`
        sys.stdout = None  # nothing is left to be flushed
        return 141
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="redrb",
        description="A Redis-backed streaming experience store for reinforcement learning.",
        epilog=f"Where --url is not given, {variable_of('url')} is read. {STATUS}",
    )
    parser.add_argument("--version", action="version", version=f"redrb {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_server(commands)
    _add_stats(commands)
    _add_save(commands)
    _add_resume(commands)
    _add_export(commands)
    _add_import(commands)
    add_weights(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from redrb.demo.settings import DemoSettings

    parser = commands.add_parser(
        "demo", help="train a small policy with makers and a trainer on this machine"
    )
    add_options(parser, DemoSettings)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from redrb.demo.run import run_demo
    from redrb.demo.settings import DemoSettings

    return run_demo(settings_from(options, DemoSettings), as_json=options.json)


def _add_server(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    told = (
        "Run a Redis for the processes of this machine until Ctrl-C: it listens on a unix socket, "
        "on no port. When it ends by itself, so does the command, with status 1."
    )
    parser = commands.add_parser(
        "server", help="run a Redis for this machine until Ctrl-C", description=told
    )
    parser.add_argument(
        "directory", nargs="?", default="", help="keep data here; default: keep none"
    )
    parser.set_defaults(run=_server)


def _server(options: argparse.Namespace) -> int:
    from redrb.connection.embedded import EmbeddedServer

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with closing(EmbeddedServer(options.directory)) as server, suppress(KeyboardInterrupt):
        print(
            f"{server.program.name} serves this machine at\n"
            f"  {variable_of('url')}=unix://{server.socket}\nuntil Ctrl-C",
            flush=True,
        )
        said = server.wait()
        raise StoreUnavailable(
            f"the server at {server.socket} has ended; it said last: {said}",
            where=str(server.socket),
        )
    return 0


def _add_stats(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("stats", help="show a task's ledger and who waits")
    parser.add_argument("task", help="name of the task")
    parser.add_argument("--namespace", default="default", help="its namespace (default: default)")
    parser.add_argument("--group", default="default", help="consumer group (default: default)")
    parser.add_argument("--url", help=f"where Redis is (default: {variable_of('url')})")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.set_defaults(run=_stats)


def _stats(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.task.inspection import task_stats

    with connect(options.url) as client:
        stats = task_stats(client, options.task, namespace=options.namespace, group=options.group)
    if not stats.joined:
        print(
            f"redrb: consumer group {options.group!r} has taken nothing yet; the ledger shows "
            "what it would find.",
            file=sys.stderr,
        )
    figures = {**asdict(stats), "ledger_balanced": stats.ledger.balanced}
    if options.json:
        print(json.dumps(figures))
        return 0
    pools = {f"waiting {status}": groups for status, groups in figures.pop("waiting").items()}
    for name, value in (figures.pop("ledger") | pools | figures).items():
        print(f"{name:18} {value:>12,}" if type(value) is int else f"{name:18} {value!s:>12}")
    return 0


def _add_mover(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, told: str, where: str
) -> argparse.ArgumentParser:
    """Add a command that moves a task from Redis to a path, or back."""
    parser = commands.add_parser(name, help=told)
    parser.add_argument("task", help="name of the task")
    parser.add_argument("path", type=Path, help=where)
    parser.add_argument("--namespace", default="default", help="its namespace (default: default)")
    parser.add_argument("--url", help=f"where Redis is (default: {variable_of('url')})")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser


def _add_save(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_mover(
        commands, "save", "write a task to a file", "file; an older one is replaced"
    )
    parser.set_defaults(run=_save)


def _save(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.keys import TaskKeys
    from redrb.stream.saving.saving import save_task
    from redrb.stream.task.store import TaskStore

    with connect(options.url) as client:
        keys = TaskKeys.of(options.namespace, options.task)
        saved = save_task(TaskStore(client, options.task, keys), options.path)
    return _tell(options, asdict(saved))


def _add_resume(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_mover(commands, "resume", "fill a new task from a file", "file of `redrb save`")
    parser.set_defaults(run=_resume)


def _resume(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.keys import TaskKeys
    from redrb.stream.saving.saving import resume_task
    from redrb.stream.task.store import TaskStore

    with connect(options.url) as client:
        keys = TaskKeys.of(options.namespace, options.task)
        resumed = resume_task(TaskStore(client, options.task, keys), options.path)
    return _tell(options, asdict(resumed))


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    told = "write a task's groups as JSON lines and safetensors"
    parser = _add_mover(commands, "export", told, "directory; a new one")
    parser.add_argument("--group", default="default", help="consumer group (default: default)")
    parser.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.exchange import export_task

    task, path, namespace = options.task, options.path, options.namespace
    with connect(options.url) as client:
        exported = export_task(client, task, path, namespace=namespace, group=options.group)
    return _tell(options, asdict(exported))


def _add_import(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    told = "put exported groups into a task"
    parser = _add_mover(commands, "import", told, "directory of `redrb export`")
    parser.add_argument(
        "--timeout", type=float, help="seconds to wait for room (default: for ever)"
    )
    parser.set_defaults(run=_import)


def _import(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.exchange import import_task

    task, path, namespace = options.task, options.path, options.namespace
    with connect(options.url) as client:
        imported = import_task(client, task, path, namespace=namespace, timeout=options.timeout)
    return _tell(options, asdict(imported))


def _tell(options: argparse.Namespace, figures: dict[str, object]) -> int:
    if options.json:
        print(json.dumps(figures, default=str))
        return 0
    for line in lines_of(figures):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
