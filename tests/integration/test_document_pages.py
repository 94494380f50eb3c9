"""The examples and commands of README and of all pages of docs; see `tests/documents.py`."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from redrb.cli import __main__ as cli
from redrb.environment import PREFIX, child_environment
from tests import public_names, warm
from tests.documents import ROOT, Block, blocks, name_of, pages
from tests.servers import Server, programs

WITH_PROGRAMS = [page for page in pages()[1:] if any(block.is_run for block in blocks(page))]
WITH_RECIPES = [
    page for page in pages() if any("Recipe)" in b.text for b in blocks(page) if b.title)
]
LOCATION = re.compile(r"(?<=[\"'])redis://[^\"'\s]+(?=[\"'])")
MARK = "\n-- end of block {} --\n"


def write_files(page: Path, folder: Path) -> list[Path]:
    """Write the blocks with a title, below a folder."""
    written = []
    for block in blocks(page):
        if block.title and "not run" not in block.note:
            file = folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
            written.append(file)
    return written


def expected(page: Path) -> dict[int, str]:
    """Return what blocks print: number of the block -> output."""
    found, number = {}, -1
    before: Block | None = None
    for block in blocks(page):
        if block.is_run:
            number += 1
        elif block.language == "text" and block.directly and before is not None and before.is_run:
            found[number] = block.text
        before = block
    return found


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=name_of)
@pytest.mark.parametrize("own_server", list(programs())[-1:], indirect=True)
def test_the_blocks_of_a_page_run_as_one_program(
    page: Path, own_server: Callable[..., Server], tmp_path: Path
) -> None:
    write_files(page, tmp_path)
    run = [block for block in blocks(page) if block.is_run]
    parts = [
        f"{block.text}\nprint({MARK.format(number)!r}, flush=True)\n"
        for number, block in enumerate(run)
    ]
    program, variables = "".join(parts), {}
    if LOCATION.search(program) or "connect()" in program:
        variables["REDRB_URL"] = own_server().url
        program = LOCATION.sub(variables["REDRB_URL"], program)
    # other libraries warn of their own plans
    strict = [] if any(block.note.startswith("needs ") for block in run) else ["-W", "error"]
    (tmp_path / "page.py").write_text(program)
    done = warm.run(
        [sys.executable, *strict, "page.py"],
        cwd=tmp_path,
        env=child_environment(
            without=PREFIX,
            PYTHONPATH=f"{tmp_path}:{ROOT}",
            TRL_EXPERIMENTAL_SILENCE="1",
            **variables,
        ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    outputs = re.split(r"\n-- end of block \d+ --\n", done.stdout)
    for number, text in expected(page).items():
        printed = outputs[number].strip("\n") + "\n"
        same = doctest.OutputChecker().check_output(text, printed, doctest.ELLIPSIS)
        assert same, f"block {number} prints\n{printed}\nand not\n{text}"


def test_the_example_of_the_readme_prints_its_batch_and_ledger() -> None:
    (example,) = (block.text for block in blocks(ROOT / "README.md") if block.is_run)
    assert len(example.strip().splitlines()) <= 15
    done = warm.run(
        [sys.executable, "-W", "error", "-c", example],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch.Size([2, 12]) tensor([5, 3])" in done.stdout
    assert "put=1, acked=1" in done.stdout


@pytest.mark.parametrize("page", WITH_RECIPES, ids=name_of)
def test_the_recipes_of_a_page_have_settings(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in write_files(page, tmp_path):
        if file.suffix == ".py" and "Recipe)" in file.read_text():
            assert cli.main(["settings", str(file), "--json"]) == 0
            assert json.loads(capsys.readouterr().out)


COMMANDS = {
    tuple(word for word in words if not word.startswith("--")): {
        word for word in words if word.startswith("--")
    }
    for words in (line.split() for line in public_names.GOLDEN.read_text().splitlines())
    if words[0].split("-")[0] == "redrb" and "." not in words[0]
}
OF_RECIPES = {
    (program, *command)
    for program, *command in COMMANDS
    if "--settings" in COMMANDS[(program, *command)]
}


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_the_commands_of_a_page_exist_with_their_flags(page: Path) -> None:
    wrong = []
    own = set(re.findall(r"^ {4}(\w+)(?:: [^=\n]+)? = ", page.read_text(), re.MULTILINE))
    for block in blocks(page):
        if block.language not in ("sh", "bash", "console"):
            continue
        text = re.sub(r"\\\n\s*", " ", block.text)
        for line in text.splitlines():
            wrong += _wrong_words(line.removeprefix("$ "), own)
    assert wrong == []


def _wrong_words(line: str, own: set[str]) -> list[str]:
    """Return flags and commands of a line that redrb does not have; `own`: settings of recipes."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quote that the next line ends
        words = line.split()
    wrong, command = [], ()
    flags: set[str] = set()
    for number, word in enumerate(words):
        if (word,) in COMMANDS or word in ("redrb", "redrb-maker", "redrb-stage"):
            command = (word,)
            for more in words[number + 1 : number + 3]:
                if (*command, more) in COMMANDS:
                    command = (*command, more)
            following = words[number + 1] if number + 1 < len(words) else "--help"
            if command == ("redrb",) and re.fullmatch(r"[a-z]+", following):
                wrong.append(f"{word} {following}")
            flags = COMMANDS.get(command, set()) | {"--help", "--version"}
        elif set(word) <= set("();<>|&"):
            command = ()
        elif command and re.match(r"--[a-z]", word):
            flag = word.partition("=")[0]
            named = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
            known = flag in flags or flag.replace("--no-", "--") in flags
            if not known and not (command in OF_RECIPES and named in own):
                wrong.append(f"{' '.join(command)} {flag}")
    return wrong
