"""A state in a file, such as the next step of a job and the groups it has trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Checkpoint:
    """A state in a file, replaced at once; it outlives the process."""

    def __init__(self, path: Path, first: Any = 0) -> None:
        self._path, self._first = path, first

    def load(self) -> Any:
        return json.loads(self._path.read_text()) if self._path.exists() else self._first

    def store(self, state: Any) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(self._path)
