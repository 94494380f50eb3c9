"""`Committer`: begins and commits versions of one name, and tells tasks of new versions."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from redrb.checks import MOST
from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.errors import ConfigError, EncodeError, PublisherFenced, StoreError, StoreFull
from redrb.keys import WeightKeys
from redrb.processes import process_name
from redrb.weights.publishing.upload import TokenUsedError, Upload
from redrb.weights.tensors.state import StateBytes
from redrb.weights.wire import stored_keys
from redrb.weights.wire.calls import (
    Advance,
    Begin,
    Commit,
    Discard,
    Kept,
    Prepare,
    TakeOver,
    Trim,
    run,
)
from redrb.weights.wire.manifest import MAX_MANIFEST_BYTES, Manifest, WeightVersion

_log = logging.getLogger("redrb")

_SKIPPED = 1000
"""Tokens that are left out once Redis has given one twice: more than a failover may have lost."""

_OWNER = re.compile(r"([0-9]{1,17}) ([A-Za-z0-9._-]{1,64})-([0-9]{1,10})-[0-9a-f]{20}")
"""When an owner took over, in microseconds, and what `process_name` says: its host and process."""

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
        self._owner = ""
        self._is_fenced = False
        self._last = 0
        self._token = 0
        self._followers: set[bytes] = set()

    def take_over(self) -> None:
        """Become the owner of the name: the owner before can commit nothing more."""
        self._owner = run(self._client, self._keys, TakeOver(process_name()))

    def begin(self, version: int | None, source: StateBytes) -> Upload:
        """Begin a version, or raise ConfigError or PublisherFenced."""
        if self._is_fenced:  # also by a server that has lost its data since
            raise self._fenced()
        begun = run(self._client, self._keys, Begin(self._owner, self._token))
        if begun.outcome == "fenced":
            raise self._fenced()
        self._token, newest = begun.token, begun.newest
        if begun.trash:
            stored_keys.clean(self._everywhere, self._keys)
        if newest > MOST:
            key = self._keys.versions
            last = self._client.execute("XREVRANGE", key, "+", "-", "COUNT", 1)[0][0].decode()
            raise StoreError(
                f"the stream {key} ends with the entry {last}, which is no version: another "
                "program has written it. Delete it, and publish again: redis-cli XDEL "
                f"'{key}' {last}"
            )
        number = max(newest, self._last) + 1 if version is None else version
        if not newest < number <= MOST:
            raise ConfigError(
                f"version {number} of weights {self._name!r} is not larger than {newest}, which "
                "is published: leave `version` out, or give a larger number."
            )
        return Upload(self._everywhere, self._keys, source, number, begun)

    def is_asked(self) -> bool:
        """Return whether a reader has asked for another version."""
        return bool(self._client.execute("EXISTS", self._keys.asked))

    @contextlib.contextmanager
    def discarding(self, attempt: Upload) -> Iterator[None]:
        """Discard an attempt at the end of the block, unless it is committed there.

        The block ends without an error where another attempt has had its token: the next one gets a
        token that is larger by `_SKIPPED`.

        Raises:
            StoreFull: As the block raises it, with the room that a version takes.
        """
        try:
            yield
        except TokenUsedError:
            self._token += _SKIPPED
        except StoreFull as error:
            raise StoreFull(
                f"Redis at {self._everywhere.where} is at its memory limit. A full version of "
                f"weights {self._name!r} takes {attempt.nbytes} bytes; Redis needs room for three "
                "of them, and for the deltas between (docs/how-to/size-a-redis.md): raise "
                "maxmemory, or lower keep= or max_bytes=.",
                reason="memory",
            ) from error
        finally:
            if not attempt.is_committed:
                self.discard(attempt)

    def commit(self, attempt: Upload, manifest: Manifest) -> WeightVersion | None:
        """Make a version the newest; None if chunks that it needs are gone."""
        stored = msgspec.msgpack.encode(manifest)
        if len(stored) > MAX_MANIFEST_BYTES:
            raise EncodeError(
                f"the manifest of {manifest.names} tensors takes {len(stored)} bytes; the limit is "
                f"{MAX_MANIFEST_BYTES}."
            )
        token = str(attempt.token)
        prepare = Prepare(self._owner, token, stored_keys.uploaded_ranges(manifest, attempt.token))
        outcome = run(self._client, self._keys, prepare)
        if outcome == "fenced":
            raise self._fenced()
        if outcome != "ok" or not stored_keys.keep(
            self._everywhere, self._keys, manifest, attempt.token
        ):
            return None
        described = manifest.describe(self._name, 0.0)
        delta = manifest.delta
        commit = Commit(
            owner=self._owner,
            token=token,
            version=manifest.version,
            keep=self._keep,
            max_bytes=self._max_bytes,
            kind=manifest.kind,
            base=delta.base if delta is not None else manifest.base,
            nbytes=str(manifest.nbytes),
            stored=described.stored_bytes,
            delta="" if delta is None else str(delta.nbytes),
            names=str(manifest.names),
            full=stored_keys.ranges(manifest.sources),
            pieces=stored_keys.ranges(stored_keys.pieces_of(manifest)),
        )
        committed = run(self._client, self._keys, commit, stored)
        if committed.outcome == "fenced":
            raise self._fenced()
        if committed.outcome == "stale":
            raise ConfigError(
                f"version {manifest.version} of weights {self._name!r} is not larger than "
                f"{committed.newest}, which was published meanwhile."
            )
        if committed.outcome != "ok":
            return None
        attempt.is_committed = True
        self._last = manifest.version
        self._trim(committed)
        self._advance_followers(manifest.version)
        return manifest.describe(self._name, committed.created_ms / 1000)

    def discard(self, attempt: Upload) -> None:
        """Delete the keys of an attempt; if Redis does not answer, they are deleted later."""
        with contextlib.suppress(StoreError), Deadline(repeat_s=0.0):
            discard = Discard(str(attempt.token), attempt.version)
            discarded = run(self._client, self._keys, discard)
            if not discarded.committed:
                stored_keys.delete(self._everywhere, attempt.uploaded_keys())
            if discarded.trash:
                stored_keys.clean(self._everywhere, self._keys)

    def _trim(self, page: Kept) -> None:
        """Go on to delete versions that are not kept; where that fails, the next version does."""
        try:
            while page.more:
                trim = Trim(self._owner, self._keep, self._max_bytes, page.after)
                page = run(self._client, self._keys, trim)
            if page.trash:
                stored_keys.clean(self._everywhere, self._keys)
        except StoreError as error:
            _log.warning("weights %r: %s", self._name, error)

    def _advance_followers(self, version: int) -> None:
        """Set the newest version in the tasks that follow these weights.

        A task that could not be reached learns the next version. A task that was deleted follows no
        more; one that is created anew registers again, perhaps just before it is removed here.
        Tasks are entered again if Redis has lost the list, which may be on another node than they.
        """
        key = self._keys.followers
        try:
            listed = set(self._client.execute("SMEMBERS", key))
            for stream in listed | self._followers:
                follows = self._advance(stream, version)
                if not follows and stream in listed:
                    self._client.execute("SREM", key, stream)
                    follows = self._advance(stream, version)
                    listed.discard(stream)
                if follows and stream not in listed:
                    self._client.execute("SADD", key, stream)
                (self._followers.add if follows else self._followers.discard)(stream)
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

    def _fenced(self) -> PublisherFenced:
        self._is_fenced = True
        return PublisherFenced(
            f"another publisher of weights {self._name!r} was started after this one, or they were "
            f"deleted{self._newer()}: this one can publish no more. Stop one of the two; a new "
            "WeightPublisher takes over again."
        )

    def _newer(self) -> str:
        """Return where and when the owner took over; "" if that is not known."""
        with contextlib.suppress(StoreError), Deadline(repeat_s=0.0):
            owner = self._client.execute("HGET", f"{self._keys.prefix}fence", "owner") or b""
            found = _OWNER.fullmatch(owner.decode(errors="replace"))
            if found is not None:
                began = datetime.fromtimestamp(int(found[1]) / 1e6, UTC)
                return f", by process {found[3]} on {found[2]}, at {began:%Y-%m-%d %H:%M:%S} UTC"
        return ""
