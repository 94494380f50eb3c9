"""Adapters (LoRA) beside a server's weights: their names, and their folders on its machine."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from redrb.train.engines.labels import weights_of
from redrb.weights.files.adapter_folder import TENSORS
from redrb.weights.host.versions import HostVersions

KEPT = 16
"""Newest adapters that a server keeps: a request that is older than all of them may fail."""

FOLDER = "adapter"
"""Name of the version in `place`."""

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  whoever reads a folder in it checks whose it is


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that a server has.

    Attributes:
        label: Of its version; the server knows it as a model of this name.
        base: Label of the weights below it.
    """

    label: str
    base: str

    def fits(self, label: str | None) -> bool:
        """Return whether a label of a server's weights is one of those below this adapter."""
        return weights_of(label) == self.base

    def named(self, label: str) -> str:
        """Return the label that a server's weights have with this adapter."""
        return f"{self.label}/{label.rpartition('/')[2]}"


def place(label: str) -> HostVersions:
    """Return where a server's machine has the adapter of a version, which `FOLDER` names."""
    return HostVersions(_SHARED_MEMORY, f"redrb-{label}", TENSORS)


def remove_unused() -> None:
    """Remove the adapters of this user that no process of this machine uses any more."""
    for path in _SHARED_MEMORY.glob(f"redrb-version-*.{FOLDER}"):
        with suppress(FileNotFoundError):  # another process was faster
            if path.lstat().st_uid == os.geteuid():
                place(path.stem.removeprefix("redrb-")).remove_unused()
