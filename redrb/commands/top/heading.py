"""The first lines of the picture: where the figures are from, how old they are, the servers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from redrb.commands.output import age, size
from redrb.commands.top.text import BAD, DIM, GOOD, HEAD, WARN, amount, line, time_of
from redrb.state.model import ServerState
from redrb.state.observer import View

_OLD_S = 3.0
"""Age of figures from which on they are shown as old."""

_SERVERS = 4
"""Most servers with a line of their own."""


def heading(view: View, where: str, width: int | None) -> list[Text]:
    """Return the lines: title with the age of the figures, a failed look, the servers."""
    state = view.state
    figures = line(("no figures yet", WARN))
    if state is not None:
        old = bool(view.error) or view.age_s >= _OLD_S
        figures = line((f"figures are {time_of(view.age_s)} old", BAD if old else GOOD))
    lines = [_ends(line(("redrb top  ", HEAD), where), figures, width)]
    if view.error:
        lines.append(line((f"Redis cannot be read: {view.error}", BAD)))
    servers = state.servers if state is not None else ()
    if len(servers) > _SERVERS:
        return [*lines, _servers(servers)]
    lone = len(servers) == 1
    return [*lines, *(_server(server, width, lone=lone) for server in servers)]


def _ends(left: Text, right: Text, width: int | None) -> Text:
    """Return a line with text at both ends; the right one is not cut."""
    if width is None:
        return line(left, "  ", right)
    room = max(0, width - right.cell_len - 2)
    if left.cell_len > room:
        left.truncate(room, overflow="ellipsis")
    left.append(" " * (width - left.cell_len - right.cell_len))
    return line(left, right)


def _server(server: ServerState, width: int | None, *, lone: bool) -> Text:
    """Return the figures of a server; the last ones are left out if the line is too long."""
    name = f"{server.kind} {server.version}"
    parts = [
        line((name if lone else f"{server.address} {name}", HEAD)),
        _memory(server.used_memory, server.maxmemory),
        line(f"{server.clients:,} clients, {server.blocked_clients:,} wait"),
        line(f"{server.latency_s * 1000:.1f} ms"),
        line(f"{amount(server.commands_per_s)} commands/s"),
    ]
    if server.cpu_share is not None:
        busy = server.cpu_share >= 0.8
        parts.insert(2, line((f"cpu {server.cpu_share:.0%}", WARN if busy else "")))
    if not server.last_save_ok:
        parts.insert(1, line(("last save failed", BAD)))
    if server.mode != "standalone":
        parts.append(line(server.mode))
    if server.replicas:
        parts.append(line(f"{server.replicas:,} replicas"))
    parts.append(line(f"up {age(server.uptime_s)}"))
    parts.append(line("append-only file" if server.aof else "no append-only file"))
    made = line()
    for part in parts:
        gap = line(("  ·  ", DIM)) if made.plain else line()
        if width is not None and made.cell_len + gap.cell_len + part.cell_len > width:
            break
        made = line(made, gap, part)
    return made


def _servers(servers: Sequence[ServerState]) -> Text:
    """Return one line for many servers: sums, and the fullest one."""
    fullest = max(servers, key=lambda each: each.used_memory / (each.maxmemory or 1 << 60))
    return line(
        (f"{len(servers)} servers", HEAD),
        f"  {size(sum(each.used_memory for each in servers))}",
        f"  {amount(sum(each.commands_per_s for each in servers))} commands/s",
        f"  the fullest, {fullest.address}: ",
        _memory(fullest.used_memory, fullest.maxmemory),
    )


def _memory(used: int, limit: int) -> Text:
    if not limit:
        return line(f"{size(used)}, no limit")
    share = used / limit
    style = BAD if share >= 0.95 else WARN if share >= 0.8 else ""
    return line((f"{size(used)} of {size(limit)} ({share:.0%})", style))
