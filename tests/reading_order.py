"""The page that lists the files of the store in the order in which an engineer reads them.

`python -m tests.reading_order` writes its numbers anew: the lines of each file, their sums, and the
files that a put, and a take with its acknowledgement, pass. Names and words are written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import torch

import redrb
from redrb.lua import scripts
from redrb.lua.calls import Call
from tests.documents import DOCS, ROOT

PAGE = DOCS / "contributing" / "reading-order.md"
CODE = ROOT / "redrb"

MOST_LINES = 16_000
"""Lines of all sittings, at most."""

MOST_LINES_FIRST = 6_000
"""Lines of the first three sittings, at most."""

_ROW = re.compile(r"^\| `([\w/.]+)` \| [\d,]+ \|", re.MULTILINE)
_TITLE = re.compile(r"\A(## \d\. [^:\n]+): [\d,]+ lines$", re.MULTILINE)
_SUMS = re.compile(r"[\d,]+ lines in all, [\d,]+ of them in the first three sittings")
_PASSED = re.compile(r"^\| (a [\w ]+) \|.*\|$", re.MULTILINE)


def sittings(text: str) -> list[list[str]]:
    """Return the files of each sitting of the page."""
    found = map(_ROW.findall, re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:])
    return [files for files in found if files]


def lines_of(name: str) -> int:
    """Return the lines of a file of the package."""
    return len((CODE / name).read_text("utf-8").splitlines())


def rewritten(text: str) -> str:
    """Return the text of the page with the numbers of the code as it is."""
    sums = [sum(map(lines_of, files)) for files in sittings(text)]
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    for place, lines in enumerate(sums, start=1):
        parts[place] = _TITLE.sub(rf"\1: {lines:,} lines", parts[place])
    counted = f"{sum(sums):,} lines in all, {sum(sums[:3]):,} of them in the first three sittings"
    text = _SUMS.sub(counted, "".join(parts))
    text = _ROW.sub(lambda row: f"| `{row[1]}` | {lines_of(row[1]):,} |", text)
    return _PASSED.sub(lambda row: f"| {row[1]} | {_described(*passed()[row[1]])} |", text)


def _described(files: list[str], called: list[str]) -> str:
    included = {
        name: len({source.partition(":")[0] for source in scripts.load(name).sources}) - 1
        for name in called
    }
    names = ", ".join(f"`{name.removesuffix('.py')}`" for name in sorted(files))
    lua = ", ".join(f"`{name}` and {others} includes" for name, others in included.items())
    return f"{len(files)} | {names} | {lua}"


@cache
def passed() -> dict[str, tuple[list[str], list[str]]]:
    """Return the files in Python whose functions run in a call, and the scripts that it runs.

    The stream was used before; what other threads do does not count.
    """
    samples = [
        redrb.BufferItem(
            sequences=torch.arange(8),
            action_log_probs=torch.zeros(4),
            reward=torch.tensor(float(number)),
        )
        for number in range(4)
    ]
    with (
        redrb.connect("embedded://") as client,
        redrb.ExperienceStream(client, "math") as stream,
    ):

        def put() -> None:
            stream.put(samples)

        def take() -> None:
            stream.take(1, timeout=60).ack()

        put()
        take()
        return {"a put": _trace(put), "a take with its acknowledgement": _trace(take)}


def _trace(call: Callable[[], None]) -> tuple[list[str], list[str]]:
    files: dict[str, None] = {}
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            files[frame.f_code.co_filename] = None
            if frame.f_code is Call.add_to.__code__:
                called[frame.f_locals["self"].script] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    inside = [name.removeprefix(f"{CODE}/") for name in files if name.startswith(f"{CODE}/")]
    return inside, list(called)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
