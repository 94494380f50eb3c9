"""`CheckedFile`: a file of a saved task that was read to its end once, and can be restored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from redrb.errors import ConfigError
from redrb.stream.saving.checking import CheckedContents
from redrb.stream.saving.file import SaveReader
from redrb.stream.saving.records import TaskEnd, TaskHeader


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A complete and undamaged file.

    Attributes:
        ending: The numbers of its records.
        checksum: Checksum of the file, which identifies the save.
    """

    path: Path
    header: TaskHeader
    ending: TaskEnd
    checksum: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read all of a file, without keeping its groups; raises ConfigError or DecodeError."""
        with open_saved(path) as file:
            contents, reader = CheckedContents(str(path)), SaveReader(file, str(path))
            for frame in reader.frames(payloads=False):
                contents.add(frame)
        return cls(path, contents.header, contents.ending, reader.checksum)

    @property
    def needed(self) -> int:
        """Groups that some consumer group needs still."""
        return self.ending.groups - self.ending.archived

    @property
    def ever_put(self) -> int:
        """Groups that were ever put, with those that were dropped at their put."""
        counters = self.header.counters
        return sum(counters.get(name, 0) for name in ("put", "filtered", "arrived_stale"))

    @property
    def whole(self) -> dict[str, Any]:
        """The numbers by which scripts recognize that a task holds what the file holds."""
        names = [group.name for group in self.header.groups]
        members = dict(zip(names, self.ending.waiting, strict=True))
        return {"entries": self.ending.groups, "members": members}


def open_saved(path: Path) -> BinaryIO:
    """Open a file of a saved task; raises ConfigError if it cannot be read."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
