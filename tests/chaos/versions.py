"""Checks what readers of weights saw: whole versions, which never go backwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Lines = Sequence[dict[str, Any]]


def check(journals: Mapping[str, Lines], *, losses: bool = False) -> tuple[list[str], int, int]:
    """Check all journals of publishers and readers.

    Args:
        journals: Lines of each worker.
        losses: Whether a version that was committed may be lost.

    Returns:
        Findings, the versions that were published, and the versions that readers loaded.
    """
    findings: list[str] = []
    published: list[tuple[float, int]] = []
    begun = dict[int, float]()
    contents = dict[int, int]()
    reads = 0
    for lines in journals.values():
        for begin, end in _calls(lines, "publish"):
            begun[begin["content"]] = begin["t"]
            if "version" in end:
                contents[end["version"]] = begin["content"]
                published.append((end["t"], end["version"]))
    published.sort()
    for worker, lines in journals.items():
        seen = 0
        for begin, end in (*_calls(lines, "poll"), *_calls(lines, "swap")):
            version = end.get("version") or end.get("swapped")
            if version is None or "content" not in end:
                continue
            reads += version > seen
            if version < seen and not losses:
                findings.append(f"{worker} went from version {seen} to {version}")
            seen = version
            if contents.setdefault(version, end["content"]) != end["content"] and not losses:
                findings.append(f"{worker} read version {version} with the values of another one")
            if begun.get(end["content"], end["t"]) >= end["t"]:
                findings.append(f"{worker} read values that nobody published: {end}")
            newest = _newest(published, begin["t"])
            if begin["op"] == "poll" and version < newest and not losses:
                findings.append(f"{worker} polled {version} after {newest} was published")
    if not losses and sorted(contents.values()) != [contents[each] for each in sorted(contents)]:
        findings.append("a later version has the values of an earlier one")
    return findings, len(published), reads


def _calls(lines: Lines, op: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ends = {line["n"]: line for line in lines if line["k"] == "end"}
    begun = [line for line in lines if line["k"] == "begin" and line["op"] == op]
    return [(line, ends.get(line["n"], {})) for line in begun]


def _newest(published: list[tuple[float, int]], before: float) -> int:
    """Return the largest version whose publish had returned at a time."""
    return max((version for at, version in published if at < before), default=0)
