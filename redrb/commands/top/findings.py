"""The troubles in the picture, and the page of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from redrb.commands.top.text import BAD, GOOD, HEAD, NOTE, WARN, line, wrapped
from redrb.state.model import SEVERITIES, Finding, Severity

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
        made.append(line(" " * len(label), ("do: ", HEAD), (finding.command, GOOD)))
    return made


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
