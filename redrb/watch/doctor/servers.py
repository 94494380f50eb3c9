"""Findings about servers that only `redrb doctor` asks for: settings, users, versions, slots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from redrb.connection import Client
from redrb.connection.client import VALUE_LIMITS
from redrb.connection.cluster import Cluster
from redrb.connection.server_cli import cli_options
from redrb.watch.state.findings.wording import (
    finding_of,
    listed,
    place_of,
    server_command,
    server_finding,
)
from redrb.watch.state.model import Finding, ServerState
from redrb.watch.state.reader import figure_of, info_fields, server_state
from redrb.words import counted

LONG_FORK_US = 500_000
FRAGMENTED = 1.8
LEAST_BYTES = 100_000_000
NEAR_MOST_CLIENTS = 0.9
SLOTS = 16_384
_SETTINGS = (
    "appendonly",
    "appendfsync",
    "save",
    "maxmemory",
    "timeout",
    "client-output-buffer-limit",
    "disable-thp",
    *VALUE_LIMITS,
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
    fork_us = figure_of(info, "latest_fork_usec")
    if fork_us >= LONG_FORK_US:
        text = f"The last fork took {fork_us / 1e6:.2f} s."
        command = "cat /sys/kernel/mm/transparent_hugepage/enabled"
        yield finding_of("long-fork", f"server {server.address}", text, command)
    used, resident = server.used_memory, figure_of(info, "used_memory_rss")
    if used >= LEAST_BYTES and resident >= FRAGMENTED * used:
        text = f"It holds {resident / 1e6:,.0f} MB for {used / 1e6:,.0f} MB of data."
        yield server_finding("fragmented-memory", server, text, "MEMORY", "PURGE")
    if server.allocator.startswith("libc"):
        text = "Its allocator is libc's."
        yield server_finding("libc-allocator", server, text, "INFO", "memory")
    most = figure_of(info, "maxclients")
    if most and server.clients >= NEAR_MOST_CLIENTS * most:
        text = f"{server.clients:,} of at most {most:,.0f} connections are open."
        words = ("CONFIG", "SET", "maxclients", f"{2 * most:.0f}")
        yield server_finding("many-clients", server, text, *words)


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

    def harmful(code: str, name: str, text: str = "", *, better: str) -> Finding:
        text = text or f"{name} is {settings[name]}."
        return server_finding(code, server, text, "CONFIG", "SET", name, better)

    if settings.get("appendonly") == "no":
        saves = settings.get("save")
        kind = "snapshots-only" if saves else "no-persistence"
        text = f"save is {repr(saves) if saves else 'empty'}, and appendonly no."
        yield harmful(kind, "appendonly", text, better="yes")
    elif settings.get("appendfsync") == "always":
        yield harmful("fsync-always", "appendfsync", better="everysec")
    if settings.get("maxmemory") == "0":
        yield harmful("no-memory-limit", "maxmemory", better="BYTES")
    limits = settings.get("client-output-buffer-limit", "")  # "normal 0 0 0 slave ..."
    normal = re.search(r"\bnormal (\d+)", limits, re.ASCII)
    hard = int(normal[1]) if normal else 0
    if 0 < hard < LEAST_OUTPUT_BYTES:
        text = f"The hard limit of client-output-buffer-limit normal is {hard:,} bytes."
        name = "client-output-buffer-limit"
        yield harmful("small-output-buffer", name, text, better="normal 0 0 0")
    for name, usual in VALUE_LIMITS.items():
        most = figure_of(settings, name)
        if 0 < most < usual:
            text = f"Values may have {most:,.0f} bytes at most ({name}), {usual:,} by default."
            yield harmful("small-values", name, text, better=str(usual))
    if settings.get("timeout", "0") != "0":
        text = f"timeout is {settings['timeout']} s."
        yield harmful("idle-timeout", "timeout", text, better="0")
    if settings.get("disable-thp") == "no":
        text = "disable-thp is no; only a setting in the server's file changes it."
        command = "echo never > /sys/kernel/mm/transparent_hugepage/enabled"
        yield finding_of("huge-pages", f"server {server.address}", text, command)


def kept_in(client: Client) -> Kept:
    """Return where a server keeps its users, or raise StoreDenied."""
    _, aclfile = client.execute("CONFIG", "GET", "aclfile") or (b"", b"")
    if aclfile:
        return "aclfile"
    return "config" if info_of(client).get("config_file") else "memory"


def lacking_rights(client: Client, info: Mapping[str, str]) -> str:
    """Return the rights of the user `default` if they make a server drop data when it starts.

    Redis, and Valkey before version 9, run an append-only file as this user, and drop what a script
    has written if the user may not do it. Raises StoreDenied.
    """
    is_fixed = int(info.get("valkey_version", "0").partition(".")[0]) >= 9
    if is_fixed or info.get("aof_enabled") != "1":
        return ""
    lines = client.execute("ACL", "LIST")
    [line] = [each for each in lines if each.startswith(b"user default ")]
    rights = line.decode(errors="replace").split()[2:]
    without_passwords = (each for each in rights if not each.startswith("#"))
    return "" if {"+@all", "~*"} <= set(rights) else " ".join(without_passwords)


def find_users(client: Client, server: ServerState) -> Iterator[Finding]:
    """Yield the findings about one server's users, or raise StoreDenied."""
    rights = lacking_rights(client, info_of(client))
    if rights:
        text = f"The rights of the user default are: {rights}."
        right = ("ACL", "SETUSER", "default", "off", "allcommands", "allkeys", "allchannels")
        yield server_finding("unloadable-file", server, text, *right)
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
    yield server_finding(kind, server, text, *words)
