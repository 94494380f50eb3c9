"""The site has every page, and links of documents lead somewhere; `make docs` looks again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.documents import DOCS, ROOT, all_pages, anchors, blocks, links, name_of


class _Config(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of the generator."""


_Config.add_multi_constructor("tag:", lambda *_: None)
CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), _Config)
MADE_AT_BUILD = {"notebooks/first_hour.md"}


def listed(items: list[Any]) -> Iterator[str]:
    """Yield the pages of the navigation."""
    for item in items:
        target = next(iter(item.values())) if isinstance(item, dict) else item
        if isinstance(target, list):
            yield from listed(target)
        else:
            yield target


def test_the_navigation_has_each_page_once():
    pages = list(listed(CONFIG["nav"]))
    apart = CONFIG["not_in_nav"].split()
    written = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} | MADE_AT_BUILD
    assert len(pages) == len(set(pages))
    assert set(pages) - written == set()
    assert {page for page in written - set(pages) if not _matches(page, apart)} == set()


def _matches(page: str, patterns: list[str]) -> bool:
    return any(fnmatch(page, pattern) for pattern in patterns)


@pytest.mark.parametrize("page", all_pages(), ids=name_of)
def test_links_lead_to_files_and_headings(page: Path):
    wrong = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if target.is_relative_to(DOCS) and str(target.relative_to(DOCS)) in MADE_AT_BUILD:
            continue
        exists = target.exists()
        if not exists or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_code_and_messages_name_pages_that_exist():
    """Such as `docs/how-to/several-nodes.md` in a docstring."""
    missing = []
    folders = ("redrb", "tests", "examples", "benchmarks", "workers", ".github")
    files = [file for name in folders for file in (ROOT / name).rglob("*") if file.is_file()]
    for file in (*files, *filter(Path.is_file, ROOT.glob("*"))):
        if file.suffix in (".so", ".png", ".pyc", ".bin") or "__snapshots__" in file.parts:
            continue
        text = file.read_text(errors="replace")
        for name in set(re.findall(r"\bdocs/[\w./-]+\.(?:md|ipynb)\b", text)):
            if not (ROOT / name).exists():
                missing.append(f"{name_of(file)}: {name}")
    assert missing == []


def test_the_readme_is_short_and_leads_with_two_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    first = next(block for block in blocks(ROOT / "README.md") if block.language == "sh")
    commands = [line.split("#")[0].strip() for line in first.text.strip().splitlines()]
    assert commands == ["make demo", "make test"]


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("Two trainers", "how-to/plain-processes"),
        ("What is lost", "explanation/exactly-once"),
        ("LoRA", "how-to/publish-weights"),
        ("LoRA", "how-to/real-model"),
        ("To go on with a job, run the same command again", "reference/commands/resume"),
    ],
)
def test_what_users_search_for_stands_in_headings_and_first_lines(word: str, page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    first = text.partition("```")[0]
    assert any(word in line for line in [*re.findall("^#.*", text, re.MULTILINE), first])
