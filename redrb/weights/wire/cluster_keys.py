"""Commits on a cluster, where a version's keys are on many nodes and no script sees all of them.

One script cannot commit a version there, so several steps do, and a process that dies after any of
them leaves nothing behind: `prepare` lets staged keys expire in an hour, a script commits the
version and notes it as unsettled, `settle` makes its keys permanent (readers do this for a
publisher that died), and `clean` deletes the keys of dropped versions, which the script has listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from redrb.connection import Client
from redrb.connection.cluster import Cluster
from redrb.connection.request import Request
from redrb.connection.transport import Argument, Pipeline, Reply, first_error
from redrb.keys import WeightKeys
from redrb.weights.wire.chunks import batches
from redrb.weights.wire.manifest import Manifest
from redrb.weights.wire.manifest_codec import decode_manifest

SPREAD = 64
"""Slots that the keys of one name are spread over: enough for the nodes of a large cluster."""

_PREPARED_S = 3600
_AT_ONCE = 1000
_SIDE_BY_SIDE = 16  # requests, each on a connection of its own


def spread_of(client: Client) -> int:
    """Return the number of slots that keys are spread over, 0 on one server."""
    return SPREAD if isinstance(client, Cluster) else 0


def prepare(client: Client, keys: WeightKeys, manifest: Manifest, tokens: range) -> bool:
    """Renew the expiry of staged keys, which have these tokens; return whether all keys exist."""
    staged = list(_keys_of(keys, manifest, lambda token: token in tokens))
    earlier = list(_keys_of(keys, manifest, lambda token: token not in tokens))
    found = _each(client, staged, "EXPIRE", _PREPARED_S) + _each(client, earlier, "EXISTS")
    return sum(found) == len(staged) + len(earlier)


def settle(client: Client, keys: WeightKeys, manifest: Manifest) -> None:
    """Make a committed version's keys permanent."""
    _each(client, _keys_of(keys, manifest), "PERSIST")
    client.at(keys.versions).execute("SREM", keys.unsettled, manifest.version)


def settle_all(client: Client, keys: WeightKeys) -> None:
    """Settle every version whose publisher could not."""
    for version in unsettled(client, keys):
        stored = client.at(keys.versions).execute("HGET", keys.manifests, version)
        if stored is None:  # the version was deleted meanwhile
            client.at(keys.versions).execute("SREM", keys.unsettled, version)
        else:
            settle(client, keys, decode_manifest(stored))


def unsettled(client: Client, keys: WeightKeys) -> set[int]:
    """Return committed versions whose keys still expire."""
    found = client.at(keys.versions).execute("SMEMBERS", keys.unsettled)
    return {int(version) for version in found if version.isdigit()}


def clean(client: Client, keys: WeightKeys, spread: int) -> None:
    """Delete the keys of dropped versions."""
    node = client.at(keys.versions)
    for batch in batches(node.execute("SMEMBERS", keys.trash), _AT_ONCE):
        delete(client, [keys.spread_key(name.decode(errors="replace"), spread) for name in batch])
        node.execute("SREM", keys.trash, *batch)


def count_existing(client: Client, names: Iterable[str]) -> int:
    """Return how many of these keys exist."""
    return sum(_each(client, names, "EXISTS"))


def delete(client: Client, names: Iterable[str]) -> None:
    """Delete keys."""
    _each(client, names, "UNLINK")


def _keys_of(
    keys: WeightKeys, manifest: Manifest, wanted: Callable[[int], bool] = lambda _: True
) -> Iterator[str]:
    for run in manifest.sources:
        if wanted(run.token):
            for index in range(run.first, run.first + run.count):
                yield keys.chunk(run.token, index, manifest.spread)
    for blob in manifest.delta.blobs if manifest.delta is not None else ():
        if wanted(blob.token):
            for number in range(len(blob.checksums)):
                yield keys.delta(blob.token, number, manifest.spread)


def _each(client: Client, names: Iterable[str], command: str, *arguments: Argument) -> list[Reply]:
    """Run a command that is safe to repeat on each key; several slots are asked side by side."""
    tags: dict[str, list[str]] = {}
    for name in names:
        tags.setdefault(name.partition("}")[0], []).append(name)
    parts = [batch for tagged in tags.values() for batch in batches(tagged, _AT_ONCE)]
    replies: list[Reply] = []
    for some in batches(parts, _SIDE_BY_SIDE):
        requests = [_request(client.at(part[0]), part, command, *arguments) for part in some]
        try:
            for request in requests:
                request.begin()
            for request in requests:
                replies += request.result()
        finally:
            for request in requests:
                request.drop()
    return replies


def _request(
    client: Client, names: list[str], command: str, *arguments: Argument
) -> Request[list[Reply]]:
    pipeline = Pipeline()
    for name in names:
        pipeline.add(command, name, *arguments)
    return Request(client, pipeline, _without_errors)


def _without_errors(replies: list[Reply]) -> list[Reply]:
    error = first_error(replies)
    if error is not None:
        raise error
    return replies
