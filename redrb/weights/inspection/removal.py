"""All versions of published weights, deleted."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.keys import WeightKeys
from redrb.lua import scripts
from redrb.weights.inspection.listing import (
    catalogue_of,
    kept,
    nothing_published,
    scan,
    stored_bytes,
)
from redrb.weights.wire import cluster_keys

_STAGED = re.compile(rb"redrb:\{[^{}]+\}:(?:chunk|delta):([0-9]{1,16}):[0-9]{1,7}")


@dataclass(frozen=True, slots=True)
class RemovedWeights:
    """Weights that were deleted.

    Attributes:
        name: Their name.
        versions: The versions that there were.
        stored_bytes: Their bytes in Redis, without manifests.
    """

    name: str
    versions: tuple[int, ...]
    stored_bytes: int


def remove_weights(client: Client, name: str, *, namespace: str = "default") -> RemovedWeights:
    """Delete all versions of `name`, and what its publisher has sent of the next one.

    A publisher that still runs is fenced, as by a new `WeightPublisher`. So that it stays so, the
    key `fence` remains, a hundred bytes. Whoever publishes under this name afterwards begins with
    version 1. Readers keep what they have, and a fetch that is under way fails.

    What a fenced publisher sends after this, and what ranks say to each other, expires by itself.

    Raises:
        ConfigError: There are no such weights; it says which there are.
        StoreUnavailable: Redis stayed away; what is left is deleted by the next call.
    """
    catalogue = catalogue_of(client, name, namespace)
    keys, own = catalogue.keys, catalogue.client
    listed = [found.version for found in kept(catalogue)]
    if not listed and not own.execute("EXISTS", keys.trash):
        raise ConfigError(nothing_published(client, name, namespace))
    nbytes, spread = stored_bytes(catalogue), cluster_keys.spread_of(client)
    token, *deleted = scripts.run(
        *(own, scripts.load("weights/remove"), [keys.versions]),
        [uuid.uuid4().hex, int(spread > 0)],
    )
    if spread:
        cluster_keys.clean(client, keys, spread)
    for primary in client.primaries():
        cluster_keys.delete(client, _staged(primary, keys, token))
    # a repeated request is told only of what the first one had not deleted
    return RemovedWeights(name, tuple(sorted({*listed, *deleted})), nbytes)


def _staged(primary: Client, keys: WeightKeys, last_token: int) -> Iterator[str]:
    """Give what attempts have left on one server; those of later publishers are not among them."""
    for key in scan(primary, f"{keys.prefix.removesuffix('}:')}[}}:]*"):
        matched = _STAGED.fullmatch(key)
        if matched is not None and int(matched[1]) <= last_token:
            yield key.decode()
