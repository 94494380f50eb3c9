"""Numbers, things and verbs agree in all messages, also where there is one thing only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import redrb

SOURCE = Path(redrb.__file__).parent
VERB = re.compile(r" (?:(?:more|of its|[a-z]+s) )?(?:are|were|wait|have|do|come|need)\b")
NO_NUMBER = re.compile(
    r"join|^counted|^(?:missing|unknown|options|recipe)\b|keys\[|^[A-Z_]+$|"
    r"(?:name|where|key|node|task|path)s?$"
)
OF_MANY = {
    ("codec/metadata.py", "len(each)"),
    ("compat/torchrl/storage.py", "len(items)"),
    ("watch/doctor/servers.py", "most"),
    ("watch/groups/browser.py", "seen"),
    ("watch/groups/samples.py", "total"),
    ("weights/reading/shared_copy.py", "free.f_bavail * free.f_frsize"),
    ("algorithms/reward.py", "len(alike)"),
    ("cli/ls.py", "state.tasks_total"),
    ("stream/put/refusals.py", "count"),
    ("watch/groups/browser.py", "walk.total"),
    ("watch/groups/samples.py", "self.count"),
    ("watch/state/findings/workers.py", "worker.filtered"),
}
"""Numbers that are more than one where the sentence is said."""


def sentences(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each value in a file's texts that a verb follows, and the words after it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            for value, text in zip(node.values, node.values[1:], strict=False):
                if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                    written = ast.unparse(value.value)
                    if VERB.match(text.value) and not NO_NUMBER.search(written):
                        yield written, text.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (("%d", text) for text in re.findall(rf"%d({VERB.pattern})", node.value))


def test_a_verb_after_a_number_agrees_with_it() -> None:
    found = [
        f"{path}: {number}{text[:40]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, text in sentences(path)
        if (str(path.relative_to(SOURCE)), number) not in OF_MANY
    ]
    assert found == []
