"""How a reader gets from the version that it has to the one that it wants."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Literal, Self, cast

from redrb.connection import Client
from redrb.connection.transport import Argument, Reply
from redrb.errors import DecodeError, StoreError
from redrb.keys import WeightKeys
from redrb.lua import scripts
from redrb.weights.wire import cluster_keys
from redrb.weights.wire.layout import Layout
from redrb.weights.wire.manifest import MAX_VERSION, Manifest, WeightVersion
from redrb.weights.wire.manifest_codec import decode_manifest

How = Literal["full", "delta", "lora", "same"]

PIN_S = 60
"""Seconds after which a reader that died holds versions no more."""

_ID = re.compile(rb"([1-9][0-9]{0,15})-0")
_ENTRY_BYTES = 1 << 20
_LISTED = 1000
_LAYOUTS = 4
_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Step:
    """One version on the way.

    Attributes:
        how: What to take of it: the whole state, the delta to it, an adapter; "same": nothing,
            the reader has it.
        manifest: Its manifest.
        described: What users see of it.
    """

    how: How
    manifest: Manifest
    described: WeightVersion


class Catalogue:
    """The versions of one name, as a reader sees them."""

    def __init__(self, client: Client, keys: WeightKeys, name: str) -> None:
        self.client = client.at(keys.versions)
        self.everywhere = client
        self.keys = keys
        self.name = name
        self._layouts: dict[int, Layout] = {}
        self._led: dict[int, int] = {}  # milliseconds at which versions on the way were created
        self._created_ms: dict[int, int] = {}  # the same of the one that is used

    def newer_than(self, version: int, *, retry_s: float | None = None) -> WeightVersion | None:
        """Return the newest version if it is larger than `version`."""
        least = f"{version + 1}-0"
        found = self.client.execute(
            "XREVRANGE", self.keys.versions, "+", least, "COUNT", 1, retry_s=retry_s
        )
        return self._described(found[0]) if found else None

    def other_than(self, version: int, *, retry_s: float | None = None) -> WeightVersion | None:
        """Return the newest version if it is not `version`.

        A smaller one is newer, too, and so is the same number of another time: the server lost
        what it had, and counts from 1 again.
        """
        newest = self.newer_than(0, retry_s=retry_s)
        if newest is None or newest.version != version:
            return newest
        known_ms = self._created_ms.get(version, 0)
        return newest if known_ms and known_ms != round(newest.created_s * 1000) else None

    def loaded(self, version: int) -> None:
        """Note that a version to which `route` has led is used from now on."""
        self._created_ms = {version: self._led[version]} if version in self._led else {}

    def entry(self, version: int) -> WeightVersion | None:
        """Return what is known of a version, None where it is gone."""
        at = f"{version}-0"
        found = self.client.execute("XRANGE", self.keys.versions, at, at)
        return self._described(found[0]) if found else None

    def kept(self) -> list[WeightVersion]:
        """Return the versions that are kept, the newest last, 1,000 at most."""
        found = self.client.execute("XREVRANGE", self.keys.versions, "+", "-", "COUNT", _LISTED)
        return [self._described(entry) for entry in reversed(found)]

    def route(self, reader: str, *, have: int, wanted: int, used: int) -> list[Step]:
        """Return the steps to a version, and pin them for `PIN_S`.

        Args:
            reader: Who asks.
            have: Version of the state that it has, 0 for none.
            wanted: The version, 0 for the newest if that is not `used`.
            used: Version that it uses.
        """
        used_ms = self._created_ms.get(used, 0)
        arguments = (reader, have, wanted, used, used_ms, PIN_S * 1000)
        steps = [self._step(*step) for step in self.run("weights/pin", *arguments)]
        if steps:
            last = steps[-1].described
            self._led[last.version] = round(last.created_s * 1000)
            if len(self._led) > _REMEMBERED:
                self._led.pop(next(iter(self._led)), None)  # two threads may find the same
        if any(step.manifest.spread for step in steps):
            self._settle(steps)
        return steps

    def run(self, script: str, *arguments: Argument, retry_s: float | None = None) -> Reply:
        """Run a script on these weights."""
        keys = [self.keys.versions]
        return scripts.run(self.client, scripts.load(script), keys, arguments, retry_s=retry_s)

    def _settle(self, steps: list[Step]) -> None:
        """Make permanent what a publisher committed that died before it could."""
        left = cluster_keys.unsettled(self.everywhere, self.keys)
        for step in steps:
            if step.manifest.version in left:
                cluster_keys.settle(self.everywhere, self.keys, step.manifest)

    def decode(self, stored: bytes) -> Manifest:
        """Return a manifest; a list of tensors that was in one before is not read again.

        Raises:
            DecodeError: It is damaged.
        """
        manifest = decode_manifest(stored, self._layouts)
        if manifest.layout is not None and manifest.layout_id not in self._layouts:
            self._layouts = {**self._layouts, manifest.layout_id: manifest.layout}
            if len(self._layouts) > _LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
        return manifest

    def _step(self, version: int, how: bytes, created_ms: bytes, stored: bytes) -> Step:
        manifest = self.decode(stored)
        word = how.decode(errors="replace")
        fits = {"full": ("full",), "delta": ("full", "delta"), "lora": ("lora",)}
        if manifest.version != version or manifest.kind not in fits.get(word, (manifest.kind,)):
            raise DecodeError(
                f"weights {self.name!r}: the entry {version} holds version {manifest.version} of "
                f"kind {manifest.kind!r}."
            )
        if word == "delta" and manifest.delta is None:
            raise DecodeError(f"weights {self.name!r}: version {version} has no delta.")
        created_s = _whole(created_ms) / 1000
        return Step(cast(How, word), manifest, manifest.describe(self.name, created_s))

    def _described(self, entry: Reply) -> WeightVersion:
        number = _ID.fullmatch(entry[0])
        fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
        kind = fields.get(b"kind")
        if number is None or kind not in (b"full", b"delta", b"lora"):
            raise DecodeError(f"weights {self.name!r}: {entry[0]!r:.40} is not a version's entry.")
        delta = fields.get(b"delta", b"")
        return WeightVersion(
            self.name,
            int(number[1]),
            kind.decode(),
            _whole(fields.get(b"base")) if kind != b"full" else 0,
            _whole(fields.get(b"nbytes")),
            _whole(fields.get(b"stored")),
            _whole(delta) if delta else None,
            _whole(fields.get(b"names")),
            _whole(fields.get(b"created_ms")) / 1000,
        )


class Pin:
    """Keeps what one fetch needs from being deleted, while it lasts."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.reader = uuid.uuid4().hex

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._catalogue.run("weights/hold", self.reader, 0, retry_s=0)
        except StoreError:
            return  # it ends by itself

    def route(self, *, have: int, wanted: int = 0, used: int = 0) -> list[Step]:
        """Return the steps to a version, which are pinned from now on."""
        return self._catalogue.route(self.reader, have=have, wanted=wanted, used=used)

    def renew(self) -> None:
        """Go on holding."""
        self._catalogue.run("weights/hold", self.reader, PIN_S * 1000)


def _whole(stored: object) -> int:
    if not isinstance(stored, bytes) or not stored.isdigit() or len(stored) > 16:
        raise DecodeError(f"an entry of published weights holds {stored!r:.40}, not a number.")
    number = int(stored)
    if number > MAX_VERSION:
        raise DecodeError(f"an entry of published weights holds {number}, beyond 2**53 - 1.")
    return number
