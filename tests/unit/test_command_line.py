"""All commands of `redrb`: options, quick starts, and completion in a shell."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from redrb.cli import __main__ as cli
from redrb.cli import completion, settings
from redrb.cli.run import command as run
from tests.tools import need

FILES = {"redrb run": run.parser, "redrb settings": settings.parser}
WITHOUT_RESULT = {"redrb completion"}
"""Commands that print a text for another program, which no JSON replaces."""


def commands(
    parser: argparse.ArgumentParser | None = None, name: str = "redrb"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield name and parser of each command."""
    whole = parser or cli._parser()
    parts = [each for each in whole._actions if isinstance(each, argparse._SubParsersAction)]
    for part in parts:
        for word, each in part.choices.items():
            yield from commands(each, f"{name} {word}")
    if not parts:
        yield name, FILES[name]() if name in FILES else whole


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_and_json(name):
    parser = COMMANDS[name]
    for action in parser._actions:
        assert action.help, f"{name}: {action.dest} has no help"
    assert ("--json" in parser._option_string_actions) is (name not in WITHOUT_RESULT)
    assert parser.format_help()


def test_commands_that_need_no_redis_print_json(tmp_path, capsys):
    def printed(*words):
        assert cli.main([*words, "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        found: dict[str, object] = json.loads(line)
        return found

    rights = printed("acl", "--role", "observer", "--task", "math")
    assert rights["user"] == "observer"
    assert rights["command"] == f"ACL SETUSER observer on {' '.join(rights['rules'])}"
    file = tmp_path / "mine.py"
    assert printed("new", "plain", str(file)) == {"file": str(file), "kind": "plain"}


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "1e300"])
def test_times_between_looks_are_checked(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["ls", "--watch", text])
    assert "is not a number of seconds" in capsys.readouterr().err


def test_commands_start_quickly():
    """In less processor time than `import redis`: compared, a busy machine changes nothing."""
    for words in (["--help"], ["run", "--help"], ["completion", "bash"]):
        shares = [_processor_s(words) / _python_s("import redis") for _ in range(3)]
        assert min(shares) < 1, (words, shares)


def test_commands_that_look_at_redis_import_little_beside_its_client():
    """The modules of `redis` take most of their start: compared, a busy machine changes nothing."""
    top = "import redrb.cli, redrb.connection, redrb.watch.state.observer, redrb.cli.top.pages"
    shares = [_python_s(top) / _python_s("import redis, rich.console") for _ in range(2)]
    assert min(shares) < 3
    program = f"import sys; {top}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    heavy = {"torch", "numpy", "starlette", "uvicorn", "prometheus_client", "wandb", "tensorboard"}
    heavy.add("textual")  # only the live screen needs it
    assert heavy.isdisjoint(done.stdout.split())


def _processor_s(words: list[str]) -> float:
    return _python_s(f"import sys; from redrb.cli.__main__ import main; main({words!r})")


def _python_s(program: str) -> float:
    """Return the processor time of a Python that runs a program."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The files of `redrb completion bash`, in a folder."""
    folder = tmp_path_factory.mktemp("completion")
    for program in completion.PROGRAMS:
        with (folder / program).open("w") as file:
            command = [sys.executable, "-m", "redrb.cli", "completion", "bash", program]
            subprocess.run(command, stdout=file, check=True)
    return folder


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("redrb we", {"weights"}),
        ("redrb weights sh", {"show"}),
        ("redrb stats --wa", {"--watch"}),
        ("redrb new g", {"grpo"}),
        ("redrb acl --role o", {"observer"}),
        ("redrb run --learning", {"--learning-rate"}),
        ("redrb-maker --prompts-p", {"--prompts-per-step"}),
        ("redrb-stage --fr", {"--from"}),
    ],
)
def test_bash_completes(scripts, words, offered):
    program = words.split()[0]
    asked = (
        f"source {scripts / program}\n"
        f"COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))\n"
        f"$(complete -p {program} | sed 's/.*-F \\([^ ]*\\).*/\\1/') {program}\n"
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run([need("bash"), "-c", asked], capture_output=True, text=True, check=True)
    assert {word.strip() for word in done.stdout.splitlines()} == offered, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    assert "namespace" in capsys.readouterr().out
    for wrong in (["redrb-cook"], ["redrb", "redrb-stage"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["completion", shell, *wrong])
        assert ended.value.code == 2
