"""Users of a server that are gone when it restarts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from redrb.connection import Client
from redrb.doctor.server_facts import info_of
from redrb.state.findings.wording import counted, listed, server_command
from redrb.state.model import Finding, FindingKind, ServerState

Kept: TypeAlias = Literal["aclfile", "config", "memory"]
"""Where a server keeps users: a file that ACL SAVE writes, its settings, or nowhere."""

UNSAVED_USERS = FindingKind(
    "unsaved-users",
    "warning",
    "The server was started without a file of settings and without aclfile, so its users are only "
    "in its memory: when it restarts, they are gone, and workers that log in as them are refused. "
    "Start it with --aclfile PATH, make the users again (`redrb acl --apply`), and run ACL SAVE "
    "after each change.",
)
UNKNOWN_USERS = FindingKind(
    "perhaps-unsaved-users",
    "info",
    "The server has no aclfile. Its users outlive a restart only if CONFIG REWRITE was run after "
    "the last change of a user; the server does not say whether it was.",
)


def kept_in(client: Client) -> Kept:
    """Return where a server keeps its users.

    Raises:
        StoreDenied: The user may not run CONFIG GET.
    """
    _, aclfile = client.execute("CONFIG", "GET", "aclfile") or (b"", b"")
    if aclfile:
        return "aclfile"
    return "config" if info_of(client).get("config_file") else "memory"


def find(client: Client, server: ServerState) -> Iterator[Finding]:
    """Yield the finding about one server's users.

    Raises:
        StoreDenied: The user may not run CONFIG GET and ACL USERS.
    """
    kept = kept_in(client)
    if kept == "aclfile":  # whether ACL SAVE was run since the last change, no command tells
        return
    users = [name.decode(errors="replace") for name in client.execute("ACL", "USERS")]
    others = sorted(name for name in users if name != "default")
    if not others:
        return
    text = f"{counted(len(others), 'user')} beside default: {listed(others)}."
    kind, words = UNKNOWN_USERS, ("CONFIG", "REWRITE")
    if kept == "memory":
        kind, words = UNSAVED_USERS, ("ACL", "LIST")
    yield kind.found(f"server {server.address}", text, server_command(server, *words))
