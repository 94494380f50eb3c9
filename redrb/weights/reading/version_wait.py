"""Waits for a version to be published, blocked on the server."""

from __future__ import annotations

from redrb.connection.deadline import Deadline, here
from redrb.connection.messages import BLOCK_S, block_on_stream
from redrb.errors import WeightTimeout
from redrb.weights.reading.catalogue import Catalogue
from redrb.weights.reading.missing import MissingWeights
from redrb.weights.wire.manifest import WeightVersion


def wait_for_version(catalogue: Catalogue, version: int, *, larger: bool) -> WeightVersion:
    """Wait until another version than `version` is the newest, or, if `larger`, a larger one.

    Raises:
        WeightTimeout: No such version came in time.
        StoreUnavailable: Redis stayed away.
    """
    deadline = here()
    missing = MissingWeights(catalogue.everywhere, catalogue.keys, catalogue.name)
    look = catalogue.newer_than if larger else catalogue.other_than
    while True:
        last = deadline.over
        found = look(version)
        if found is None and not last:
            found = _block(catalogue, version)
        if found is not None:
            return found
        if not version:
            missing.log()
        if last:
            newest = catalogue.newer_than(0)
            raise WeightTimeout(
                name=catalogue.name,
                newer_than=version,
                newest=newest.version if newest else None,
                waited_s=deadline.waited_s,
            )


def wait_once(catalogue: Catalogue, version: int, seconds: float) -> WeightVersion | None:
    """Return the newest version if it is not `version`, after one wait of at most `seconds`."""
    with Deadline(seconds):
        return (
            catalogue.other_than(version)
            or _block(catalogue, version)
            or catalogue.other_than(version)
        )


def _block(catalogue: Catalogue, version: int) -> WeightVersion | None:
    """Wait for a version larger than `version`; return the newest, if any.

    The reply that ends the wait has the versions in it: readers that are woken together do not
    all ask again.
    """
    seconds = here().slice_s(BLOCK_S)
    entries = block_on_stream(catalogue.client, catalogue.keys.versions, f"{version}-0", seconds)
    return catalogue.described(entries[-1]) if entries else None
