"""What a publisher remembers: what its next version may stand on."""

from __future__ import annotations

import logging

from redrb.errors import WeightError
from redrb.weights.publishing.snapshot import Difference, Snapshot
from redrb.weights.publishing.staging import Anchor, StagedPart
from redrb.weights.tensors.state import State
from redrb.weights.wire.manifest import Manifest

_log = logging.getLogger("redrb")


class Baseline:
    """What a publisher's next version may stand on.

    Attributes:
        anchor: The last version that was stored whole.
        checksums: Of the version that a difference would start from, of all ranks.
    """

    def __init__(self, *, deltas: bool, anchor_every: int) -> None:
        self._deltas = deltas
        self._anchor_every = anchor_every
        self._since_anchor = 0
        self._snapshot: Snapshot | None = None
        self.anchor: Anchor | None = None
        self.checksums: tuple[int, ...] = ()

    @property
    def anchor_due(self) -> bool:
        """Whether the next version is to be stored whole."""
        return self._since_anchor + 1 >= self._anchor_every

    @property
    def version(self) -> int:
        """The version that a difference would start from, 0 for none."""
        return 0 if self._snapshot is None else self._snapshot.version

    def difference(self, source: State, newest: int) -> Difference | None:
        """Return the way from the newest version, if it is known and short."""
        snapshot = self._snapshot
        if snapshot is None or snapshot.version != newest or snapshot.layout != source.layout:
            return None
        return snapshot.difference(source)

    def advance(
        self, manifest: Manifest, source: State, part: StagedPart, difference: Difference | None
    ) -> None:
        """Note that a version was committed.

        Args:
            manifest: The version, of all ranks.
            source: What this publisher has of it.
            part: What it has staged.
            difference: What led there, if that is known.
        """
        whole = manifest.kind == "full"
        self.checksums = manifest.checksums
        self._since_anchor = 0 if whole else self._since_anchor + 1
        if whole:
            self.anchor = Anchor(manifest, part)
        if not self._deltas:
            return
        before, self._snapshot = self._snapshot, None  # while it is neither the old nor the new
        try:
            if difference is not None and before is not None:
                self._snapshot = before.advance(manifest.version, difference)
            else:
                self._snapshot = Snapshot.of(manifest.version, source, part.checksums, before)
        except (WeightError, MemoryError) as error:  # the version is out, whatever comes
            _log.warning("version %d cannot be remembered: %s", manifest.version, error)

    def forget(self) -> None:
        """Stand on nothing."""
        self._snapshot = self.anchor = None
