"""The versions of one name, and a reader's steps from the version that it has to another."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Literal, Self, cast

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.connection.transport import Argument, Reply
from redrb.errors import DecodeError, StoreError
from redrb.keys import WeightKeys
from redrb.weights.wire.calls import call
from redrb.weights.wire.layout import Layout
from redrb.weights.wire.manifest import MAX_VERSION, Manifest, WeightVersion
from redrb.weights.wire.manifest_codec import decode_manifest

How = Literal["full", "delta", "lora", "same"]

PIN_S = 60
"""Seconds that versions stay pinned after a reader has died."""

_ID = re.compile(rb"([1-9][0-9]{0,15})-0")
_LISTED = 1000
_LAYOUTS = 4
_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Step:
    """One version on the way to the wanted version.

    Attributes:
        how: What to fetch: "full", the whole state; "delta", the delta to it; "lora", an adapter;
            "same", nothing, since the reader has the version.
        manifest: The version's manifest.
        described: The version as users see it.
    """

    how: How
    manifest: Manifest
    described: WeightVersion


class Catalogue:
    """The published versions of one name."""

    def __init__(self, client: Client, keys: WeightKeys, name: str) -> None:
        self.client = client.at(keys.versions)
        self.everywhere = client
        self.keys = keys
        self.name = name
        self._layouts: dict[int, Layout] = {}
        self._routed: dict[int, int] = {}  # version that `route` led to -> its creation time
        self._created_ms: dict[int, int] = {}  # the same for the version in use

    def newer_than(self, version: int) -> WeightVersion | None:
        """Return the newest version if it is larger than `version`, else None."""
        least = f"{version + 1}-0"
        found = self.client.execute("XREVRANGE", self.keys.versions, "+", least, "COUNT", 1)
        return self.described(found[0]) if found else None

    def other_than(self, version: int) -> WeightVersion | None:
        """Return the newest version if it is another one than `version`, else None.

        After a server has lost its data, versions count from 1 again. So a smaller number is
        another version, and so is the same number with another creation time.
        """
        newest = self.newer_than(0)
        if newest is None or newest.version != version:
            return newest
        known_ms = self._created_ms.get(version, 0)
        return newest if known_ms and known_ms != round(newest.created_s * 1000) else None

    def loaded(self, version: int) -> None:
        """Note that a version that `route` led to is in use from now on."""
        self._created_ms = {version: self._routed[version]} if version in self._routed else {}

    def entry(self, version: int) -> WeightVersion | None:
        """Return a version by its number, None if it is deleted."""
        at = f"{version}-0"
        found = self.client.execute("XRANGE", self.keys.versions, at, at)
        return self.described(found[0]) if found else None

    def kept(self) -> list[WeightVersion]:
        """Return the kept versions, the newest last, at most 1,000.

        Without deltas and adapters whose base was deleted: a reader that had the base has pinned
        them, and no other can use them.
        """
        found = self.client.execute("XREVRANGE", self.keys.versions, "+", "-", "COUNT", _LISTED)
        listed = [self.described(entry) for entry in reversed(found)]
        known: set[int] = set()
        for each in listed:
            beyond = len(listed) == _LISTED and each.base < listed[0].version
            if not each.base or each.base in known or beyond:
                known.add(each.version)
        return [each for each in listed if each.version in known]

    def described(self, entry: Reply) -> WeightVersion:
        """Return the version that an entry of the stream describes.

        Raises:
            DecodeError: The entry is no version.
        """
        number = _ID.fullmatch(entry[0])
        fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
        kind = fields.get(b"kind")
        if number is None or kind not in (b"full", b"delta", b"lora"):
            raise DecodeError(
                f"weights {self.name!r}: the stream entry {entry[0]!r:.40} is not a version."
            )
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

    def route(self, reader: str, *, have: int, wanted: int, used: int) -> list[Step]:
        """Return the steps to a version, and pin them for `PIN_S`.

        Args:
            reader: Random id of the reader.
            have: Version of the state that the reader has, 0 for none.
            wanted: The version to reach; 0 for the newest, unless that is `used`.
            used: Version that the reader uses.
        """
        used_ms = self._created_ms.get(used, 0)
        arguments = (reader, have, wanted, used, used_ms, PIN_S * 1000)
        steps = [self._step(*step) for step in self.run("weights/pin", *arguments)]
        if steps:
            last = steps[-1].described
            self._routed[last.version] = round(last.created_s * 1000)
            if len(self._routed) > _REMEMBERED:
                self._routed.pop(
                    next(iter(self._routed)), None
                )  # another thread may have removed it
        return steps

    def run(self, script: str, *arguments: Argument) -> Reply:
        """Run a script on these weights."""
        return call(self.client, self.keys, script, *arguments)

    def decode(self, stored: bytes) -> Manifest:
        """Return a manifest; layouts that were decoded before are not decoded again.

        Raises:
            DecodeError: The manifest is damaged.
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


class Pin:
    """Keeps the versions that one fetch needs from being deleted, until the end of its `with`."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.reader = uuid.uuid4().hex

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            with Deadline(repeat_s=0.0):
                self._catalogue.run("weights/renew_pin", self.reader, 0)
        except StoreError:
            return  # the pin expires

    def route(self, *, have: int, wanted: int = 0, used: int = 0) -> list[Step]:
        """Return the steps to a version, and pin them."""
        return self._catalogue.route(self.reader, have=have, wanted=wanted, used=used)

    def renew(self) -> None:
        """Renew the pin."""
        self._catalogue.run("weights/renew_pin", self.reader, PIN_S * 1000)


def _whole(stored: object) -> int:
    if not isinstance(stored, bytes) or not stored.isdigit() or len(stored) > 16:
        raise DecodeError(
            f"an entry of published weights holds {stored!r:.40} in place of a number."
        )
    number = int(stored)
    if number > MAX_VERSION:
        raise DecodeError(f"an entry of published weights holds {number}, beyond 2**53 - 1.")
    return number
