"""What the site has beyond its pages: files that they link to, the notebook's page, llms.txt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add each file of the repository that a page links to, below `files/`."""
    for page in files.documentation_pages():
        for target in LINK.findall(page.content_string):
            path = _outside(page.src_uri, target)
            if path in (None, "README.md") or f"files/{path}" in files.src_uris:
                continue
            if (ROOT / path).is_file():
                added = File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path))
                files.append(added)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_others: Any) -> str:
    """Lead links that leave `docs/` to the site's copy of the file."""

    def copied(link: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, link[1])
        if path is None:
            return link[1]
        above = "../" * page.file.src_uri.count("/")
        return f"{above}index.md" if path == "README.md" else f"{above}files/{path}"

    return LINK.sub(copied, markdown)


def _outside(page: str, target: str) -> str | None:
    """Return the path in the repository, if a link of a page leaves the folder of documents."""
    found = (ROOT / "docs" / page).parent.joinpath(target).resolve()
    if found.is_relative_to(ROOT / "docs") or not found.is_relative_to(ROOT):
        return None
    return found.relative_to(ROOT).as_posix()
