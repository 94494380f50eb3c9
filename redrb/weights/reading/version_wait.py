"""Waits for a version to be published, blocked on the server."""

from __future__ import annotations

import math
import time

from redrb.connection.messages import BLOCK_S, block_on_stream
from redrb.errors import WeightTimeout
from redrb.weights.reading.catalogue import Catalogue
from redrb.weights.reading.missing import MissingWeights
from redrb.weights.wire.manifest import WeightVersion


def wait_for_version(
    catalogue: Catalogue, version: int, timeout: float | None, *, larger: bool
) -> WeightVersion:
    """Wait until another version than `version` is the newest, or, if `larger`, a larger one.

    Raises:
        WeightTimeout: No such version came in time.
        StoreUnavailable: Redis stayed away.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    missing = MissingWeights(catalogue.everywhere, catalogue.keys, catalogue.name)
    look = catalogue.newer_than if larger else catalogue.other_than
    while True:
        left = max(0.0, deadline - time.monotonic())
        retry_s = min(left, catalogue.client.retry_s)
        found = look(version, retry_s=retry_s)
        if found is None and left:
            found = _block(catalogue, version, min(left, BLOCK_S), retry_s=retry_s)
        if found is not None:
            return found
        if not version:
            missing.log()
        if not left:
            newest = catalogue.newer_than(0, retry_s=0)
            raise WeightTimeout(
                name=catalogue.name,
                newer_than=version,
                newest=newest.version if newest else None,
                waited_s=timeout or 0.0,
            )


def wait_once(catalogue: Catalogue, version: int, seconds: float) -> WeightVersion | None:
    """Return the newest version if it is not `version`, after one wait of at most `seconds`."""
    retry_s = min(seconds, catalogue.client.retry_s)
    return (
        catalogue.other_than(version, retry_s=retry_s)
        or _block(catalogue, version, seconds, retry_s=retry_s)
        or catalogue.other_than(version, retry_s=retry_s)
    )


def _block(
    catalogue: Catalogue, version: int, seconds: float, *, retry_s: float
) -> WeightVersion | None:
    """Wait for a version larger than `version`, at most `seconds`; return the newest, if any.

    The reply that ends the wait has the versions in it: readers that are woken together do not
    all ask again.
    """
    entries = block_on_stream(
        catalogue.client, catalogue.keys.versions, f"{version}-0", seconds, retry_s=retry_s
    )
    return catalogue.described(entries[-1]) if entries else None
