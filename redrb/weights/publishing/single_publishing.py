"""One version from one process: stage what readers lack, then commit it."""

from __future__ import annotations

from typing import Any

from redrb.connection import Client
from redrb.errors import StoreFull, WeightError
from redrb.keys import WeightKeys
from redrb.weights.publishing.baseline import Baseline
from redrb.weights.publishing.committer import BegunVersion, Committer
from redrb.weights.publishing.staging import (
    StagedVersion,
    StagingAttempt,
    StagingPlace,
    TokenUsedError,
)
from redrb.weights.tensors.state import State
from redrb.weights.wire.manifest import Blob, Delta, Kind, Manifest, WeightVersion, hash_of
from redrb.weights.wire.tensor_list import layout_hash

_ATTEMPTS = 3


class SinglePublishing:
    """Publishes states and adapters."""

    def __init__(
        self, client: Client, keys: WeightKeys, committer: Committer, baseline: Baseline, name: str
    ) -> None:
        self._client = client
        self._keys = keys
        self._committer = committer
        self._baseline = baseline
        self._name = name

    def publish(self, source: State, version: int | None, adapter: Any = None) -> WeightVersion:
        """Publish a version; `adapter` holds the settings of an adapter's layers.

        Raises:
            WeightError: Chunks were gone at the commit, at each attempt.
            StoreFull: Redis is at its memory limit; nothing of this version is left there.
        """
        for _ in range(_ATTEMPTS):
            begun = self._committer.begin(version)
            published = self._attempt(source, begun, adapter)
            if published is not None:
                return published
            self._baseline.forget()  # its chunks are gone: the next attempt sends all of them
        raise WeightError(
            f"weights {self._name!r}: chunks were gone at the commit: Redis evicts or lost them. "
            "Set maxmemory-policy to noeviction, and publish again."
        )

    def _attempt(self, source: State, begun: BegunVersion, adapter: Any) -> WeightVersion | None:
        """Publish once; None if chunks that the version needs are gone."""
        place = StagingPlace(begun.version, begun.token, self._committer.spread)
        attempt = StagingAttempt(self._client, self._keys, place, source)
        try:
            if adapter is not None:
                staged = attempt.stage(None, whole=True)
                manifest = _manifest(staged, kind="lora", base=begun.newest_state, adapter=adapter)
                published = self._committer.commit(begun, manifest)
            else:
                published = self._publish_state(attempt, begun, source)
        except TokenUsedError:
            self._committer.skip_tokens()
            published = None
        except BaseException as error:
            self._committer.discard(attempt)
            if isinstance(error, StoreFull):
                raise StoreFull(
                    f"Redis at {self._client.where} is at its memory limit. A full version of "
                    f"weights {self._name!r} takes {source.layout.nbytes} bytes; Redis needs room "
                    "for at least two of them and the deltas between: raise maxmemory, or lower "
                    "keep= or max_bytes=.",
                    reason="memory",
                ) from error
            raise
        if published is None:
            self._committer.discard(attempt)
        return published

    def _publish_state(
        self, attempt: StagingAttempt, begun: BegunVersion, source: State
    ) -> WeightVersion | None:
        baseline = self._baseline
        difference = baseline.difference(source, begun.newest_state)
        whole = baseline.stores_in_full(difference)
        part = attempt.stage(difference, whole=whole, anchor=baseline.anchor)
        manifest = _manifest(
            part,
            kind="full" if whole else "delta",
            base=difference.base if difference is not None else 0,
            before=baseline.checksums if difference is not None else (),
        )
        published = self._committer.commit(begun, manifest)
        if published is not None:
            baseline.advance(manifest, source, part, difference)
        return published


def _manifest(
    staged: StagedVersion,
    *,
    kind: Kind,
    base: int = 0,
    before: tuple[int, ...] = (),
    adapter: Any = None,
) -> Manifest:
    """Return the manifest; `before` are the checksums of the version that a delta starts from."""
    layout, delta = staged.layout, None
    if staged.sizes is not None:
        blob = Blob(staged.place.token, 0, len(staged.sizes), staged.pieces)
        delta = Delta(base, hash_of(before), staged.sizes, (blob,))
    return Manifest(
        version=staged.place.version,
        kind=kind,
        names=len(layout.tensors),
        nbytes=layout.nbytes,
        chunk_bytes=layout.chunk_bytes,
        layout_id=layout_hash(layout),
        layout=None if kind == "delta" else layout,
        checksums=staged.checksums,
        sources=staged.sources,
        delta=delta,
        base=base if kind == "lora" else 0,
        spread=staged.place.spread,
        adapter=adapter,
    )
