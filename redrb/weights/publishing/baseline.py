"""`Baseline`: the last published state and the last full version, from which the next starts."""

from __future__ import annotations

import logging

from redrb.errors import WeightError
from redrb.weights.publishing.snapshot import Difference, Snapshot
from redrb.weights.publishing.staging import Anchor, StagedVersion
from redrb.weights.tensors.state import State
from redrb.weights.wire.manifest import Manifest

_log = logging.getLogger("redrb")


class Baseline:
    """The last state, to which a delta is encoded, and the last full version.

    Attributes:
        anchor: The last version that was stored in full, whose chunks need not be sent again.
        checksums: Chunk checksums of the version that a delta would start from.
    """

    def __init__(self, *, deltas: bool, anchor_every: int) -> None:
        self._deltas = deltas
        self._anchor_every = anchor_every
        self._since_anchor = 0
        self._snapshot: Snapshot | None = None
        self.anchor: Anchor | None = None
        self.checksums: tuple[int, ...] = ()

    def stores_in_full(self, difference: Difference | None) -> bool:
        """Return whether the next version is stored in full; `difference` leads to it.

        At least every `anchor_every` versions one is, so that readers that join need few deltas.
        """
        return difference is None or self._since_anchor + 1 >= self._anchor_every

    def difference(self, source: State, newest: int) -> Difference | None:
        """Return the difference from version `newest`; None if it is not known, or too large."""
        snapshot = self._snapshot
        if snapshot is None or snapshot.version != newest or snapshot.layout != source.layout:
            return None
        return snapshot.difference(source)

    def advance(
        self,
        manifest: Manifest,
        source: State,
        staged: StagedVersion,
        difference: Difference | None,
    ) -> None:
        """Make a committed version the baseline.

        Args:
            manifest: The version.
            source: Its state.
            staged: As it was staged.
            difference: The difference from the version before, if there is one.
        """
        whole = manifest.kind == "full"
        self.checksums = manifest.checksums
        self._since_anchor = 0 if whole else self._since_anchor + 1
        if whole:
            self.anchor = Anchor(manifest, staged)
        if not self._deltas:
            return
        before, self._snapshot = self._snapshot, None  # None while its memory holds a mixture
        try:
            if difference is not None and before is not None:
                self._snapshot = before.advance(manifest.version, difference)
            else:
                self._snapshot = Snapshot.of(manifest.version, source, staged.checksums, before)
        except (WeightError, MemoryError) as error:  # the version is published all the same
            _log.warning(
                "weights: no copy of version %d is kept, so the next version is sent in full: %s",
                manifest.version,
                error,
            )

    def forget(self) -> None:
        """Forget the baseline: the next version is sent in full, with all its chunks."""
        self._snapshot = self.anchor = None
