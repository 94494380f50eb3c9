"""Deletion of all versions of published weights: `redrb weights rm`."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from redrb.connection import Client
from redrb.connection.client import scan
from redrb.errors import ConfigError
from redrb.keys import WeightKeys
from redrb.registry import Registry
from redrb.weights.inspection.listing import nothing_published, stored_bytes
from redrb.weights.reading.catalogue import Catalogue
from redrb.weights.wire import stored_keys
from redrb.weights.wire.calls import RemoveVersions, foreign_keys_named, run

_STAGED = re.compile(rb"redrb:\{[A-Za-z0-9._/@+:-]+\}:(?:chunk|delta):([0-9]{1,16}):[0-9]{1,7}")


@dataclass(frozen=True, slots=True)
class RemovedWeights:
    """Weights that were deleted.

    Attributes:
        name: Their name.
        versions: The deleted versions.
        stored_bytes: Their bytes in Redis, without manifests.
    """

    name: str
    versions: tuple[int, ...]
    stored_bytes: int


def remove_weights(client: Client, name: str, *, namespace: str = "default") -> RemovedWeights:
    """Delete all versions of `name`, and staged chunks of the next one.

    A publisher that still runs is fenced, as by a new `WeightPublisher`; for that the key `fence`
    stays, about two hundred bytes. The next publisher begins with version 1. Readers keep their
    weights, and a fetch that is under way fails.

    Chunks that a fenced publisher sends after this, and messages between ranks, expire.
    """
    catalogue = Catalogue(client, name, namespace)
    keys, node = catalogue.keys, catalogue.client
    with foreign_keys_named(node, keys):
        entries = node.execute("XRANGE", keys.versions, "-", "+")
    deleted = {entry.decode() for entry, _ in entries}
    if not deleted and not node.execute("EXISTS", keys.trash, keys.attempts):
        raise ConfigError(nothing_published(client, name, namespace))
    nbytes, remove, more = stored_bytes(name, entries), RemoveVersions(uuid.uuid4().hex), True
    while more:
        page = run(node, keys, remove)
        more = page.more
        # the reply to a repeated request lacks what the first one has deleted
        deleted.update(page.entries)
    stored_keys.clean(client, keys)
    for primary in client.primaries():
        stored_keys.delete(client, _staged(primary, keys, page.token))
    Registry(client, namespace).remove("weights", name)
    versions = {int(entry.partition("-")[0]) for entry in deleted}
    return RemovedWeights(name, tuple(sorted(versions)), nbytes)


def _staged(primary: Client, keys: WeightKeys, last_token: int) -> Iterator[str]:
    """Yield the keys that attempts have left on one server, without those of later publishers."""
    for key in scan(primary, f"{keys.prefix.removesuffix('}:')}[}}:]*"):
        matched = _STAGED.fullmatch(key)
        if matched is not None and int(matched[1]) <= last_token:
            yield key.decode()
