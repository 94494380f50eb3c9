"""Settings of a server that harm redrb, read by CONFIG GET where the user may do this."""

from __future__ import annotations

import re
from collections.abc import Iterator

from redrb.connection import Client
from redrb.state.findings.wording import finding_of, server_command
from redrb.state.model import Finding, ServerState

_NAMES = (
    *("appendonly", "appendfsync", "save", "maxmemory", "timeout"),
    *("client-output-buffer-limit", "disable-thp"),
)
LEAST_OUTPUT_BYTES = 256 << 20


def find(client: Client, server: ServerState) -> Iterator[Finding]:
    """Yield the findings about one server's settings, or raise StoreDenied."""
    flat = client.execute("CONFIG", "GET", *_NAMES)
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
