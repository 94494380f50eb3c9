"""The versions of one name, and a reader's steps from the version that it has to another."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from redrb.checks import MOST
from redrb.connection import Client
from redrb.connection.deadline import Deadline, here
from redrb.connection.messages import BLOCK_S, block_on_stream
from redrb.connection.transport import Reply
from redrb.errors import DecodeError, StoreError, WeightCorrupt, WeightError, WeightTimeout
from redrb.keys import WeightKeys
from redrb.scopes import Entered
from redrb.weights.reading.missing import MissingWeights, announced_wait
from redrb.weights.wire.calls import (
    Ask,
    FindSteps,
    FoundStep,
    How,
    RenewPin,
    foreign_keys_named,
    run,
)
from redrb.weights.wire.chunks import ChunkGoneError, Incoming, batches, fetch
from redrb.weights.wire.layout import Whole
from redrb.weights.wire.manifest import Manifest, WeightVersion, decode_manifest

T = TypeVar("T")

PIN_S = 60
"""Seconds that versions stay pinned after a reader has died."""

_ID = re.compile(rb"([1-9][0-9]{0,15})-0")
_LISTED = 1000
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Step:
    """One version on the way to the wanted version.

    Attributes:
        how: What to fetch: "full", the whole state; "delta", the delta to it; "lora", an adapter;
            "same", nothing, since the reader has the version.
    """

    how: How
    manifest: Manifest
    described: WeightVersion


class Catalogue:
    """The published versions of one name, and the one in use, as far as it is known."""

    def __init__(self, client: Client, name: str, namespace: str) -> None:
        self.keys = WeightKeys.of(namespace, name)
        self.client = client.at(self.keys.versions)
        self.everywhere = client
        self.namespace, self.name = namespace, name
        self.used: WeightVersion | None = None

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
        known_s = self.created_s(version)
        return newest if known_s and known_s != newest.created_s else None

    def created_s(self, version: int) -> float:
        """Return when the version in use was created; 0.0 if it is not known."""
        used = self.used
        return used.created_s if used is not None and used.version == version else 0.0

    def wait(self, version: int, *, larger: bool) -> WeightVersion:
        """Wait until another version than `version` is the newest; if `larger`, a larger one."""
        if version or self.newer_than(0) is not None:
            return self._wait(version, larger=larger)
        with announced_wait(self.everywhere):
            return self._wait(version, larger=larger)

    def _wait(self, version: int, *, larger: bool) -> WeightVersion:
        deadline = here()
        missing = MissingWeights(self.everywhere, self.namespace, self.name)
        look = self.newer_than if larger else self.other_than
        while True:
            last = deadline.over
            found = look(version)
            if found is None and not last:
                found = self._block(version)
            if found is not None:
                return found
            if not version:
                missing.log()
            if last:
                newest = self.newer_than(0)
                raise WeightTimeout(
                    name=self.name,
                    newer_than=version,
                    newest=newest.version if newest else None,
                    waited_s=deadline.waited_s,
                )

    def wait_once(self, version: int, seconds: float) -> WeightVersion | None:
        """Return the newest version if it is not `version`, after one wait of at most `seconds`."""
        with Deadline(seconds):
            return self.other_than(version) or self._block(version) or self.other_than(version)

    def _block(self, version: int) -> WeightVersion | None:
        """Wait for a version larger than `version`; return the newest, if any.

        The reply that ends the wait has the versions in it: readers that are woken together do not
        all ask again.
        """
        seconds = here().slice_s(BLOCK_S)
        entries = block_on_stream(self.client, self.keys.versions, f"{version}-0", seconds)
        return self.described(entries[-1]) if entries else None

    def entry(self, version: int) -> WeightVersion | None:
        """Return a version by its number, None if it is deleted, or no number of a version."""
        if not 0 < version <= MOST:
            return None
        at = f"{version}-0"
        found = self.client.execute("XRANGE", self.keys.versions, at, at)
        return self.described(found[0]) if found else None

    def missing(self, version: int | None) -> WeightError:
        """Return the error for a version, or for the newest, that is not there."""
        newest = self.newer_than(0)
        known = f"the newest is {newest.version}" if newest else "nothing is published yet"
        which = "" if version is None else f"version {version} of "
        return WeightError(f"no {which}weights {self.name!r} to fetch: {known}.")

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
        """Return the version that an entry of the stream describes, or raise DecodeError."""
        try:
            number = _ID.fullmatch(entry[0])
            if number is None:
                raise ValueError("its id is no version")
            texts = [text.decode() for text in entry[1]]
            fields = dict(zip(texts[::2], texts[1::2], strict=True))
            found = {
                "name": self.name,
                "version": number[1].decode(),
                "kind": fields.get("kind"),
                "base": fields.get("base") if fields.get("kind") != "full" else 0,
                "nbytes": fields.get("nbytes"),
                "stored_bytes": fields.get("stored"),
                "delta_bytes": fields.get("delta") or None,
                "tensors": fields.get("names"),
                "created_s": _seconds(fields.get("created_ms")),
            }
            return msgspec.convert(found, WeightVersion, strict=False)
        except ValueError as error:
            raise DecodeError(
                f"weights {self.name!r}: the stream entry {entry[0]!r:.40} is not a version: "
                f"{error!s:.80}."
            ) from error

    def step(self, found: FoundStep, stored: bytes) -> Step:
        """Return a checked step, or raise WeightCorrupt or DecodeError."""
        version, how = found.version, found.how
        if how == "gone":
            key = self.keys.versions
            raise WeightCorrupt(f"{key} has no version {version} any more.", key=key)
        if not stored:
            raise DecodeError(f"{self.keys.manifests} has no version {version} any more.")
        manifest = decode_manifest(stored)
        fits = {"full": ("full",), "delta": ("full", "delta"), "lora": ("lora",)}
        if manifest.version != version or manifest.kind not in fits.get(how, (manifest.kind,)):
            raise DecodeError(
                f"weights {self.name!r}: the entry {version} holds version {manifest.version} of "
                f"kind {manifest.kind!r}."
            )
        if how == "delta" and manifest.delta is None:
            raise DecodeError(f"weights {self.name!r}: version {version} has no delta.")
        try:
            created_s = _seconds(found.created_ms)
        except ValueError as error:
            raise DecodeError(
                f"weights {self.name!r}: version {version} was created at {found.created_ms!r:.40}."
            ) from error
        return Step(how, manifest, manifest.describe(self.name, created_s))


class Pin(Entered):
    """Keeps versions that a fetch needs from being deleted, until the end of its `with`."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.version = 0
        self._reader = uuid.uuid4().hex
        self._renewed = 0.0

    def __exit__(self, *exc_info: object) -> None:
        try:
            with Deadline(repeat_s=0.0):
                self._renew(0)
        except StoreError:
            return  # the pin expires

    def route(self, *, have: int, wanted: int = 0, used: int = 0) -> list[Step]:
        """Return the steps to a version, and pin them for `PIN_S`.

        Args:
            have: Version of the state that the reader has, 0 for none.
            wanted: The version to reach; 0 for the newest, unless that is `used`.
        """
        catalogue = self.catalogue
        used_ms = round(catalogue.created_s(used) * 1000)
        find = FindSteps(self._reader, have, wanted, used, used_ms, PIN_S * 1000)
        with foreign_keys_named(catalogue.client, catalogue.keys):
            found, manifests = find.run_with_bytes(catalogue.client, [catalogue.keys.versions])
        self._renewed = time.monotonic()
        steps = []
        for each, stored in zip(found, manifests, strict=True):
            self.version = each.version
            steps.append(catalogue.step(each, stored))
        return steps

    def fetch(self, values: Iterable[Incoming]) -> None:
        """Fetch values, and renew the pin meanwhile."""
        for batch in batches(values):
            fetch(self.catalogue.everywhere, batch)
            if time.monotonic() - self._renewed > PIN_S / 4:
                self._renew(PIN_S * 1000)
                self._renewed = time.monotonic()

    def ask(self, damage: WeightCorrupt | DecodeError) -> WeightCorrupt | DecodeError:
        """Ask the publisher for a full version; returns the error to raise for the damage."""
        catalogue = self.catalogue
        if not self.version:  # the damage is in no version
            return damage
        key = damage.key if isinstance(damage, WeightCorrupt) else ""
        key = key or catalogue.keys.manifests
        gone = f"chunks were gone {_ATTEMPTS} times: " if isinstance(damage, ChunkGoneError) else ""
        found = (
            f"version {self.version} of weights {catalogue.name!r} is damaged in {key}, and there "
            f"is no way around it: {gone}{damage}"
        )
        try:
            with Deadline(repeat_s=0.0):
                is_asked = run(catalogue.client, catalogue.keys, Ask(self.version, key))
            asked = "The publisher's next version is a full one, which can be loaded."
            if not is_asked:
                asked = "A later version can be loaded."
        except StoreError as error:
            asked = f"The publisher could not be asked for a full version: {error}"
        message = (
            f"{found} {asked} If it happens again, check that no other program writes to the keys, "
            "that nothing trains while it publishes, and that the server's maxmemory-policy is "
            "noeviction."
        )
        if isinstance(damage, DecodeError):
            return DecodeError(message)
        return WeightCorrupt(message, version=self.version, key=key)

    def _renew(self, ttl_ms: int) -> None:
        run(self.catalogue.client, self.catalogue.keys, RenewPin(self._reader, ttl_ms))


def fetching(catalogue: Catalogue, forget: Callable[[], None], attempt: Callable[[Pin], T]) -> T:
    """Run an attempt to fetch a version, three times at most.

    Raises:
        WeightCorrupt, DecodeError: The version is damaged, by each way to it. The publisher was
            asked for a full one.
    """
    with Pin(catalogue) as pin:
        for _ in range(_ATTEMPTS - 1):
            try:
                return attempt(pin)
            except (WeightCorrupt, DecodeError):
                forget()
        try:
            return attempt(pin)
        except (WeightCorrupt, DecodeError) as damage:
            forget()
            raise pin.ask(damage) from damage


def _seconds(created_ms: str | None) -> float:
    milliseconds: int = msgspec.convert(created_ms, Whole, strict=False)
    return milliseconds / 1000
