"""A maker with an inference server beside it: both end together."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from redrb.cli.processes import engine_maker, maker

SERVER = """
import socket, sys, threading
with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))) as server:
    print("serves", flush=True)
    server.accept()[0].sendall(b"it answers")
    threading.Event().wait()
"""


@pytest.fixture
def command(tmp_path: Path) -> str:
    """The command of a server that answers once."""
    (tmp_path / "server.py").write_text(SERVER)
    return shlex.join([sys.executable, str(tmp_path / "server.py"), "--flag", "a b"])


def test_a_maker_is_given_the_address_of_its_server_which_ends_with_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    servers: list[psutil.Process] = []
    before = set(psutil.Process().children())

    def run(words: list[str]) -> int:
        *flags, url = words
        assert flags == ["recipe", "--flag"]
        port = int(url.removeprefix("--engine-url=http://127.0.0.1:"))
        [supervised] = set(psutil.Process().children()) - before
        while True:  # until it serves
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                    assert connection.recv(100) == b"it answers"
                    break
            except ConnectionRefusedError:
                continue
        below = supervised.children()
        servers.extend([supervised, *below])
        assert "a b" in below[0].cmdline()
        return 7

    monkeypatch.setattr(maker, "main", run)
    assert engine_maker.main([command, "recipe", "--flag"]) == 7
    gone, _ = psutil.wait_procs(servers, timeout=10)
    assert len(gone) == 2
    assert capfd.readouterr().out == ""  # events of the maker alone


PROGRAM = (
    "import sys, threading; from redrb.cli.processes import engine_maker, maker; "
    "maker.main = lambda words: threading.Event().wait(); engine_maker.main(sys.argv[1:])"
)


def test_a_maker_whose_server_ends_ends_too() -> None:
    server = shlex.join([sys.executable, "-c", "raise SystemExit(3)"])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, server, "recipe"], capture_output=True, timeout=60
    )
    assert done.returncode == 1
    assert b"the inference server ended with status 3" in done.stderr


def test_a_server_ends_with_a_maker_that_is_killed(command: str) -> None:
    words = [sys.executable, "-c", PROGRAM, command, "recipe"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while process.stderr.readline() != "serves\n":
            assert process.poll() is None
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        gone, _ = psutil.wait_procs(below, timeout=10)
        assert len(gone) == len(below) == 2
