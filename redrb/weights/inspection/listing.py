"""The published weights of a namespace, their versions, and a version's tensors."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from redrb.connection import Client
from redrb.damage import Reading
from redrb.errors import ConfigError, DecodeError, StoreError, StoreUnavailable
from redrb.keys import WeightKeys, check_name, is_name
from redrb.registry import Registry
from redrb.weights.reading.catalogue import Catalogue, Pin, Step
from redrb.weights.wire.layout import CHUNK_BYTES, Layout
from redrb.weights.wire.manifest import MAX_CHUNKS, WeightVersion

_RANGE = re.compile(rb"([0-9]{1,16}) ([0-9]{1,7}) ([0-9]{1,7})")
_LISTED = 10

_log = logging.getLogger("redrb")


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A kept version.

    Attributes:
        version: Its number.
        kind: "full", "delta" or "lora".
        base: Of a delta, the version before; of an adapter, the version that it belongs to; else 0.
        nbytes: Bytes of all tensors.
        stored_bytes: Bytes in Redis; chunks that several versions share are counted in each.
        delta_bytes: Bytes that a reader of the version before fetches; None if there is no delta.
        tensors: Number of tensors, tied ones counted by each name.
        age_s: Seconds since its commit, by the server's clock.
    """

    version: int
    kind: str
    base: int
    nbytes: int
    stored_bytes: int
    delta_bytes: int | None
    tensors: int
    age_s: float


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The published weights of one name.

    Attributes:
        name: Their name.
        newest: The newest version.
        versions: Number of kept versions.
        stored_bytes: Bytes of all versions in Redis, without manifests.
    """

    name: str
    newest: KeptVersion
    versions: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """A tensor of a version.

    Attributes:
        name: Its name.
        dtype: Torch's name of its dtype.
        shape: Its shape.
        tied_to: The tensor whose bytes it shares, or None.
        nbytes: Its bytes; tied tensors are stored once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tied_to: str | None
    nbytes: int


def published_in(client: Client, namespace: str) -> list[PublishedWeights]:
    """Return all weights of a namespace, by name; those that cannot be read are logged."""
    check_name("namespace", namespace)
    found = []
    for name in filter(is_name, Registry(client, namespace).names("weights")):
        catalogue = catalogue_of(client, name, namespace)
        try:
            versions = kept(catalogue)
            stored = stored_bytes(catalogue)
        except StoreUnavailable:
            raise
        except (StoreError, DecodeError) as error:
            _log.warning("weights %r are not listed: %s", name, error)
            continue
        if versions:
            found.append(PublishedWeights(name, versions[-1], len(versions), stored))
    return found


def catalogue_of(client: Client, name: str, namespace: str) -> Catalogue:
    """Return the catalogue of `name`, which may have no versions."""
    return Catalogue(client, WeightKeys.of(namespace, name), name)


def kept(catalogue: Catalogue) -> list[KeptVersion]:
    """Return the kept versions, the newest last."""
    found = catalogue.kept()
    seconds, microseconds = catalogue.client.execute("TIME")
    now_s = int(seconds) + int(microseconds) / 1e6
    return [_aged(version, now_s) for version in found]


def versions_of(client: Client, name: str, namespace: str) -> list[KeptVersion]:
    """Return the kept versions of `name`, the newest last.

    Raises:
        ConfigError: There are none; the message lists the published weights.
    """
    found = kept(catalogue_of(client, name, namespace))
    if not found:
        raise ConfigError(nothing_published(client, name, namespace))
    return found


def check_kept(client: Client, name: str, namespace: str, version: int | None) -> int:
    """Return the newest version, after checking that the given one is kept.

    Raises:
        ConfigError: It is not; the message lists the kept ones.
    """
    numbers = [found.version for found in versions_of(client, name, namespace)]
    if version is not None and version not in numbers:
        shown = ", ".join(map(str, numbers[-_LISTED:]))
        shown = f"..., {shown}" if len(numbers) > _LISTED else shown
        raise ConfigError(f"version {version} of weights {name!r} is not kept; kept are {shown}.")
    return numbers[-1]


def nothing_published(client: Client, name: str, namespace: str) -> str:
    """Return the message about missing weights, which lists the names that the registry has."""
    known = Registry(client, namespace).names("weights")
    others = [each for each in known if is_name(each) and each != name]
    message = f"there are no weights {name!r} in namespace {namespace!r} at {client.where}"
    if others:
        return f"{message}: there are {_shown(others)}."
    return f"{message}, and no others: --namespace names another namespace."


def tensors_of(client: Client, name: str, namespace: str, version: int) -> list[ListedTensor]:
    """Return the tensors of a kept version; of an adapter, its A and B."""
    with Pin(catalogue_of(client, name, namespace)) as pin:
        steps = pin.route(have=0, wanted=version)
    return [
        ListedTensor(
            entry.name,
            entry.dtype,
            entry.shape,
            entry.alias,
            entry.nbytes,
        )
        for entry in layout_of(steps).tensors
    ]


def layout_of(steps: list[Step]) -> Layout:
    """Return the layout of the version that steps lead to.

    Raises:
        ConfigError: The version is not kept any more.
    """
    layouts = [step.manifest.layout for step in steps if step.manifest.layout is not None]
    if not layouts:
        raise ConfigError("this version is not kept any more: take a newer one.")
    return layouts[-1]


def _aged(version: WeightVersion, now_s: float) -> KeptVersion:
    return KeptVersion(
        version.version,
        version.kind,
        version.base,
        version.nbytes,
        version.stored_bytes,
        version.delta_bytes,
        version.tensors,
        max(0.0, now_s - version.created_s),
    )


def stored_bytes(catalogue: Catalogue) -> int:
    """Return the bytes of all versions without manifests; shared chunks are counted once."""
    ranges: dict[int, list[tuple[int, int, int]]] = {}
    total = 0
    for _, listed in catalogue.client.execute("XRANGE", catalogue.keys.versions, "-", "+"):
        fields = dict(zip(listed[::2], listed[1::2], strict=True))
        with Reading(f"weights {catalogue.name!r}"):
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


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
