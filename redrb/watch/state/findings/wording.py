"""The words that findings share: commands that can be run, numbers of things, lists of names."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

from redrb.connection.server_cli import cli_words
from redrb.stream.announcement import Role
from redrb.watch.state.model import Finding, ServerState, State, TaskState, WorkerState

OfWorker: TypeAlias = Callable[[WorkerState], str]

OF_REDRB = ("redrb-", "redrb.cli.processes.", "workers.")
"""How the programs of redrb's own workers begin."""

NAMED = 5
"""Workers of a task that have a finding of their own; more of them share one."""


@cache
def kinds() -> dict[str, dict[str, Any]]:
    """Return severity, cause and repairs of the findings of each code."""
    rooms = tomllib.loads((files("redrb.watch.state.findings") / "kinds.toml").read_text("utf-8"))
    return rooms["state"] | rooms["doctor"]  # type: ignore[no-any-return]


def finding_of(code: str, subject: str, summary: str, command: str) -> Finding:
    """Return a finding of the kind that `kinds.toml` has for a code."""
    return Finding(code, subject=subject, summary=summary, command=command, **kinds()[code])


def server_finding(code: str, server: ServerState, summary: str, *words: str) -> Finding:
    """Return a finding about a server, with a command of redis-cli."""
    return finding_of(code, f"server {server.address}", summary, server_command(server, *words))


def task_finding(code: str, state: State, task: TaskState, summary: str, *words: str) -> Finding:
    """Return a finding about a task, with a command of redrb."""
    return finding_of(code, f"task {task.name}", summary, redrb_command(state, *words))


def redrb_command(state: State, *words: str) -> str:
    """Return a command of redrb that reaches the state's server and namespace."""
    return command_line(("redrb", *words), namespace=state.namespace, url=state.url)


def worker_command(state: State, task: TaskState, role: Role) -> str:
    """Return the command that starts a worker on a task; words in capitals are for the user.

    A program of the user that has worked in this role is started. Where only others of the user's
    programs are known, and on a task that claims rows of a table, none of redrb's fits: the
    command for the task's figures is returned.
    """
    known = sorted((each for each in task.workers if each.program), key=lambda each: each.seen_s)
    programs = [own_command(each) for each in known if each.role == role]
    if programs and programs[0]:
        return programs[0]
    others = not programs and known and all(own_command(each) for each in known)
    if others or task.table:
        return redrb_command(state, "stats", task.name)
    words: tuple[str, ...] = ("RECIPE", "--task", task.name)
    if role == "stage":
        words = ("MODULE:FUNCTION", "--from", "TASK", "--to", "TASK")
    return command_line((f"redrb-{role}", *words), namespace=state.namespace, url=state.url)


def command_line(words: Sequence[str], *, namespace: str, url: str = "") -> str:
    """Return a command for a namespace.

    Without `url` the command reads REDRB_URL.
    """
    options = () if namespace == "default" else ("--namespace", namespace)
    return shlex.join((*words, *options, *(("--url", url) if url else ())))


def server_command(server: ServerState, *words: str) -> str:
    """Return a command for a server; a password is read from REDISCLI_AUTH."""
    program = "valkey-cli" if server.kind == "valkey" else "redis-cli"
    return shlex.join((program, *(server.cli or _place(server.address)), *words))


def url_command(url: str | None, where: str, *words: str) -> str:
    """Return a command for the server of a URL that may not answer; without a URL, for a place."""
    if url and (given := cli_words(url, *words)):
        return shlex.join(("redis-cli", *given))
    return server_command(ServerState(where), *words)


def _place(address: str) -> tuple[str, ...]:
    """Return the options of redis-cli for an address without user and TLS."""
    host, colon, port = place_of(address).rpartition(":")
    if colon and port.isdigit():
        return ("-h", host.strip("[]"), "-p", port)
    return ("-s", place_of(address))


def place_of(where: str) -> str:
    """Return the first host and port, or the path of a socket, of where a client connects to."""
    path = where.removeprefix("unix://")
    return path if path.startswith("/") else where.partition("/")[0].partition(",")[0]


def seconds(amount: float) -> str:
    """Return a time, such as "4.5 s" or "12 min"."""
    if amount < 100:
        return f"{amount:.1f} s"
    return f"{amount / 60:.0f} min" if amount < 6000 else f"{amount / 3600:.1f} h"


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """Return names with commas between, and the number of those that are too many."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shown(text: str, *, longest: int = 60) -> str:
    """Return a name, or another text, that is safe to print, and not too long."""
    safe = text if text.isascii() and text.isprintable() else ascii(text)
    return safe if len(safe) <= longest else f"{safe[:longest]}..."


def subject_of(task: TaskState) -> str:
    """Return the subject of a task's findings."""
    return f"task {task.name}"


def of_redrb(worker: WorkerState) -> bool:
    """Return whether redrb's own commands start such a worker; yes where nothing is known of it."""
    return worker.program.startswith(OF_REDRB) or not worker.pid


def own_command(worker: WorkerState) -> str:
    """Return the command of a worker that is a program of the user, without its arguments.

    It is "" of redrb's own, and where no file or module is known, as in `python -c`.
    """
    program = worker.program
    if of_redrb(worker) or not program or program.startswith("-"):
        return ""
    return shlex.join(("python", program) if program.endswith(".py") else ("python", "-m", program))


def of_workers(
    code: str, task: TaskState, workers: Sequence[WorkerState], summary: OfWorker, command: OfWorker
) -> Iterator[Finding]:
    """Yield a finding for each worker of a task, or one for all if they are many."""
    if len(workers) <= NAMED:
        for worker in workers:
            subject = f"{worker.role} {worker.name} of {task.name}"
            yield finding_of(code, subject, summary(worker), command(worker))
        return
    names = listed([worker.name for worker in workers])
    text = f"{len(workers):,} workers: {names}. The first: "
    yield finding_of(code, subject_of(task), text + summary(workers[0]), command(workers[0]))
