"""Findings about servers: away, memory, eviction, failed saves, load, version, damaged data."""

from __future__ import annotations

import re
from collections.abc import Iterator

from redrb.connection.server_program import OLDEST_SERVER
from redrb.state.findings.wording import server_command, url_command
from redrb.state.model import Finding, FindingKind, ServerState, State

NEAR_LIMIT = 0.8
AT_LIMIT = 0.95
BUSY = 0.9

EVICTS_KEYS = FindingKind(
    "evicts-keys",
    "critical",
    "At its memory limit this server deletes keys by its maxmemory-policy: groups that nobody has "
    "trained, settings, ledgers.",
)
MEMORY_FULL = FindingKind(
    "memory-full",
    "critical",
    "At its memory limit the server refuses writes: puts wait, and nothing is lost. maxmemory is "
    "too small for the limits of the tasks and for the weights, or something else fills it.",
)
FAILED_SAVE = FindingKind(
    "failed-save",
    "critical",
    "The server could not write its snapshot or its append-only file: the disk is full or not "
    "writable, or there is too little memory to fork. What is not saved is lost if it stops. "
    "Make room; the server's log says what failed.",
)
OLD_SERVER = FindingKind(
    "old-server",
    "critical",
    "redrb does not run on this version of the server: commands that it needs are missing. Upgrade "
    "the server, or use another one; `redrb server` starts one.",
)
MEMORY_NEAR_LIMIT = FindingKind(
    "memory-near-limit",
    "warning",
    "The memory limit will be reached soon. Then puts wait until trainers make room.",
)
BUSY_SERVER = FindingKind(
    "busy-server",
    "warning",
    "The server runs commands in one thread, and this thread is nearly always busy: everyone "
    "waits for it. Other programs may load it, or the tasks need several servers.",
)
WOULD_EVICT_KEYS = FindingKind(
    "would-evict-keys",
    "warning",
    "The server has no memory limit now. Once it gets one, it deletes keys by its "
    "maxmemory-policy, also groups that nobody has trained.",
)
CONNECTION = FindingKind(
    "connection",
    "critical",
    "Redis has stopped, is overloaded, or cannot be reached from this machine; or the URL or the "
    "password is wrong. Makers and trainers wait until Redis is back, for as long as their retries "
    "allow.",
)
FAILED_CHECK = FindingKind(
    "failed-check",
    "critical",
    "A key of redrb has another type or content than it should have: another program changed it. "
    "CLIENT LIST shows which programs are connected. If you have a file of `redrb save`, restore "
    "the task from it.",
)


def find(state: State) -> Iterator[Finding]:
    """Yield the findings about servers, and about tasks and weights whose data is damaged."""
    words = ("CLIENT", "LIST")
    command = (
        server_command(state.servers[0], *words)
        if state.servers
        else url_command(state.url, state.where, *words)
    )
    for kind, named in (("task", state.tasks), ("weights", state.weights)):
        for each in named:
            if each.damage:
                yield FAILED_CHECK.found(f"{kind} {each.name}", each.damage, command)
    for server in state.servers:
        yield from _memory(server)
        yield from _health(server)


def connection_finding(where: str, error: str, url: str | None = None) -> Finding:
    """Return the finding of a look that failed.

    `url` has user and TLS for the command; without it `where`, which has no password, is enough.
    """
    command = url_command(url, where, "PING")
    return CONNECTION.found("server", f"{where} could not be read: {error}", command)


def _memory(server: ServerState) -> Iterator[Finding]:
    share = server.used_memory / server.maxmemory if server.maxmemory > 0 else 0.0
    if share >= NEAR_LIMIT:
        kind = MEMORY_FULL if share >= AT_LIMIT else MEMORY_NEAR_LIMIT
        yield kind.found(
            _subject(server),
            f"{server.used_memory / 1e6:,.1f} MB of {server.maxmemory / 1e6:,.1f} MB are used "
            f"({share:.0%}).",
            server_command(server, "CONFIG", "SET", "maxmemory", str(2 * server.maxmemory)),
        )


def _health(server: ServerState) -> Iterator[Finding]:
    if server.evicts_keys:
        kind = EVICTS_KEYS if server.maxmemory > 0 else WOULD_EVICT_KEYS
        yield kind.found(
            _subject(server),
            f"maxmemory-policy is {server.maxmemory_policy}.",
            server_command(server, "CONFIG", "SET", "maxmemory-policy", "noeviction"),
        )
    if not server.last_save_ok:
        text = "The last snapshot, or the last write of the append-only file, failed."
        yield FAILED_SAVE.found(
            _subject(server), text, server_command(server, "INFO", "persistence")
        )
    if server.cpu_share is not None and server.cpu_share >= BUSY:
        text = (
            f"It uses {server.cpu_share:.2f} cores for {server.commands_per_s:,.0f} commands a "
            "second."
        )
        yield BUSY_SERVER.found(
            _subject(server), text, server_command(server, "INFO", "commandstats")
        )
    numbers = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", server.version, re.ASCII)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        text = f"It is {server.kind} {server.version}; redrb needs Redis {oldest} or newer."
        yield OLD_SERVER.found(_subject(server), text, server_command(server, "INFO", "server"))


def _subject(server: ServerState) -> str:
    return f"server {server.address}"
