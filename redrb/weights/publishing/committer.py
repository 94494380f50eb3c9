"""`Committer`: begins and commits versions of one name, and tells tasks of new versions."""

from __future__ import annotations

import contextlib
import logging
import uuid

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.connection.transport import Argument, Reply
from redrb.errors import ConfigError, EncodeError, PublisherFenced, StoreError
from redrb.keys import WeightKeys
from redrb.weights.publishing.staging import BegunVersion, StagingAttempt
from redrb.weights.wire import stored_keys
from redrb.weights.wire.calls import Advance, call
from redrb.weights.wire.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_VERSION,
    Manifest,
    WeightVersion,
)
from redrb.weights.wire.manifest_codec import encode_manifest

_log = logging.getLogger("redrb")

_SKIPPED = 1000
"""Tokens that are left out once Redis has given one twice: more than a failover may have lost."""

_FOLLOWER_S = 1.0
"""How long each task that follows the weights may delay a publisher while Redis is away."""


class Committer:
    """Begins and commits versions of one name; a newer committer takes over from it."""

    def __init__(
        self, client: Client, keys: WeightKeys, name: str, *, keep: int, max_bytes: int
    ) -> None:
        self._client = client.at(keys.versions)
        self._everywhere = client
        self._keys = keys
        self._name = name
        self._keep = keep
        self._max_bytes = max_bytes
        self._owner = b""
        self._is_fenced = False
        self._last = 0
        self._token = 0
        self._spread = stored_keys.spread_of(client)

    def take_over(self) -> None:
        """Become the owner of the name: the owner before can commit nothing more."""
        self._owner = self._run("weights/take_over", uuid.uuid4().hex)

    def begin(self, version: int | None) -> BegunVersion:
        """Begin a version, or raise ConfigError or PublisherFenced."""
        if self._is_fenced:  # also by a server that has lost its data since
            raise self._fenced()
        reply = self._run("weights/begin", self._owner, self._token)
        if reply[0] == b"fenced":
            raise self._fenced()
        _, token, newest, newest_state, trash = reply
        self._token = token
        if trash:
            stored_keys.clean(self._everywhere, self._keys, self._spread)
        if newest > MAX_VERSION:
            key = self._keys.versions
            last = self._client.execute("XREVRANGE", key, "+", "-", "COUNT", 1)[0][0].decode()
            raise StoreError(
                f"the stream {key} ends with the entry {last}, which is no version: another "
                "program has written it. Delete it, and publish again: redis-cli XDEL "
                f"'{key}' {last}"
            )
        number = max(newest, self._last) + 1 if version is None else version
        if not newest < number <= MAX_VERSION:
            raise ConfigError(
                f"version {number} of weights {self._name!r} is not larger than {newest}, which "
                "is published: leave `version` out, or give a larger number."
            )
        return BegunVersion(number, token, newest_state, self._spread)

    def skip_tokens(self) -> None:
        """Begin the next version with a token that is larger by `_SKIPPED`."""
        self._token += _SKIPPED

    def commit(self, begun: BegunVersion, manifest: Manifest) -> WeightVersion | None:
        """Make a version the newest; None if chunks that it needs are gone."""
        stored = encode_manifest(manifest)
        if len(stored) > MAX_MANIFEST_BYTES:
            raise EncodeError(
                f"the manifest of {manifest.names} tensors takes {len(stored)} bytes; the limit is "
                f"{MAX_MANIFEST_BYTES}."
            )
        staged = stored_keys.staged_ranges(manifest, begun.token)
        outcome = self._run("weights/prepare", self._owner, begun.token, staged)
        if outcome == b"fenced":
            raise self._fenced()
        if outcome != b"ok" or not stored_keys.keep(
            self._everywhere, self._keys, manifest, begun.token
        ):
            return None
        described = manifest.describe(self._name, 0.0)
        delta = manifest.delta
        reply = self._run(
            "weights/commit",
            self._owner,
            begun.token,
            manifest.version,
            self._keep,
            self._max_bytes,
            manifest.kind,
            delta.base if delta is not None else manifest.base,
            manifest.nbytes,
            described.stored_bytes,
            "" if described.delta_bytes is None else described.delta_bytes,
            manifest.names,
            stored_keys.ranges(manifest.sources),
            stored_keys.ranges(stored_keys.pieces_of(manifest)),
            stored,
        )
        if reply[0] == b"fenced":
            raise self._fenced()
        if reply[0] == b"stale":
            raise ConfigError(
                f"version {manifest.version} of weights {self._name!r} is not larger than "
                f"{reply[1]}, which was published meanwhile."
            )
        if reply[0] != b"ok":
            return None
        self._last = manifest.version
        self._trim(*reply[2:])
        self._advance_followers(manifest.version)
        return manifest.describe(self._name, int(reply[1]) / 1000)

    def discard(self, attempt: StagingAttempt) -> None:
        """Delete the keys of an attempt; if Redis does not answer, they are deleted later."""
        begun = attempt.begun
        with contextlib.suppress(StoreError), Deadline(repeat_s=0.0):
            outcome, *trash = self._run("weights/discard", begun.token, begun.version)
            if outcome == b"ok":
                stored_keys.delete(self._everywhere, attempt.staged_keys())
            if trash == [1]:
                stored_keys.clean(self._everywhere, self._keys, self._spread)

    def _trim(self, more: int, after: bytes, trash: int) -> None:
        """Go on to delete versions that are not kept; where that fails, the next version does."""
        try:
            while more:
                reply = self._run("weights/trim", self._owner, self._keep, self._max_bytes, after)
                if reply[0] != b"ok":
                    return
                _, more, after, trash = reply
            if trash:
                stored_keys.clean(self._everywhere, self._keys, self._spread)
        except StoreError as error:
            _log.warning("weights %r: %s", self._name, error)

    def _advance_followers(self, version: int) -> None:
        """Set the newest version in the tasks that follow these weights.

        A task that could not be reached learns the next version. A task that was deleted follows no
        more; one that is created anew registers again, perhaps just before it is removed here.
        """
        followers = self._keys.followers
        try:
            for stream in self._client.execute("SMEMBERS", followers):
                if not self._advance(stream, version):
                    self._client.execute("SREM", followers, stream)
                    if self._advance(stream, version):
                        self._client.execute("SADD", followers, stream)
        except StoreError as error:
            _log.warning(
                "weights %r: not every task has learned of version %d: %s",
                self._name,
                version,
                error,
            )

    def _advance(self, stream: bytes, version: int) -> bool:
        """Give a task the newest version; False when there is no such task."""
        client = self._everywhere.at(stream)
        with Deadline(repeat_s=_FOLLOWER_S):
            return Advance(version).run(client, [stream]) >= 0

    def _run(self, script: str, *arguments: Argument) -> Reply:
        return call(self._client, self._keys, script, *arguments)

    def _fenced(self) -> PublisherFenced:
        self._is_fenced = True
        return PublisherFenced(
            f"another publisher of weights {self._name!r} was started after this one, which can "
            "publish no more. Stop one of the two; a new WeightPublisher takes over again."
        )
