"""The blocks of docs/how-to/publish-weights.md, run one after another as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from redrb.environment import PREFIX, child_environment, search_path
from tests import warm
from tests.servers import programs

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "publish-weights.md").read_text()

BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)


def of_language(language: str) -> str:
    return "".join(block for word, block in BLOCKS if word == language)


def expected() -> list[str]:
    """Return what comments say that `print` prints."""
    found = re.findall(r"^ *print\(.*\)\s+# ([^;:\n]+)", of_language("python"), re.MULTILINE)
    return [said.strip() for said in found]


@pytest.mark.slow
@pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)
def test_the_page_runs_as_printed(real_url: str, tmp_path: Path) -> None:
    assert {word for word, _ in BLOCKS} == {"python", "sh"}
    commands = f"{Path(sys.executable).parent}:{search_path()}"
    environment = child_environment(without=PREFIX, REDRB_URL=real_url, PATH=commands)
    # other tests use the server too, so the page has a database of its own
    environment["REDRB_URL"] = real_url.removesuffix("/0") + "/7"
    printed = []
    for words in (
        [sys.executable, "-W", "error", "-c", of_language("python")],
        ["sh", "-ec", of_language("sh")],
    ):
        done = (warm if words[0] == sys.executable else subprocess).run(
            words,
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        printed.append(done.stdout)
    assert printed[0].splitlines() == expected()
    assert len(expected()) == 9
    assert [line.split()[0] for line in printed[1].splitlines()[:4]] == [
        *("WEIGHTS", "adapter", "policy", "ppo")
    ]
    assert (tmp_path / "adapter-1" / "adapter_config.json").is_file()


def test_the_page_tells_the_manifest_that_is_written() -> None:
    from redrb.weights.wire import manifest

    header = (manifest.__doc__ or "").partition("msgpack map:")[2].partition("Readers ignore")[0]
    keys = re.findall(r"^    (\w+) +\S", header, re.MULTILINE)
    page = (DOCS / "reference" / "weight-format.md").read_text()
    table = page.partition("msgpack map, format 3:")[2]
    listed = [
        key
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    ]
    assert listed == keys
