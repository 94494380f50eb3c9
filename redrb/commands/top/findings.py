"""The troubles in the picture: as much of each as there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from redrb.commands.top.text import BAD, DIM, GOOD, HEAD, NOTE, WARN, cut, line, wrapped
from redrb.state.finding import SEVERITIES, Finding, Severity

STYLES: dict[Severity, str] = {"critical": BAD, "warning": WARN, "info": NOTE}
_WIDE = 100
"""Columns of a line where no terminal sets them."""


@dataclass(frozen=True)
class FindingList:
    """The findings, of which one may be selected.

    Attributes:
        findings: The findings, the worst first.
        width: Columns of the terminal; None: no limit.
        marked: Number of the selected one; -1: none.
    """

    findings: Sequence[Finding]
    width: int | None
    marked: int = -1

    @property
    def head(self) -> Text:
        """The line above them: how many of each severity."""
        counts = dict.fromkeys(SEVERITIES, 0)
        for finding in self.findings:
            counts[finding.severity] += 1
        parts = [
            f"{number} {name}{'' if number == 1 or name != 'warning' else 's'}"
            for name, number in counts.items()
            if number
        ]
        if not parts:
            return line(("  FINDINGS", HEAD), ("  none", GOOD))
        return line(
            ("  FINDINGS", HEAD), (f"  {', '.join(parts)}", STYLES[self.findings[0].severity])
        )

    @property
    def full(self) -> int:
        """Lines that all findings need."""
        return sum(len(self._lines(number, whole=True)) for number in range(len(self.findings)))

    def lines(self, room: int) -> list[Text]:
        """Return at most `room` lines.

        Findings are whole; or cut to a line and a command; or the first ones, with the selected
        one.
        """
        for whole in (True, False):
            parts = [self._lines(number, whole=whole) for number in range(len(self.findings))]
            if sum(map(len, parts)) <= room:
                return [each for part in parts for each in part]
        return self._window([self._lines(n, whole=False) for n in range(len(self.findings))], room)

    def _window(self, parts: list[list[Text]], room: int) -> list[Text]:
        """Return the lines from the first finding, or from a later one to show the selected one."""
        first = 0
        if room == 1:
            return parts[max(0, self.marked)][:1]
        while first < self.marked and sum(map(len, parts[first : self.marked + 1])) > room - 1:
            first += 1
        shown: list[Text] = []
        last = first
        while last < len(parts) and len(shown) + len(parts[last]) <= room - 1:
            shown += parts[last]
            last += 1
        if last == first:
            shown, last = parts[first][: room - 1], first + 1
        hidden = len(parts) - (last - first)
        more = line((f"    and {hidden} more (Tab, arrows)", DIM))
        return [*shown, more][:room] if hidden else shown

    def _lines(self, number: int, *, whole: bool) -> list[Text]:
        finding = self.findings[number]
        mark = "> " if number == self.marked else "  "
        style = STYLES[finding.severity]
        label = f"{finding.severity:8} "
        words = f"{finding.subject}: {finding.summary}"
        width = (self.width or _WIDE) - len(mark) - len(label)
        rows = wrapped(words, max(10, width))
        if not whole and len(rows) > 1:
            rows = [cut(line(words), max(10, width)).plain]
        made = [line(mark, (label, style), rows[0])]
        made += [line(" " * (len(mark) + len(label)), row) for row in rows[1:]]
        if finding.command:
            made.append(
                line(" " * (len(mark) + len(label)), ("do: ", HEAD), (finding.command, GOOD))
            )
        if number == self.marked:
            made[0].stylize("reverse", 0, len(mark) + len(finding.severity))
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
