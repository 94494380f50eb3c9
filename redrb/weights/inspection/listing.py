"""The versions of published weights, their bytes, a version's tensors, and their deletion."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from redrb.connection import Client
from redrb.connection.client import scan
from redrb.errors import ConfigError
from redrb.keys import WeightKeys, is_name
from redrb.processes import process_name
from redrb.registry import Registry, elsewhere, namespaces
from redrb.unpacking import Reading
from redrb.weights.reading.catalogue import Catalogue, Pin
from redrb.weights.wire import stored_keys
from redrb.weights.wire.calls import RemoveVersions, foreign_keys_named, run
from redrb.weights.wire.layout import CHUNK_BYTES, TensorEntry
from redrb.weights.wire.manifest import MAX_CHUNKS, WeightVersion

_RANGE = re.compile(rb"([0-9]{1,16}) ([0-9]{1,7}) ([0-9]{1,7})")
_LISTED = 10
_UPLOADED = re.compile(rb"redrb:\{[A-Za-z0-9._/@+:-]+\}:(?:chunk|delta):([0-9]{1,16}):[0-9]{1,7}")


@dataclass(frozen=True, slots=True)
class KeptVersion(WeightVersion):
    """A kept version, and the seconds since its commit, by the server's clock."""

    age_s: float


def kept(catalogue: Catalogue) -> list[KeptVersion]:
    """Return the kept versions, the newest last."""
    found = catalogue.kept()
    seconds, microseconds = catalogue.client.execute("TIME")
    now_s = int(seconds) + int(microseconds) / 1e6
    return [KeptVersion(**asdict(each), age_s=max(0.0, now_s - each.created_s)) for each in found]


def versions_of(client: Client, name: str, namespace: str) -> list[KeptVersion]:
    """Return the kept versions of `name`, the newest last, or raise ConfigError."""
    found = kept(Catalogue(client, name, namespace))
    if not found:
        raise ConfigError(nothing_published(client, name, namespace))
    return found


def kept_version(client: Client, name: str, namespace: str, version: int | None) -> WeightVersion:
    """Return a version by its number; default: the newest, or raise ConfigError."""
    catalogue = Catalogue(client, name, namespace)
    found = catalogue.newer_than(0) if version is None else catalogue.entry(version)
    if found is None:
        numbers = [str(each.version) for each in versions_of(client, name, namespace)]
        shown = "..., " * (len(numbers) > _LISTED) + ", ".join(numbers[-_LISTED:])
        raise ConfigError(f"version {version} of weights {name!r} is not kept; kept are {shown}.")
    return found


def nothing_published(client: Client, name: str, namespace: str) -> str:
    """Return the message about missing weights, which lists the names that the registry has."""
    known = Registry(client, namespace).names("weights")
    others = [each for each in known if is_name(each) and each != name]
    message = f"there are no weights {name!r} in namespace {namespace!r} at {client.where}"
    if others:
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        return f"{message}: there are {', '.join(others[:_LISTED])}{more}."
    return f"{message}, and no others: {elsewhere(namespaces(client))}."


def tensors_of(client: Client, name: str, namespace: str, version: int) -> tuple[TensorEntry, ...]:
    """Return the tensors of a kept version; of an adapter, its A and B."""
    with Pin(Catalogue(client, name, namespace)) as pin:
        steps = pin.route(have=0, wanted=version)
    layouts = [step.manifest.layout for step in steps if step.manifest.layout is not None]
    if not layouts:
        raise ConfigError("this version is not kept any more: take a newer one.")
    return layouts[-1].tensors


def stored_bytes(name: str, entries: Iterable[tuple[bytes, Sequence[bytes]]]) -> int:
    """Return the bytes of versions, without manifests; shared chunks are counted once.

    `entries` are those of the stream `versions`.
    """
    ranges: dict[int, list[tuple[int, int, int]]] = {}
    total = 0
    for _, listed in entries:
        fields = dict(zip(listed[::2], listed[1::2], strict=True))
        with Reading(f"weights {name!r}"):
            total += int(fields.get(b"delta") or 0)
            nbytes = int(fields.get(b"nbytes") or 0)
        for token, first, count in _RANGE.findall(fields.get(b"full", b"")):
            end = min(int(first) + int(count), MAX_CHUNKS)
            ranges.setdefault(int(token), []).append((int(first), end, nbytes))
    for chunks in ranges.values():
        counted = 0  # chunks below it
        for first, end, nbytes in sorted(chunks):
            begin = max(first, counted)
            total += max(0, min(nbytes, end * CHUNK_BYTES) - begin * CHUNK_BYTES)
            counted = max(counted, end)
    return total


@dataclass(frozen=True, slots=True)
class RemovedWeights:
    """Weights that were deleted; `stored_bytes` counts no manifests."""

    name: str
    versions: tuple[int, ...]
    stored_bytes: int


def remove_weights(client: Client, name: str, *, namespace: str = "default") -> RemovedWeights:
    """Delete all versions of `name`, and uploaded chunks of the next one.

    A publisher that still runs is fenced, as by a new `WeightPublisher`; for that the key `fence`
    stays, about two hundred bytes. The next publisher begins with version 1. Readers keep their
    weights, and a fetch that is under way fails.

    Chunks that a fenced publisher sends after this expire.
    """
    catalogue = Catalogue(client, name, namespace)
    keys, node = catalogue.keys, catalogue.client
    with foreign_keys_named(node, keys):
        entries = node.execute("XRANGE", keys.versions, "-", "+")
    deleted = {entry.decode() for entry, _ in entries}
    if not deleted and not node.execute("EXISTS", keys.trash, keys.attempts):
        raise ConfigError(nothing_published(client, name, namespace))
    nbytes, remove, more = stored_bytes(name, entries), RemoveVersions(process_name()), True
    while more:
        page = run(node, keys, remove)
        more = page.more
        # the reply to a repeated request lacks what the first one has deleted
        deleted.update(page.entries)
    # first: if the process dies, the trash says that there is more to do
    Registry(client, namespace).remove("weights", name)
    stored_keys.clean(client, keys)
    for primary in client.primaries():
        stored_keys.delete(client, _uploaded(primary, keys, page.token))
    versions = {int(entry.partition("-")[0]) for entry in deleted}
    return RemovedWeights(name, tuple(sorted(versions)), nbytes)


def _uploaded(primary: Client, keys: WeightKeys, last_token: int) -> Iterator[str]:
    """Yield the keys that attempts have left on one server, without those of later publishers."""
    for key in scan(primary, f"{keys.prefix.removesuffix('}:')}[}}:]*"):
        matched = _UPLOADED.fullmatch(key)
        if matched is not None and int(matched[1]) <= last_token:
            yield key.decode()
