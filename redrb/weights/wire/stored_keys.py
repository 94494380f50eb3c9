"""The keys of versions: which there are, and what no script does, as they may be on many nodes.

Uploaded keys expire. To commit a version, its attempt is noted in Redis with all its keys, `keep`
makes these permanent, and a script commits it. A publisher that dies between leaves its note, by
which the next one lists the keys in the trash, as scripts do that delete versions; `clean` deletes
what the trash lists.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from redrb.connection import Client
from redrb.connection.client import Request
from redrb.connection.cluster import Cluster
from redrb.connection.transport import Pipeline, Reply, first_error
from redrb.keys import WeightKeys
from redrb.weights.wire.calls import foreign_keys_named
from redrb.weights.wire.chunks import batches, by_node, side_by_side
from redrb.weights.wire.manifest import MAX_CHUNKS, ChunkSource, Manifest

SPREAD = 64
"""Slots that the keys of one name are spread over: enough for the nodes of a large cluster."""

_AT_ONCE = 1000
_SIDE_BY_SIDE = 16  # requests, each on a connection of its own
_RANGE = re.compile(rb"(chunk|delta) ([0-9]{1,16}) ([0-9]{1,7}) ([0-9]{1,7})")


def spread_of(client: Client) -> int:
    """Return the number of slots that keys are spread over, 0 on one server."""
    return SPREAD if isinstance(client, Cluster) else 0


def ranges(runs: Iterable[ChunkSource], kind: str = "") -> str:
    """Return ranges of keys in the form that scripts read; with `kind` those of an attempt."""
    return ";".join(
        f"{kind} {run.token} {run.first} {run.count}".lstrip() for run in runs if run.count
    )


def pieces_of(manifest: Manifest) -> list[ChunkSource]:
    """Return the runs of a delta's keys."""
    delta = manifest.delta
    return [] if delta is None else [ChunkSource(delta.token, 0, len(delta.checksums) // 8)]


def uploaded_ranges(manifest: Manifest, token: int) -> str:
    """Return the ranges of the keys that an attempt with this token has uploaded."""
    chunks = [run for run in manifest.sources if run.token == token]
    pieces = [run for run in pieces_of(manifest) if run.token == token]
    return ";".join(filter(None, (ranges(chunks, "chunk"), ranges(pieces, "delta"))))


def keep(client: Client, keys: WeightKeys, manifest: Manifest, token: int) -> bool:
    """Make the keys that have this token permanent; return whether all keys exist."""
    found = list(_keys_of(keys, manifest))
    uploaded = {name for owner, name in found if owner == token}
    return _sum(client, (name for _, name in found), "EXISTS", kept=uploaded) == len(found)


def clean(client: Client, keys: WeightKeys) -> None:
    """Delete the keys that the trash lists."""
    node, spread = client.at(keys.versions), spread_of(client)
    with foreign_keys_named(node, keys):
        listed_ranges = node.execute("SMEMBERS", keys.trash)
    for found in batches(listed_ranges, _AT_ONCE):
        delete(client, (name for listed in found for name in _listed(keys, listed, spread)))
        node.execute("SREM", keys.trash, *found)


def count_existing(client: Client, names: Iterable[str]) -> int:
    """Return how many of these keys exist."""
    return _sum(client, names, "EXISTS")


def delete(client: Client, names: Iterable[str]) -> None:
    """Delete keys."""
    _sum(client, names, "UNLINK")


def _listed(keys: WeightKeys, listed: bytes, spread: int) -> Iterator[str]:
    found = _RANGE.fullmatch(listed)
    if found is not None:
        token, first, count = map(int, found.groups()[1:])
        name = keys.chunk if found[1] == b"chunk" else keys.delta
        for number in range(first, min(first + count, MAX_CHUNKS)):
            yield name(token, number, spread)


def _keys_of(keys: WeightKeys, manifest: Manifest) -> Iterator[tuple[int, str]]:
    for kind, runs in ((keys.chunk, manifest.sources), (keys.delta, pieces_of(manifest))):
        for run in runs:
            for number in range(run.first, run.first + run.count):
                yield run.token, kind(run.token, number, manifest.spread)


def _sum(client: Client, names: Iterable[str], command: str, *, kept: Collection[str] = ()) -> int:
    """Return the sum of a command's replies on keys, which is safe to repeat; `kept` ones persist.

    Several slots are asked side by side.
    """
    parts = (
        (node, part)
        for node, tagged in by_node(client, names, str)
        for part in batches(tagged, _AT_ONCE)
    )
    total = 0
    for some in batches(parts, _SIDE_BY_SIDE):
        total += sum(side_by_side([_request(node, part, command, kept) for node, part in some]))
    return total


def _request(client: Client, names: list[str], command: str, kept: Collection[str]) -> Request[int]:
    pipeline = Pipeline()
    for name in names:
        if name in kept:
            pipeline.add("PERSIST", name)
    pipeline.add(command, *names)
    return Request(client, pipeline, _last)


def _last(replies: list[Reply]) -> int:
    error = first_error(replies)
    if error is not None:
        raise error
    return int(replies[-1])
