"""A private server on a loopback port for a benchmark."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from redrb.connection.server_program import find_server
from redrb.environment import child_environment


@contextmanager
def private_server(
    program: str | None = None, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """Start a server without persistence; yields its URL and its version.

    Args:
        program: Path of the server; default: the server on PATH, else the bundled one.
        variables: Further environment variables.
    """
    program = program or find_server().path
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="redrb-bench-") as directory:
        process = subprocess.Popen(
            [
                *(program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""),
                *("--dir", directory, "--daemonize", "no", "--logfile", ""),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(**(variables or {})),
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if "ready to accept connections" in line.lower():
                    break
            version = subprocess.run(
                [program, "--version"], capture_output=True, text=True, check=True
            )
            yield f"redis://127.0.0.1:{port}/0", version.stdout.split(" sha")[0].strip()
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
