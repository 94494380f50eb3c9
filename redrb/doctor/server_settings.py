"""Settings of a server that harm redrb, read by CONFIG GET where the user may do this."""

from __future__ import annotations

import re
from collections.abc import Iterator

from redrb.connection import Client
from redrb.state.findings.wording import server_command
from redrb.state.model import Finding, FindingKind, ServerState

_NAMES = (
    *("appendonly", "appendfsync", "save", "maxmemory", "timeout"),
    *("client-output-buffer-limit", "disable-thp"),
)
LEAST_OUTPUT_BYTES = 256 << 20

NO_PERSISTENCE = FindingKind(
    "no-persistence",
    "warning",
    "The server writes nothing to disk: when it stops, all groups, ledgers and weights are lost. "
    "If it has replicas and starts again empty, these become empty, too.",
)
SNAPSHOTS_ONLY = FindingKind(
    "snapshots-only",
    "info",
    "The server writes snapshots only: when it stops, everything since the last one is lost, often "
    "minutes. An append-only file loses one second.",
)
FSYNC_ALWAYS = FindingKind(
    "fsync-always",
    "info",
    "Each write waits for the disk. appendfsync everysec is much faster, and loses at most about a "
    "second if the machine stops.",
)
NO_MEMORY_LIMIT = FindingKind(
    "no-memory-limit",
    "info",
    "Without maxmemory the server grows until the machine's kernel kills it. At a limit puts wait.",
)
SMALL_OUTPUT_BUFFER = FindingKind(
    "small-output-buffer",
    "warning",
    "The server closes a connection whose unread replies are larger: large batches and weights "
    "cannot be read.",
)
IDLE_TIMEOUT = FindingKind(
    "idle-timeout",
    "info",
    "The server closes idle connections. Nothing is lost: workers connect again when they need to.",
)
HUGE_PAGES = FindingKind(
    "huge-pages",
    "warning",
    "The server may use transparent huge pages: after each fork for a snapshot or a rewrite, "
    "writes copy 2 MB pages, which costs memory and delays replies.",
)


def find(client: Client, server: ServerState) -> Iterator[Finding]:
    """Yield the findings about one server's settings.

    Raises:
        StoreDenied: The user may not run CONFIG GET.
    """
    flat = client.execute("CONFIG", "GET", *_NAMES)
    words = [word.decode("utf-8", "backslashreplace") for word in flat]
    settings = dict(zip(words[::2], words[1::2], strict=True))
    subject = f"server {server.address}"

    def change(name: str, value: str) -> str:
        return server_command(server, "CONFIG", "SET", name, value)

    if settings.get("appendonly") == "no":
        saves = settings.get("save")
        kind = SNAPSHOTS_ONLY if saves else NO_PERSISTENCE
        text = f"save is {repr(saves) if saves else 'empty'}, and appendonly no."
        yield kind.found(subject, text, change("appendonly", "yes"))
    elif settings.get("appendfsync") == "always":
        text = "appendfsync is always."
        yield FSYNC_ALWAYS.found(subject, text, change("appendfsync", "everysec"))
    if settings.get("maxmemory") == "0":
        command = change("maxmemory", "BYTES")
        yield NO_MEMORY_LIMIT.found(subject, "maxmemory is 0.", command)
    limits = settings.get("client-output-buffer-limit", "")  # "normal 0 0 0 slave ..."
    normal = re.search(r"\bnormal (\d+)", limits, re.ASCII)
    hard = int(normal[1]) if normal else 0
    if 0 < hard < LEAST_OUTPUT_BYTES:
        text = f"The hard limit of client-output-buffer-limit normal is {hard:,} bytes."
        command = change("client-output-buffer-limit", "normal 0 0 0")
        yield SMALL_OUTPUT_BUFFER.found(subject, text, command)
    if settings.get("timeout", "0") != "0":
        text = f"timeout is {settings['timeout']} s."
        yield IDLE_TIMEOUT.found(subject, text, change("timeout", "0"))
    if settings.get("disable-thp") == "no":
        text = "disable-thp is no; only a setting in the server's file changes it."
        yield HUGE_PAGES.found(
            subject, text, "echo never > /sys/kernel/mm/transparent_hugepage/enabled"
        )
