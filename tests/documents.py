"""The pages of README and docs: their blocks of code, links and commands.

Blocks of a page in Python run as one program, in their order, in an empty folder:

- ```` ```python title="my_recipe.py" ```` is a file of that folder instead, as is any other block
  with a title. Files with a recipe are read with `redrb settings`.
- ```` ```text ```` directly after a block of Python is its output; `...` stands for any text.
- `<!-- needs trl -->` in front of a block leaves it out where the package is not installed.
- `<!-- not run: WHY -->` in front of a block leaves it out always.
- URLs of Redis in quotes, and `REDRB_URL`, lead to a server of the test.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<note>[^\n]*?) -->\n\s*)?"
    r"```(?P<language>\w+)?(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<text>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str
    title: str
    text: str
    note: str
    directly: bool
    """Whether nothing stands between the block before and this one."""

    @property
    def is_run(self) -> bool:
        """Whether the block is a part of the page's program."""
        needed = self.note.removeprefix("needs ") if self.note.startswith("needs ") else ""
        installed = all(importlib.util.find_spec(name) for name in needed.split())
        return (
            self.language == "python"
            and not self.title
            and not self.note.startswith("not run: ")
            and installed
        )


def pages() -> list[Path]:
    """Return the pages that users read: README, and all of docs but those on redrb's own code."""
    inside = (
        page for page in sorted(DOCS.rglob("*.md")) if DOCS / "contributing" not in page.parents
    )
    return [ROOT / "README.md", *inside]


def all_pages() -> list[Path]:
    """Return every page of the repository."""
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def name_of(page: Path) -> str:
    """Return the page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Return the blocks of code of a page, in their order."""
    return list(_blocks(page.read_text()))


def _blocks(text: str) -> Iterator[Block]:
    end = -1
    for found in _BLOCK.finditer(text):
        indent = len(found["indent"])
        lines = (line[indent:] for line in found["text"].splitlines(keepends=True))
        between = text[end : found.start()] if end >= 0 else "nothing"
        yield Block(
            found["language"] or "",
            found["title"] or "",
            "".join(line or "\n" for line in lines),
            found["note"] or "",
            not between.strip(),
        )
        end = found.end()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, and those that it sets itself."""
    text = re.sub(r"^( *)```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set(re.findall(r"(?:id=\"|\{ ?#|^::: )([\w.-]+)", text, re.MULTILINE))
    for heading in re.findall(r"^#+ (.*?)(?: \{.*\})?$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        number = 0
        while (each := f"{slug}_{number}" if number else slug) in found:
            number += 1
        found.add(each)
    return found


def links(page: Path) -> list[str]:
    """Return the targets of a page's links, in text outside of blocks of code."""
    text = re.sub(r"^( *)```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]+`", "", text)
    return re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", text)
