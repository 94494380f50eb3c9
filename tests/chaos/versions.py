"""Checks what readers of weights saw: whole versions, which never go backwards.

A publish does not wait for replicas. A failover may take its version back: then readers go back to
the one before, and another version gets its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.failovers import Failover, Span, lost

Lines = Sequence[dict[str, Any]]


def check(
    journals: Mapping[str, Lines],
    failovers: Sequence[Failover] = (),
    demoted: Sequence[Span] = (),
) -> tuple[list[str], int, int]:
    """Check all journals of publishers and readers.

    Args:
        journals: Lines of each worker.
        failovers: Promotions of a replica after its primary was killed.
        demoted: Times at which readers may have asked a former primary, which is a little behind.

    Returns:
        Findings, the versions that were published, and the versions that readers loaded.
    """
    published = _Published(failovers)
    for lines in journals.values():
        for begin, end in _calls(lines, "publish"):
            published.add(begin, end)
    findings: list[str] = []
    reads = 0
    for worker, lines in journals.items():
        seen, seen_content = 0, 0
        for begin, end in (*_calls(lines, "poll"), *_calls(lines, "swap")):
            version = end.get("version") or end.get("swapped")
            if version is None or "content" not in end:
                continue
            reads += version > seen
            behind = any(span.began <= end["t"] and begin["t"] <= span.ended for span in demoted)
            if version < seen and not (behind or published.may_be_lost(seen_content)):
                findings.append(f"{worker} went from version {seen} to {version}")
            seen, seen_content = version, end["content"]
            if not published.has(version, seen_content):
                findings.append(f"{worker} read version {version} with the values of another one")
            if published.begun.get(seen_content, end["t"]) >= end["t"]:
                findings.append(f"{worker} read values that nobody published: {end}")
            newest = published.newest(begin["t"])
            if begin["op"] == "poll" and version < newest and not behind:
                findings.append(f"{worker} polled {version} after {newest} was published")
    if not published.in_order():
        findings.append("a later version has the values of an earlier one")
    return findings, len(published.returned), reads


@dataclass
class _Published:
    """All versions that were published, by their contents, of which each has another one.

    Attributes:
        failovers: Promotions of a replica after its primary was killed.
        begun: Content -> when its publish began.
        ended: Content -> when its publish had ended, or should have.
        returned: Content -> when its publish had returned, and its version.
    """

    failovers: Sequence[Failover]
    begun: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    returned: dict[int, tuple[float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._contents: dict[int, int] = {}

    def add(self, begin: dict[str, Any], end: dict[str, Any]) -> None:
        content = begin["content"]
        self.begun[content] = begin["t"]
        self.ended[content] = end["t"] if "version" in end else begin["t"] + begin["limit"]
        if "version" in end:
            self.returned[content] = end["t"], end["version"]
            if not self.may_be_lost(content):
                self._contents[end["version"]] = content

    def may_be_lost(self, content: int) -> bool:
        """Return whether a failover may have taken a version back."""
        if content not in self.begun:
            return False
        return lost(Span(self.begun[content], self.ended[content]), self.failovers)

    def has(self, version: int, content: int) -> bool:
        """Return whether a version may have this content; the first one that it had, if unknown."""
        if self.may_be_lost(content):
            return True
        return self._contents.setdefault(version, content) == content

    def newest(self, before: float) -> int:
        """Return the largest version whose publish had returned at a time, and that is not lost."""
        return max(
            (
                version
                for content, (at, version) in self.returned.items()
                if at < before and not self.may_be_lost(content)
            ),
            default=0,
        )

    def in_order(self) -> bool:
        """Return whether later versions have later contents."""
        contents = [content for _, content in sorted(self._contents.items())]
        return contents == sorted(contents)


def _calls(lines: Lines, op: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ends = {line["n"]: line for line in lines if line["k"] == "end"}
    begun = [line for line in lines if line["k"] == "begin" and line["op"] == op]
    return [(line, ends.get(line["n"], {})) for line in begun]
