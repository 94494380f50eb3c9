"""Settings of a server that harm redrb, read by CONFIG GET where the user may do this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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


def settings_of(client: Client) -> dict[str, str]:
    """Return the settings of one server that matter, by name.

    Raises:
        StoreDenied: The user may not run CONFIG GET.
    """
    flat = client.execute("CONFIG", "GET", *_NAMES)
    words = [word.decode("utf-8", "backslashreplace") for word in flat]
    return dict(zip(words[::2], words[1::2], strict=True))


def find(server: ServerState, settings: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings about one server's settings."""
    subject = f"server {server.address}"

    def change(name: str, value: str) -> str:
        return server_command(server, "CONFIG", "SET", name, value)

    if settings.get("appendonly") == "no":
        if settings.get("save"):
            text = f"save is {settings['save']!r}, and appendonly no."
            yield SNAPSHOTS_ONLY.found(subject, text, change("appendonly", "yes"))
        else:
            text = "save is empty, and appendonly no."
            yield NO_PERSISTENCE.found(subject, text, change("appendonly", "yes"))
    elif settings.get("appendfsync") == "always":
        text = "appendfsync is always."
        yield FSYNC_ALWAYS.found(subject, text, change("appendfsync", "everysec"))
    if settings.get("maxmemory") == "0":
        command = change("maxmemory", "BYTES")
        yield NO_MEMORY_LIMIT.found(subject, "maxmemory is 0.", command)
    hard = _normal_limit(settings.get("client-output-buffer-limit", ""))
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


def _normal_limit(text: str) -> int:
    """Return the hard limit of ordinary clients, in bytes: "normal 0 0 0 slave ..."."""
    words = text.split()
    place = words.index("normal") + 1 if "normal" in words else len(words)
    hard = words[place] if place < len(words) else "0"
    return int(hard) if hard.isascii() and hard.isdigit() else 0
