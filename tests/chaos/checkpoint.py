"""A number in a file, such as the next step of a rank: it outlives the process."""

from __future__ import annotations

import json
from pathlib import Path


class Checkpoint:
    """A number in a file, replaced at once; 0 at first."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> int:
        return int(json.loads(self._path.read_text())) if self._path.exists() else 0

    def store(self, number: int) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(number))
        new.replace(self._path)
