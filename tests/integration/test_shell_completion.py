"""Completion in zsh and fish, in the shells themselves; bash: tests/unit/test_command_line.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from redrb.cli import completion
from tests.terminals import Terminal
from tests.tools import need

CASES = [
    ("redrb weights sh", "show"),
    ("redrb-maker --prompts-p", "--prompts-per-step"),
    ("redrb-stage --fr", "--from"),
]
"""Words, and what the shell offers for the last one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts."""
    folder = tmp_path_factory.mktemp("completion")
    for name in completion.PROGRAMS:
        for shell, file in (("zsh", f"_{name}"), ("fish", f"{name}.fish")):
            with (folder / file).open("w") as script:
                command = [sys.executable, "-m", "redrb.cli", "completion", shell, name]
                subprocess.run(command, stdout=script, check=True, timeout=60)
    (folder / ".zshrc").write_text(
        f"PS1='ready '; PATH={folder}:$PATH; fpath=({folder} $fpath)\n"
        f"autoload -Uz compinit; compinit -u -d {folder}/dump\n"
    )
    return folder


def test_zsh_completes_every_program(folder: Path) -> None:
    with Terminal([need("zsh"), "-i"], ZDOTDIR=str(folder)) as terminal:
        terminal.until(lambda: "ready" in terminal.output)
        for words, offered in CASES:
            terminal.output = ""
            terminal.press(f"{words}\t\t")
            terminal.until(lambda offered=offered: offered in terminal.output)
            terminal.press("\x15")  # Ctrl-U empties the line


@pytest.mark.parametrize(("words", "offered"), CASES)
def test_fish_completes_every_program(folder: Path, words: str, offered: str) -> None:
    program = f"source {folder}/{words.split()[0]}.fish; complete -C '{words}'"
    done = subprocess.run(
        [need("fish"), "--no-config", "-c", program],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert offered in [line.split("\t")[0] for line in done.stdout.splitlines()]
