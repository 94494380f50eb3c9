"""What a server says of itself: by INFO, its settings, its users, the slots of a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from redrb.connection import Client
from redrb.connection.cluster import Cluster
from redrb.connection.server_cli import cli_options
from redrb.state.findings.wording import counted, finding_of, listed, place_of, server_command
from redrb.state.model import Finding, ServerState
from redrb.state.reader import figure_of, info_fields, server_state

LONG_FORK_US = 500_000
FRAGMENTED = 1.8
LEAST_BYTES = 100_000_000
NEAR_MOST_CLIENTS = 0.9
SLOTS = 16_384
_SETTINGS = (
    *("appendonly", "appendfsync", "save", "maxmemory", "timeout"),
    *("client-output-buffer-limit", "disable-thp"),
)
LEAST_OUTPUT_BYTES = 256 << 20

Kept: TypeAlias = Literal["aclfile", "config", "memory"]
"""Where a server keeps users: a file that ACL SAVE writes, its settings, or nowhere."""


def info_of(client: Client) -> dict[str, str]:
    """Return the fields of INFO of one server."""
    return info_fields(client.execute("INFO"))


def server_of(client: Client, info: Mapping[str, str]) -> ServerState:
    """Return the state of a server, as commands for it need."""
    return server_state(info, address=place_of(client.where), cli=cli_options(client))


def find(server: ServerState, info: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of one server's INFO."""
    subject = f"server {server.address}"
    fork_us = figure_of(info, "latest_fork_usec")
    if fork_us >= LONG_FORK_US:
        text = f"The last fork took {fork_us / 1e6:.2f} s."
        command = "cat /sys/kernel/mm/transparent_hugepage/enabled"
        yield finding_of("long-fork", subject, text, command)
    used, resident = server.used_memory, figure_of(info, "used_memory_rss")
    if used >= LEAST_BYTES and resident >= FRAGMENTED * used:
        text = f"It holds {resident / 1e6:,.0f} MB for {used / 1e6:,.0f} MB of data."
        command = server_command(server, "MEMORY", "PURGE")
        yield finding_of("fragmented-memory", subject, text, command)
    if server.allocator.startswith("libc"):
        command = server_command(server, "INFO", "memory")
        yield finding_of("libc-allocator", subject, "Its allocator is libc's.", command)
    most = figure_of(info, "maxclients")
    if most and server.clients >= NEAR_MOST_CLIENTS * most:
        text = f"{server.clients:,} of at most {most:,.0f} connections are open."
        command = server_command(server, "CONFIG", "SET", "maxclients", f"{2 * most:.0f}")
        yield finding_of("many-clients", subject, text, command)


def find_in_cluster(client: Client) -> Iterator[Finding]:
    """Yield the findings about a cluster's slots."""
    if not isinstance(client, Cluster):
        return
    nodes = client.primaries()  # a node may not know yet what another one has lost
    served = min(
        sum(last - begin + 1 for begin, last, *_ in node.execute("CLUSTER", "SLOTS"))
        for node in nodes
    )
    if served < SLOTS:
        text = f"{SLOTS - served:,} of {SLOTS:,} slots are served by no node."
        command = server_command(server_of(nodes[0], {}), "CLUSTER", "NODES")
        yield finding_of("missing-slots", f"cluster {client.where}", text, command)


def find_in_settings(client: Client, server: ServerState) -> Iterator[Finding]:
    """Yield the findings about one server's settings, or raise StoreDenied."""
    flat = client.execute("CONFIG", "GET", *_SETTINGS)
    words = [word.decode("utf-8", "backslashreplace") for word in flat]
    settings = dict(zip(words[::2], words[1::2], strict=True))
    subject = f"server {server.address}"

    def change(name: str, value: str) -> str:
        return server_command(server, "CONFIG", "SET", name, value)

    if settings.get("appendonly") == "no":
        saves = settings.get("save")
        kind = "snapshots-only" if saves else "no-persistence"
        text = f"save is {repr(saves) if saves else 'empty'}, and appendonly no."
        yield finding_of(kind, subject, text, change("appendonly", "yes"))
    elif settings.get("appendfsync") == "always":
        text = "appendfsync is always."
        yield finding_of("fsync-always", subject, text, change("appendfsync", "everysec"))
    if settings.get("maxmemory") == "0":
        command = change("maxmemory", "BYTES")
        yield finding_of("no-memory-limit", subject, "maxmemory is 0.", command)
    limits = settings.get("client-output-buffer-limit", "")  # "normal 0 0 0 slave ..."
    normal = re.search(r"\bnormal (\d+)", limits, re.ASCII)
    hard = int(normal[1]) if normal else 0
    if 0 < hard < LEAST_OUTPUT_BYTES:
        text = f"The hard limit of client-output-buffer-limit normal is {hard:,} bytes."
        command = change("client-output-buffer-limit", "normal 0 0 0")
        yield finding_of("small-output-buffer", subject, text, command)
    if settings.get("timeout", "0") != "0":
        text = f"timeout is {settings['timeout']} s."
        yield finding_of("idle-timeout", subject, text, change("timeout", "0"))
    if settings.get("disable-thp") == "no":
        text = "disable-thp is no; only a setting in the server's file changes it."
        yield finding_of(
            "huge-pages", subject, text, "echo never > /sys/kernel/mm/transparent_hugepage/enabled"
        )


def kept_in(client: Client) -> Kept:
    """Return where a server keeps its users, or raise StoreDenied."""
    _, aclfile = client.execute("CONFIG", "GET", "aclfile") or (b"", b"")
    if aclfile:
        return "aclfile"
    return "config" if info_of(client).get("config_file") else "memory"


def find_users(client: Client, server: ServerState) -> Iterator[Finding]:
    """Yield the finding about one server's users, or raise StoreDenied."""
    kept = kept_in(client)
    if kept == "aclfile":  # whether ACL SAVE was run since the last change, no command tells
        return
    users = [name.decode(errors="replace") for name in client.execute("ACL", "USERS")]
    others = sorted(name for name in users if name != "default")
    if not others:
        return
    text = f"{counted(len(others), 'user')} beside default: {listed(others)}."
    kind, words = "perhaps-unsaved-users", ("CONFIG", "REWRITE")
    if kept == "memory":
        kind, words = "unsaved-users", ("ACL", "LIST")
    yield finding_of(kind, f"server {server.address}", text, server_command(server, *words))
