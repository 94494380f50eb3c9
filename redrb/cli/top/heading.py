"""The first lines of the picture: where the figures are from, how old they are, the servers."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import repeat

from rich.text import Text

from redrb.cli.output import age, size
from redrb.cli.top.text import BAD, DIM, GOOD, HEAD, NOTE, WARN, amount, line, time_of, wrapped
from redrb.watch.state.model import SEVERITIES, Finding, ServerState, Severity
from redrb.watch.state.observer import View
from redrb.words import agreeing, counted

STYLES: dict[Severity, str] = {"critical": BAD, "warning": WARN, "info": NOTE}

_WIDE = 100
"""Columns of a line where no terminal sets them."""


def findings_head(findings: Sequence[Finding]) -> Text:
    """Return the line above findings: how many of each severity."""
    counts = Counter(finding.severity for finding in findings)
    parts = [
        f"{counts[name]} {name}{'' if counts[name] == 1 or name != 'warning' else 's'}"
        for name in SEVERITIES
        if counts[name]
    ]
    if not parts:
        return line(("  FINDINGS", HEAD), ("  none", GOOD))
    return line(("  FINDINGS", HEAD), (f"  {', '.join(parts)}", STYLES[findings[0].severity]))


def finding_lines(finding: Finding, width: int | None) -> list[Text]:
    """Return the lines of a finding: whom it is about, what was seen, and what to do."""
    label = f"  {finding.severity:8} "
    words = f"{finding.subject}: {finding.summary}"
    first, *rest = wrapped(words, max(10, (width or _WIDE) - len(label)))
    made = [line((label, STYLES[finding.severity]), first)]
    made += [line(" " * len(label), row) for row in rest]
    if finding.command:
        rows = command_lines(finding.command, (width or _WIDE) - len(label) - len("do: "))
        for name, row in zip(("do: ", *repeat("    ", len(rows) - 1)), rows, strict=True):
            made.append(line(" " * len(label), (name, HEAD), (row, GOOD)))
    return made


def command_lines(command: str, width: int) -> list[str]:
    """Return a command in lines that a shell takes for one; in one line if a word is too long."""
    words = [shlex.quote(word) for word in shlex.split(command)]
    lines = words[:1]
    for at, word in enumerate(words[1:], 2):
        more = " \\" if at < len(words) else ""
        if len(f"{lines[-1]} {word}{more}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    lines[:-1] = [f"{row} \\" for row in lines[:-1]]
    return lines if max(map(len, lines)) <= width else [command]


def finding_page(finding: Finding | None, width: int | None) -> list[Text]:
    """Return the lines of the page of one finding."""
    if finding is None:
        return [line(("This trouble is over.", GOOD))]
    facts = {
        "severity": finding.severity,
        "check": finding.code,
        "about": finding.subject,
        "seen": finding.summary,
        "cause": finding.cause,
        "do": finding.command or "nothing",
        "repair": "redrb doctor --repair does it" if finding.repairs else "by you",
    }
    lines = []
    for name, words in facts.items():
        style = STYLES[finding.severity] if name == "severity" else GOOD if name == "do" else ""
        rows = wrapped(words, max(10, (width or _WIDE) - 12)) if name != "do" else [words]
        for number, row in enumerate(rows):
            lines.append(line((f"  {'' if number else name:10}", HEAD), (row, style)))
    return lines


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
    if width is None:
        return line(left, "  ", right)
    room = max(0, width - right.cell_len - 2)
    if left.cell_len > room:
        left.truncate(room, overflow="ellipsis")
    left.append(" " * (width - left.cell_len - right.cell_len))
    return line(left, right)


def _server(server: ServerState, width: int | None, *, lone: bool) -> Text:
    """Return the figures of a server; the last ones are left out if the line is too long."""
    name, waiting = f"{server.kind} {server.version}", server.blocked_clients
    parts = [
        line((name if lone else f"{server.address} {name}", HEAD)),
        _memory(server.used_memory, server.maxmemory),
        line(f"{counted(server.clients, 'client')}, {waiting:,} {agreeing(waiting, 'wait')}"),
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
        parts.append(line(counted(server.replicas, "replica")))
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
