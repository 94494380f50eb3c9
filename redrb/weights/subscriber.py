"""Reading: find the newest version, fetch and check all of it, then load it in place."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from redrb.connection import Client
from redrb.connection.transport import Pipeline, Reply, read_reply
from redrb.errors import ConfigError, DecodeError, WeightCorrupt, WeightError, WeightTimeout
from redrb.keys import WeightKeys
from redrb.weights.chunks import ChunkGoneError, Filler
from redrb.weights.manifest import MAX_VERSION, Manifest, WeightVersion, decode_manifest
from redrb.weights.tensors import (
    Strict,
    Target,
    check_fits,
    empty_tensors,
    load_in_place,
    target_tensors,
)

T = TypeVar("T")

_ATTEMPTS = 3
_BLOCK_S = 5.0  # one blocking read; far below the connection's timeout
_LISTED = 1000
_ID = re.compile(rb"([1-9][0-9]{0,15})-0")


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the stream of versions."""

    manifest: Manifest
    described: WeightVersion


class WeightSubscriber:
    """Follows the weights `name` for one model.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights.
        namespace: That of the publisher.
        lock: Held while tensors change; default: one of its own. A lock that is not re-entrant
            must not be held by who calls `poll`.

    Attributes:
        lock: Generation takes it, so that it never sees half an update.

    Raises:
        ConfigError: A name is not usable.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        namespace: str = "default",
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._client = client
        self._keys = WeightKeys.of(namespace, name)
        self._name = name
        self._version: int | None = None
        self.lock: AbstractContextManager[object] = threading.RLock() if lock is None else lock

    def __repr__(self) -> str:
        return f"<redrb.WeightSubscriber {self._name!r} at version {self._version}>"

    @property
    def version(self) -> int | None:
        """The version that was loaded last, None before the first."""
        return self._version

    def latest(self) -> WeightVersion | None:
        """Return the newest version, None when nothing is published."""
        entry = self._newer_than(0)
        return entry.described if entry else None

    def versions(self) -> list[WeightVersion]:
        """Return all versions that are kept, the newest last."""
        found = self._client.execute("XRANGE", self._keys.versions, "-", "+", "COUNT", _LISTED)
        return [self._parse(entry).described for entry in found]

    def poll(self, target: Target, *, strict: Strict = True) -> WeightVersion | None:
        """Load the newest version in place, unless it is loaded already.

        All of it is fetched and checked before the first tensor changes; needs as much memory as
        the version once more. float16, bfloat16, float32 and float64 are cast into each other;
        other dtypes, and shapes, must be equal.

        Args:
            target: A module (its parameters and persistent buffers) or a dict of tensors; always
                the same one.
            strict: Demand the same names on both sides; "model": all names of the target, whatever
                else is published; False: load those that both have.

        Returns:
            What was loaded, or None when nothing is newer.

        Raises:
            WeightMismatch: Names, shapes or dtypes differ; nothing was loaded.
            WeightCorrupt: A chunk does not match its checksum; nothing was loaded.
            DecodeError: The manifest is damaged; nothing was loaded.
            WeightError: Chunks were evicted again and again while they were fetched.
            StoreUnavailable: Redis stayed away.
        """
        return self._trying(lambda: self._poll(target, strict=strict))

    def fetch(self, version: int | None = None) -> dict[str, Tensor]:
        """Return a whole state dict on the CPU, in memory of its own; tied tensors stay tied.

        Args:
            version: One that is kept; default: the newest.

        Raises:
            WeightError: There is no such version.
            WeightCorrupt: A chunk does not match its checksum.
            DecodeError: The manifest is damaged.
            StoreUnavailable: Redis stayed away.
        """
        if version is not None and (type(version) is not int or not 1 <= version <= MAX_VERSION):
            raise ConfigError(f"version={version!r}: it is an integer from 1 to 2**53 - 1.")
        return self._trying(lambda: self._fetch(version))

    def wait(self, newer_than: int | None = None, *, timeout: float | None = None) -> WeightVersion:
        """Wait until a version is published, without polling; nothing is loaded.

        Args:
            newer_than: Wait for a version larger than this; default: than the one loaded last.
            timeout: Seconds; None waits for ever.

        Returns:
            The newest version.

        Raises:
            WeightTimeout: None came in time.
            StoreUnavailable: Redis stayed away.
        """
        after = (self._version or 0) if newer_than is None else newer_than
        if type(after) is not int or not 0 <= after <= MAX_VERSION:
            raise ConfigError(f"newer_than={newer_than!r}: it is an integer from 0 to 2**53 - 1.")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
            patience_s = min(left, self._client.retry_s)
            entry = self._newer_than(after, retry_s=patience_s)
            if entry is not None:
                return entry.described
            if not left:
                raise self._timeout(after, timeout or 0.0)
            self._block(after, min(left, _BLOCK_S), retry_s=patience_s)

    def _trying(self, attempt: Callable[[], T]) -> T:
        """Run an attempt, and again from the newest version when a chunk is gone or damaged."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return attempt()
            except (ChunkGoneError, WeightCorrupt):
                continue
        try:
            return attempt()
        except ChunkGoneError as error:
            raise WeightError(
                f"weights {self._name!r}: chunks were gone {_ATTEMPTS} times while they were "
                "fetched. Let the publisher keep more versions (keep=), and check that the "
                "server's maxmemory-policy is noeviction."
            ) from error

    def _poll(self, target: Target, *, strict: Strict) -> WeightVersion | None:
        entry = self._newer_than(self._version or 0)
        if entry is None:
            return None
        manifest = entry.manifest
        targets = target_tensors(target)
        names = check_fits(manifest.layout, targets, strict=strict)
        values = empty_tensors(manifest.layout, names)
        Filler(self._client, self._keys, manifest, values).fill()
        with self.lock:
            if manifest.version <= (self._version or 0):
                return None  # another thread was faster
            load_in_place(values, targets)
            self._version = manifest.version
        return entry.described

    def _fetch(self, version: int | None) -> dict[str, Tensor]:
        entry = self._newer_than(0) if version is None else self._entry(version)
        if entry is None:
            newest = self.latest()
            told = f"the newest is {newest.version}" if newest else "nothing is published yet"
            wanted = "" if version is None else f"version {version} of "
            raise WeightError(f"no {wanted}weights {self._name!r} to fetch: {told}.")
        layout = entry.manifest.layout
        values = empty_tensors(layout, [tensor.name for tensor in layout.tensors])
        Filler(self._client, self._keys, entry.manifest, values).fill()
        return values

    def _newer_than(self, version: int, *, retry_s: float | None = None) -> _Entry | None:
        """Return the newest version if it is larger than `version`."""
        least = f"{version + 1}-0"
        found = self._client.execute(
            "XREVRANGE", self._keys.versions, "+", least, "COUNT", 1, retry_s=retry_s
        )
        return self._parse(found[0]) if found else None

    def _entry(self, version: int) -> _Entry | None:
        found = self._client.execute("XRANGE", self._keys.versions, f"{version}-0", f"{version}-0")
        return self._parse(found[0]) if found else None

    def _parse(self, entry: Reply) -> _Entry:
        number = _ID.fullmatch(entry[0])
        fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
        created_ms = fields.get(b"created_ms", b"")
        if number is None or not created_ms.isdigit() or len(created_ms) > 16:
            raise DecodeError(f"weights {self._name!r}: {entry[0]!r:.40} is not a version's entry.")
        manifest = decode_manifest(fields.get(b"manifest", b""))
        if manifest.version != int(number[1]):
            raise DecodeError(
                f"weights {self._name!r}: the entry {entry[0]!r} holds version {manifest.version}."
            )
        return _Entry(manifest, manifest.describe(self._name, int(created_ms) / 1000))

    def _block(self, version: int, seconds: float, *, retry_s: float) -> None:
        """Wait until there may be a version larger than `version`, at most `seconds`."""

        def attempt() -> None:
            with self._client.connection() as connection:
                silence = connection.socket_timeout
                block_s = seconds if silence is None else min(seconds, silence / 2)
                block_ms = max(1, round(block_s * 1000))
                pipeline = Pipeline()
                pipeline.add(
                    "XREAD", "BLOCK", block_ms, "STREAMS", self._keys.versions, f"{version}-0"
                )
                pipeline.send(connection)
                reply = read_reply(connection)
            if isinstance(reply, Exception):
                raise reply

        self._client.retrying(attempt, retry_s=retry_s)

    def _timeout(self, version: int, waited_s: float) -> WeightTimeout:
        newest = self._newer_than(0, retry_s=0)
        return WeightTimeout(
            name=self._name,
            newer_than=version,
            newest=newest.manifest.version if newest else None,
            waited_s=waited_s,
        )
