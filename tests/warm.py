"""Starts programs of Python that have torch and redrb loaded already: it saves two seconds each.

`run` and `Popen` are those of subprocess, for `[sys.executable, "-m", MODULE, ...]`, `-c TEXT` and
a file. A server, which has imported the packages, forks: the program is a process of its own, which
signals reach as any other. Tests of how a program starts use subprocess itself.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch",
    "redrb.cli.__main__",
    "redrb.connection.cluster",
    "anyio._backends._asyncio",
    "httpcore",
    "redrb.gateway.app",
    "redrb.watch.page.server",
    "redrb.recipe.trainer",
    "redrb.recipe.maker",
    "redrb.table",
    "redrb.stream",
    "redrb.weights",
)
_HEAD = struct.Struct("<II")  # bytes of a request, and its descriptors
_PID, _STATUS = struct.Struct("<i"), struct.Struct("<i")


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A program that a server forks; see `subprocess.Popen`."""

    def _execute_child(  # type: ignore[no-untyped-def] # (one of subprocess's own methods)
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
        restore_signals, gid, gids, uid, umask, start_new_session, *rest,
    ) -> None:  # fmt: skip
        words = [os.fspath(word) for word in args]
        if shell or executable or preexec_fn or words[0] != sys.executable:
            raise ValueError("a warm program is started by sys.executable, without a shell")
        asked = {
            "words": words[1:],
            "cwd": os.fspath(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "session": start_new_session,
            "passed": list(pass_fds),
        }
        own = [p2cread if p2cread >= 0 else 0, c2pwrite if c2pwrite >= 0 else 1]
        own.append(errwrite if errwrite >= 0 else 2)
        try:
            self._server = _connect()
            packed = json.dumps(asked).encode()
            descriptors = array.array("i", [*own, *pass_fds])
            self._server.sendmsg(
                [_HEAD.pack(len(packed), len(descriptors))],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)],
            )
            self._server.sendall(packed)
            self.pid = _PID.unpack(_read(self._server, _PID.size))[0]
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                self._end(os.WNOHANG)
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        self._end(wait_flags)
        return (0, 0) if self.returncode is None else (self.pid, self._status)

    def _handle_exitstatus(self, status: int, *_: Any) -> None:
        self.returncode = os.waitstatus_to_exitcode(status)

    def _end(self, flags: int) -> None:
        if self.returncode is not None:
            return
        if flags & os.WNOHANG:
            with selectors.DefaultSelector() as ready:
                ready.register(self._server, selectors.EVENT_READ)
                if not ready.select(0):
                    return
        self._status = _STATUS.unpack(_read(self._server, _STATUS.size))[0]
        self._server.close()
        self._handle_exitstatus(self._status)


def run(
    command: Any, *, timeout: float, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end; see `subprocess.run`."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


_lock = threading.Lock()
_servers: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}


def _connect() -> socket.socket:
    """Return a connection to the server of this process, which is started by the first call."""
    with _lock:
        if os.getpid() not in _servers:
            folder = tempfile.mkdtemp(prefix="warm-")
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(place := f"{folder}/socket")
            listening.listen(64)
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(listening.fileno())],
                stdin=subprocess.PIPE,  # it ends when this is closed
                pass_fds=[listening.fileno()],
                cwd=Path(__file__).parents[1],
            )
            listening.close()
            _servers[os.getpid()] = place, server
            atexit.register(_close, os.getpid())
        place, _ = _servers[os.getpid()]
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(120)  # it imports first
    connection.connect(place)
    return connection


def _close(owner: int) -> None:
    if os.getpid() == owner:
        place, server = _servers.pop(owner)
        server.communicate()
        Path(place).unlink()
        Path(place).parent.rmdir()


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise RuntimeError("the server of warm programs has ended")
        found += part
    return found


def _serve(listening: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request, and report its end; returns in the forked process."""
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the tests, too
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for each in (listening, waking, 0):
        selector.register(each, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                os._exit(0)
            elif key.fd == waking:
                os.read(waking, 4096)
                with contextlib.suppress(ChildProcessError):
                    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                        with running.pop(ended[0]) as connection, contextlib.suppress(OSError):
                            connection.sendall(_STATUS.pack(ended[1]))
            else:
                connection, _ = listening.accept()
                head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, 64)
                request = json.loads(_read(connection, _HEAD.unpack(head)[0]))
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    for one in (connection, *running.values()):
                        one.close()
                    os.close(waking)
                    os.close(woken)
                    listening.close()
                    return request, list(descriptors)
                for one in descriptors:
                    os.close(one)
                running[pid] = connection
                connection.sendall(_PID.pack(pid))


def _become(request: dict[str, Any], descriptors: list[int]) -> list[str]:
    """Make a forked process what a new one would be; returns the rest of its command line."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    targets = [0, 1, 2, *request["passed"]]
    free = max(*targets, *descriptors) + 1  # copies first: one may be the target of another
    copies = [os.dup2(each, free + place) for place, each in enumerate(descriptors)]
    for each in descriptors:
        os.close(each)
    for copy, target in zip(copies, targets, strict=True):
        os.dup2(copy, target)
        os.close(copy)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=unbuffered, line_buffering=os.isatty(1))
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr.reconfigure(line_buffering=True, write_through=unbuffered)
    words = list(request["words"])
    while words[0] in ("-W", "-X"):
        option = (words.pop(0), words.pop(0))
        if option == ("-W", "error"):
            sys.warnoptions.append("error")
            warnings.simplefilter("error")
        elif option == ("-X", "faulthandler"):
            faulthandler.enable()
        else:
            raise ValueError(f"a warm program cannot have {option}")
    path = [each for each in os.environ.get("PYTHONPATH", "").split(":") if each]
    sys.path[:] = path + [each for each in sys.path[1:] if each not in path]
    return words


def _run(words: list[str]) -> None:
    """Run a program, as Python does by its command line."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        for name in (words[1], f"{words[1]}.__main__"):
            if not hasattr(sys.modules.get(name), "__path__"):  # it is run, not imported
                sys.modules.pop(name, None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).absolute().parent))
        main = types.ModuleType("__main__")
        main.__file__ = words[0]
        sys.modules["__main__"] = main
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _run(_become(*_serve(socket.socket(fileno=int(sys.argv[1])))))
