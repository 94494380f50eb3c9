"""Findings about servers: away, memory, eviction, failed saves, load, version, damaged data."""

from __future__ import annotations

import re
from collections.abc import Iterator

from redrb.connection.server_program import OLDEST_SERVER
from redrb.state.findings.wording import finding_of, server_command, url_command
from redrb.state.model import Finding, ServerState, State

NEAR_LIMIT = 0.8
AT_LIMIT = 0.95
BUSY = 0.9


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
                yield finding_of("failed-check", f"{kind} {each.name}", each.damage, command)
    for server in state.servers:
        yield from _memory(server)
        yield from _health(server)


def connection_finding(where: str, error: str, url: str | None = None) -> Finding:
    """Return the finding of a look that failed.

    `url` has user and TLS for the command; without it `where`, which has no password, is enough.
    """
    command = url_command(url, where, "PING")
    return finding_of("connection", "server", f"{where} could not be read: {error}", command)


def _memory(server: ServerState) -> Iterator[Finding]:
    share = server.used_memory / server.maxmemory if server.maxmemory > 0 else 0.0
    if share >= NEAR_LIMIT:
        kind = "memory-full" if share >= AT_LIMIT else "memory-near-limit"
        yield finding_of(
            kind,
            _subject(server),
            f"{server.used_memory / 1e6:,.1f} MB of {server.maxmemory / 1e6:,.1f} MB are used "
            f"({share:.0%}).",
            server_command(server, "CONFIG", "SET", "maxmemory", str(2 * server.maxmemory)),
        )


def _health(server: ServerState) -> Iterator[Finding]:
    if server.evicts_keys:
        kind = "evicts-keys" if server.maxmemory > 0 else "would-evict-keys"
        yield finding_of(
            kind,
            _subject(server),
            f"maxmemory-policy is {server.maxmemory_policy}.",
            server_command(server, "CONFIG", "SET", "maxmemory-policy", "noeviction"),
        )
    if not server.last_save_ok:
        text = "The last snapshot, or the last write of the append-only file, failed."
        yield finding_of(
            "failed-save", _subject(server), text, server_command(server, "INFO", "persistence")
        )
    if server.cpu_share is not None and server.cpu_share >= BUSY:
        text = (
            f"It uses {server.cpu_share:.2f} cores for {server.commands_per_s:,.0f} commands a "
            "second."
        )
        yield finding_of(
            "busy-server", _subject(server), text, server_command(server, "INFO", "commandstats")
        )
    numbers = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", server.version, re.ASCII)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        text = f"It is {server.kind} {server.version}; redrb needs Redis {oldest} or newer."
        yield finding_of(
            "old-server", _subject(server), text, server_command(server, "INFO", "server")
        )


def _subject(server: ServerState) -> str:
    return f"server {server.address}"
