"""Users of a server that are gone when it restarts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from redrb.connection import Client
from redrb.doctor.server_facts import info_of
from redrb.state.findings.wording import counted, finding_of, listed, server_command
from redrb.state.model import Finding, ServerState

Kept: TypeAlias = Literal["aclfile", "config", "memory"]
"""Where a server keeps users: a file that ACL SAVE writes, its settings, or nowhere."""


def kept_in(client: Client) -> Kept:
    """Return where a server keeps its users, or raise StoreDenied."""
    _, aclfile = client.execute("CONFIG", "GET", "aclfile") or (b"", b"")
    if aclfile:
        return "aclfile"
    return "config" if info_of(client).get("config_file") else "memory"


def find(client: Client, server: ServerState) -> Iterator[Finding]:
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
