"""`redrb top` and `--watch` on a real server, in a pseudo terminal and piped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import redrb
from redrb import ExperienceStream
from redrb.environment import PREFIX, child_environment
from tests.samples import numbered
from tests.servers import Server, programs
from tests.terminals import Terminal
from tests.tools import need

REDRB = [sys.executable, "-m", "redrb.cli"]
ONE = list(programs())[:1]
"""One server is enough: the state is read from every server in the tests of its reader."""


@pytest.fixture
def filled(real_url: str, namespace: str) -> str:
    """URL of a server with tasks "code" and "math", of which the latter has a dead letter."""
    with redrb.connect(real_url) as client:
        for task in ("code", "math"):
            with ExperienceStream(client, task, namespace=namespace) as stream:
                stream.put_many([[numbered(n)] for n in range(5)])
                if task == "math":
                    stream.take(1, timeout=0).reject("bad")
    return real_url


def piped(url: str, *words: str, status: int = 0, **environment: str) -> tuple[str, str]:
    """Run a command; return its output and its errors."""
    done = subprocess.run(
        [*REDRB, *words],
        env=child_environment(without=PREFIX, REDRB_URL=url, **environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("real_url", ONE, indirect=True)
def test_a_person_uses_it(filled: str, namespace: str) -> None:
    command = [*REDRB, "top", "math", "--namespace", namespace, "--watch", "0.2"]
    with Terminal(command, REDRB_URL=filled) as terminal:
        terminal.writes("WORKERS of math")
        terminal.writes("1 dead letter")
        assert not terminal.restored
        terminal.press("k")
        terminal.writes("WORKERS of code")
        terminal.press("\r")
        terminal.writes("TASK code")
        terminal.press("\x1b")
        terminal.writes("TASKS (2)")
        terminal.press("\x1b[<0;5;5M\x1b[<0;5;5m")  # a click on the second task
        terminal.writes("TASK math")
        terminal.press("?")
        terminal.writes("HELP")
        terminal.press("\x1b")
        terminal.writes("TASK math")
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.restored


@pytest.mark.parametrize("real_url", ONE, indirect=True)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_restores_the_terminal(
    filled: str, namespace: str, number: signal.Signals
) -> None:
    command = [*REDRB, "top", "--namespace", namespace]
    with Terminal(command, REDRB_URL=filled, NO_COLOR="1") as terminal:
        terminal.writes("TASKS (2)")
        assert not re.search(r"[\[;]3[0-8][;m]", terminal.output)  # no colour
        if number is signal.SIGINT:
            terminal.press("\x03")  # as Ctrl-C sends it
        else:
            terminal.process.send_signal(number)
        assert terminal.end() == 128 + number
        assert terminal.restored


@pytest.mark.parametrize("real_url", ONE, indirect=True)
def test_an_exception_restores_the_terminal(filled: str, namespace: str) -> None:
    program = (
        "import redrb.cli.top.app as room\n"
        "def fail(*_): raise RuntimeError('a fault')\n"
        "room.task_table = fail\n"
        "from redrb.cli.__main__ import main\n"
        f"raise SystemExit(main(['top', '--namespace', {namespace!r}]))"
    )
    with Terminal([sys.executable, "-c", program], REDRB_URL=filled) as terminal:
        assert terminal.end() == 1
        assert terminal.restored
        assert "RuntimeError: a fault" in terminal.written


@pytest.mark.parametrize("real_url", ONE, indirect=True)
def test_ctrl_z_gives_the_terminal_back_until_the_shell_continues_it(
    filled: str, namespace: str, tmp_path: Path
) -> None:
    command = f"{' '.join(REDRB)} top --namespace {namespace}"
    stopped = tmp_path / "stopped"
    script = f"set -m; {command}; stty -a > {stopped}.part; mv {stopped}.part {stopped}; fg"
    with Terminal([need("bash"), "-c", script], REDRB_URL=filled) as terminal:
        terminal.writes("TASKS (2)")
        terminal.press("\x1a")
        terminal.until(stopped.exists)
        assert " icanon" in stopped.read_text()
        assert " echo " in stopped.read_text()
        terminal.press("x")
        terminal.writes("TASKS (2)")
        assert not terminal.restored
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.restored


@pytest.mark.parametrize("own_server", ONE, indirect=True)
def test_a_stopped_redis_is_said_and_blocks_nothing(
    own_server: Callable[..., Server], namespace: str
) -> None:
    server = own_server()
    with redrb.connect(server.url) as client:
        ExperienceStream(client, "math", namespace=namespace).put(numbered(1))
    command = [*REDRB, "top", "--namespace", namespace, "--watch", "0.2"]
    with Terminal(command, REDRB_URL=server.url) as terminal:
        terminal.writes("TASKS (1)")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            terminal.writes("Redis cannot be read", timeout_s=10)
            terminal.writes("1 critical")
            terminal.press("?")
            terminal.writes("HELP", timeout_s=5)
            terminal.press("?")
            terminal.writes("TASKS (1)")  # the last figures stay
            terminal.press("x")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        terminal.writes("figures are 0.")
        terminal.press("q")
        assert terminal.end() == 0


@pytest.mark.parametrize("real_url", ONE, indirect=True)
def test_piped_it_prints_one_picture_or_json(filled: str, namespace: str) -> None:
    where = ("--namespace", namespace)
    text, _ = piped(filled, "top", *where)
    assert "\x1b" not in text
    assert "TASKS (2)" in text
    assert "do: redrb dead ls math" in text
    (line,) = piped(filled, "top", "--once", "--json", *where)[0].splitlines()
    found = json.loads(line)
    assert [task["name"] for task in found["state"]["tasks"]] == ["code", "math"]
    assert found["state"]["tasks"][0]["rates"]["put"] == 0.0  # two looks
    assert {finding["code"] for finding in found["findings"]} >= {"dead-letters"}
    picture, message = piped("redis://127.0.0.1:1", "top", status=1)
    assert message.startswith("redrb: ")
    assert "1 critical" in picture
    assert "do: redis-cli" in picture
    (line,) = piped("redis://127.0.0.1:1", "top", "--json", status=1)[0].splitlines()
    assert [each["code"] for each in json.loads(line)["findings"]] == ["connection"]
    assert "there is no task 'maths'" in piped(filled, "top", "maths", *where, status=2)[1]
    assert "is not usable" in piped(filled, "top", "no name", status=2)[1]


@pytest.mark.parametrize("real_url", ONE, indirect=True)
@pytest.mark.parametrize("words", [("top", "--json"), ("stats", "math", "--json")])
def test_watched_commands_print_line_after_line(
    filled: str, namespace: str, words: tuple[str, ...]
) -> None:
    with subprocess.Popen(
        [*REDRB, *words, "--namespace", namespace, "--watch", "0.1"],
        env=child_environment(without=PREFIX, REDRB_URL=filled),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for _ in range(3):
            assert json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


@pytest.mark.parametrize("real_url", ONE, indirect=True)
def test_a_watched_command_draws_again_on_a_terminal(filled: str, namespace: str) -> None:
    command = [*REDRB, "ls", "--namespace", namespace, "--watch", "0.1"]
    with Terminal(command, height=5, REDRB_URL=filled) as terminal:
        terminal.shows("more lines")
        assert "each 0.1 s" in terminal.screen[0]
        assert len(terminal.screen) <= 5
        terminal.resize(80, 24)
        terminal.shows("code")
        with redrb.connect(filled) as client:
            ExperienceStream(client, "art", namespace=namespace).put(numbered(1))
        terminal.shows("art")
        terminal.press("\x03")
        assert terminal.end() == 130
