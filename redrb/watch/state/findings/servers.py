"""Findings about servers that every look shows: away, memory, eviction, failed saves, load."""

from __future__ import annotations

import re
from collections.abc import Iterator

from redrb.connection.server_program import OLDEST_SERVER
from redrb.watch.state.findings.wording import (
    finding_of,
    server_command,
    server_finding,
    url_command,
)
from redrb.watch.state.model import Finding, ServerState, State
from redrb.words import counted

NEAR_LIMIT = 0.8
AT_LIMIT = 0.95
BUSY = 0.9


def find(state: State) -> Iterator[Finding]:
    """Yield the findings about servers, and about all whose data is damaged."""
    words = ("CLIENT", "LIST")
    command = (
        server_command(state.servers[0], *words)
        if state.servers
        else url_command(state.url, state.where, *words)
    )
    kinds = (("task", state.tasks), ("table", state.tables), ("weights", state.weights))
    for kind, named in kinds:
        for each in named:
            if each.damage:
                yield finding_of("failed-check", f"{kind} {each.name}", each.damage, command)
    for task in state.tasks:
        if task.odd_groups:
            text = (
                f"It has {counted(task.odd_groups, 'consumer group')} of a name that none can have."
            )
            yield finding_of("failed-check", f"task {task.name}", text, command)
    for server in state.servers:
        yield from _of_server(server)


def connection_finding(where: str, error: str, url: str | None = None) -> Finding:
    """Return the finding of a look that failed.

    `url` has user and TLS for the command; without it `where`, which has no password, is enough.
    """
    command = url_command(url, where, "PING")
    return finding_of("connection", "server", f"{where} could not be read: {error}", command)


def _of_server(server: ServerState) -> Iterator[Finding]:
    used, most = server.used_memory, server.maxmemory
    if most > 0 and used / most >= NEAR_LIMIT:
        kind = "memory-full" if used / most >= AT_LIMIT else "memory-near-limit"
        text = f"{used / 1e6:,.1f} MB of {most / 1e6:,.1f} MB are used ({used / most:.0%})."
        yield server_finding(kind, server, text, "CONFIG", "SET", "maxmemory", str(2 * most))
    if server.evicts_keys:
        kind = "evicts-keys" if most > 0 else "would-evict-keys"
        text = f"maxmemory-policy is {server.maxmemory_policy}."
        words = ("CONFIG", "SET", "maxmemory-policy", "noeviction")
        yield server_finding(kind, server, text, *words)
    if not server.last_save_ok:
        text = "The last snapshot, or the last write of the append-only file, failed."
        yield server_finding("failed-save", server, text, "INFO", "persistence")
    if server.cpu_share is not None and server.cpu_share >= BUSY:
        commands = f"{server.commands_per_s:,.0f} commands a second"
        text = f"It uses {server.cpu_share:.2f} cores for {commands}."
        yield server_finding("busy-server", server, text, "INFO", "commandstats")
    numbers = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", server.version, re.ASCII)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        text = f"It is {server.kind} {server.version}; redrb needs Redis {oldest} or newer."
        yield server_finding("old-server", server, text, "INFO", "server")
