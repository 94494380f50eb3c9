"""What the site has beyond its pages: linked files, the notebook's page, and llms.txt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")
NOTEBOOK = "notebooks/first_hour"

WEIGHTS = {
    "reference/glossary": 4,
    "tutorials/": 2,
    "how-to/": 2,
    "explanation/": 2,
    "contributing/": 0.2,
    "files/": 0.2,
}
"""Weight of pages in the search, by the begin of their path: those for users come first."""

_texts: dict[str, str] = {}
"""The Markdown of each page, by its path."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add the notebook's page, and each file outside of docs that a page links to."""
    if (DOCS / f"{NOTEBOOK}.ipynb").exists():
        text = "\n\n".join(_cells(json.loads((DOCS / f"{NOTEBOOK}.ipynb").read_text())))
        files.append(File.generated(config, f"{NOTEBOOK}.md", content=text + "\n"))
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
    """Lead links that leave docs to the site's copy of the file."""

    def copied(link: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, link[1])
        if path is None:
            return link[1]
        above = "../" * page.file.src_uri.count("/")
        return f"{above}index.md" if path == "README.md" else f"{above}files/{path}"

    for begin, weight in WEIGHTS.items():
        if page.file.src_uri.startswith(begin):
            page.meta["search"] = {"boost": weight}
    _texts[page.file.src_uri] = LINK.sub(copied, markdown)
    return _texts[page.file.src_uri]


def on_page_content(html: str, *, page: Any, **_others: Any) -> str:
    """Leave examples and outputs out of the search: they would fill its results."""
    if page.file.src_uri.startswith("reference/"):
        return html
    return re.sub(r'<div (?=class="language-(?:python|text))', "<div data-search-exclude ", html)


def on_nav(nav: Any, **_others: Any) -> Any:
    """Keep the order of the pages, for llms.txt."""
    global _nav
    _nav = nav
    return nav


def on_post_build(*, config: Any) -> None:
    """Write llms.txt, and beside each page its Markdown, to which llms.txt links."""
    site = Path(config.site_dir)
    for name, text in _texts.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    lines = [f"# {config.site_name}\n\n> {config.site_description}\n"]
    lines += _sections(_nav.items, config.site_url or "")
    (site / "llms.txt").write_text("\n".join(lines))


def _outside(page: str, target: str) -> str | None:
    """Return the path in the repository, if a link of a page leaves the folder of documents."""
    found = (DOCS / page).parent.joinpath(target).resolve()
    if found.is_relative_to(DOCS) or not found.is_relative_to(ROOT):
        return None
    return found.relative_to(ROOT).as_posix()


def _cells(notebook: dict[str, Any]) -> Iterator[str]:
    """Yield the Markdown of each cell of a notebook, and of its outputs."""
    for number, cell in enumerate(notebook["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            if number == 0:
                text += f"\n\n[Download the notebook]({NOTEBOOK.rpartition('/')[2]}.ipynb)"
            yield text
            continue
        yield f"```python\n{text}\n```"
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                picture = "".join(output["data"]["image/png"]).replace("\n", "")
                yield f"![Output of the cell above](data:image/png;base64,{picture})"
            elif output["output_type"] == "stream":
                yield f"```text\n{''.join(output['text']).rstrip()}\n```"


def _sections(items: Any, url: str, title: str = "") -> Iterator[str]:
    """Yield a line for each page of the navigation, below the heading of its section."""
    if title and any(item.is_page for item in items):
        yield f"\n## {title}\n"
    for item in items:
        if item.is_page:
            yield f"- [{item.title}]({url}{item.file.src_uri}){_first_sentence(item)}"
    for item in items:
        if item.is_section:
            yield from _sections(item.children, url, f"{title}: {item.title}".removeprefix(": "))


def _first_sentence(page: Any) -> str:
    text = re.sub(r"<!--.*?-->", "", _texts.get(page.file.src_uri, ""), flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        plain = re.sub(r"\s+", " ", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)).strip()
        if plain and not plain.startswith(("#", "```", "|", "!", ":::", "- ")):
            return f": {re.split(r'(?<=[.!?:]) ', plain)[0].rstrip(':')}"
    return ""
