"""The Redis of a run: that of a URL, or one that is started here and started again if it dies."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

from redrb.cli.run.worker_process import Death, OnEnd
from redrb.connection.embedded import SOCKET, EmbeddedServer, socket_in
from redrb.errors import ConfigError
from redrb.options import has_password, variable_of
from redrb.watch.state.findings.wording import command_line

EMBEDDED = "embedded://"

PROBE_S = 2.0
"""Seconds after which a socket that neither accepts nor refuses counts as used by a server."""


class RunServer:
    """The Redis of a run: one that other people run, or an embedded one.

    Without a directory an embedded server has no data to start it again with.

    Attributes:
        lock: Descriptor of a locked file, whose lock a server that is started holds until it has
            ended; None: it holds none.
    """

    def __init__(self, *, url: str = "", directory: str = "") -> None:
        self.url = url
        self.own = not url
        self.restarts = bool(directory)
        self.lock: int | None = None
        self._directory = directory
        self._server: EmbeddedServer | None = None

    def start(self, on_end: OnEnd) -> None:
        """Start it, or start it again; `on_end` is called in a thread if it ends before `close`.

        Raises:
            ConfigError: There is no server to start, or the directory cannot be used.
            StoreUnavailable: The server did not start.
        """
        if not self.own:
            return
        self.close()
        server = self._server = EmbeddedServer(self._directory, lock=self.lock)
        self.url = f"unix://{server.socket}"
        threading.Thread(target=self._wait, args=(server, on_end), daemon=True).start()

    def close(self) -> None:
        """End it, unless it is other people's; its data is on disk then."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _wait(self, server: EmbeddedServer, on_end: OnEnd) -> None:
        started = time.monotonic()
        status, log = server.wait()
        if self._server is server:
            on_end(Death(status, time.monotonic() - started, log, explains=False))


def server_for(url: str, directory: Path | None, *, min_replicas: int = 0) -> RunServer:
    """Return the server of a URL; "" is one of this run.

    Args:
        url: URL of Redis; with `embedded:///directory` the data of the run's server is there. The
            URL of the socket in `directory`, which users set to watch the run, counts as "" while
            no server listens there.
        directory: For the data of the run's server; None: it keeps none.

    Raises:
        ConfigError: Processes cannot share a server of this URL, or the path of `directory` is too
            long for its socket.
    """
    if directory and url == f"unix://{directory.absolute() / SOCKET}" and not _listens(directory):
        url = ""
    scheme = (url or EMBEDDED).partition("://")[0]
    if min_replicas and scheme in ("fake", "embedded"):
        raise ConfigError(f"min_replicas={min_replicas}: {scheme}:// has no replicas.")
    if scheme == "fake":
        raise ConfigError(
            f"{url} exists inside one process only, and a run has several: leave --url out, and "
            "`redrb run` starts a Redis."
        )
    if not url or url == EMBEDDED:
        if directory:
            socket_in(directory, advice="give a shorter folder with --out")
        return RunServer(directory=str(directory) if directory else "")
    if url.startswith(EMBEDDED):
        return RunServer(directory=url.removeprefix(EMBEDDED))
    return RunServer(url=url)


def _listens(directory: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(directory.absolute() / SOCKET))
        except (FileNotFoundError, ConnectionRefusedError):  # a killed server leaves its socket
            return False
    return True


def watch_advice(url: str, namespace: str) -> str:
    """Return a line with the command that watches a run; it never has a password."""
    variable, command = variable_of("url"), command_line((_program(), "top"), namespace=namespace)
    if has_password(url):
        where = f", where {variable} must be set to the URL of this run"
        return f"watch it in another terminal{where}: {command}"
    return f"watch it in another terminal: {variable}={shlex.quote(url)} {command}"


def _program() -> str:
    """Return `redrb` as a shell finds it: with its path where PATH has none, or another one."""
    own, found = Path(sys.argv[0]), shutil.which("redrb")
    if own.name != "redrb" or (found is not None and Path(found).resolve() == own.resolve()):
        return "redrb"
    return str(own.absolute())
