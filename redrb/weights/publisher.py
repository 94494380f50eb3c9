"""Publishing: stage the chunks of a version, then make it the newest in one atomic step."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Iterator

from redrb import scripts
from redrb.connection import Client
from redrb.connection.transport import Argument, Reply
from redrb.errors import (
    ConfigError,
    EncodeError,
    PublisherFenced,
    StoreError,
    StoreFull,
    WeightError,
)
from redrb.keys import WeightKeys
from redrb.weights.chunks import Chunk, Cutter, batches, stage
from redrb.weights.layout import CHUNK_BYTES, Layout
from redrb.weights.manifest import (
    MAX_CHUNKS,
    MAX_MANIFEST_BYTES,
    MAX_VERSION,
    Manifest,
    WeightVersion,
    encode_manifest,
)
from redrb.weights.tensors import State, lay_out, state_tensors

_log = logging.getLogger("redrb")

_TELL_S = 1.0
"""How long each task that follows may keep a publisher waiting while Redis is away."""

_STAGING_S = 600
_SLOWEST_BYTES_PER_S = 10_000_000  # staged chunks live long enough even then


class WeightPublisher:
    """The one publisher of the weights `name`; making another one takes over from it.

    Readers see the version before or the new one, whole, wherever a publisher is killed; what it
    had staged expires.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights.
        namespace: Keeps experiments on one server apart.
        keep: Versions kept; older ones are deleted. One more has to fit while it is published. A
            reader that is slower than `keep` publishes starts again.

    Raises:
        ConfigError: A name or number is not usable.
        StoreUnavailable: Redis could not be reached.
    """

    def __init__(
        self, client: Client, name: str, *, namespace: str = "default", keep: int = 2
    ) -> None:
        if type(keep) is not int or keep < 1:
            raise ConfigError(f"keep={keep!r}: the number of versions kept is at least 1.")
        self._client = client
        self._keys = WeightKeys.of(namespace, name)
        self._name = name
        self._keep = keep
        self._owner = uuid.uuid4().hex
        self._last = 0
        self._publishing = threading.Lock()
        self._run("weights_take_over", self._owner)

    def __repr__(self) -> str:
        return f"<redrb.WeightPublisher {self._name!r} on {self._client.where}>"

    def publish(self, state: State, *, version: int | None = None) -> WeightVersion:
        """Publish a version; when this returns, every reader can have it.

        What the tensors hold during the call is published: do not train until it returns. Tied
        tensors are sent once, strided and CUDA ones are copied one by one, all others not at all.

        Args:
            state: A module (its parameters and persistent buffers), a state dict, or an iterable
                of (name, tensor).
            version: Its number, larger than every one before; default: one more than the last.

        Raises:
            ConfigError: `version` is not larger than the newest one.
            EncodeError: Something in `state` cannot be published. Nothing was sent.
            PublisherFenced: Another publisher of this name was made after this one.
            StoreFull: Redis is at its memory limit; nothing of this version is left there.
            StoreUnavailable: Redis stayed away; with `uncertain` the version may be published.
        """
        if version is not None and (type(version) is not int or not 1 <= version <= MAX_VERSION):
            raise ConfigError(f"version={version!r}: it is an integer from 1 to 2**53 - 1.")
        tensors = state_tensors(state)
        layout = lay_out(tensors, CHUNK_BYTES)
        if layout.chunks > MAX_CHUNKS:
            raise EncodeError(f"{layout.nbytes} bytes are more than a version may hold.")
        with self._publishing:
            token, newest = self._begin()
            number = max(newest, self._last) + 1 if version is None else version
            if not newest < number <= MAX_VERSION:
                raise ConfigError(
                    f"version {number} of weights {self._name!r} is not newer than {newest}, which "
                    "is published: leave `version` out, or give a larger one."
                )
            try:
                published = self._publish(Cutter(tensors), layout, token, number)
            except BaseException as error:
                self._discard(token, number, layout.chunks)
                if isinstance(error, StoreFull):
                    raise self._full(layout) from error
                raise
            self._last = number
            self._tell_followers(number)
            return published

    def _begin(self) -> tuple[int, int]:
        """Return the token of this attempt and the newest version, 0 when there is none."""
        reply = self._run("weights_begin", self._owner)
        if reply[0] == b"fenced":
            raise self._fenced()
        return reply[1], reply[2]

    def _publish(self, cutter: Cutter, layout: Layout, token: int, version: int) -> WeightVersion:
        expire_s = _STAGING_S + layout.nbytes // _SLOWEST_BYTES_PER_S
        checksums: list[int] = []
        for batch in batches(self._cut(cutter, layout, token, version)):
            stage(self._client, batch, expire_s=expire_s)
            checksums += [chunk.checksum for chunk in batch]
        return self._commit(Manifest(version, token, layout, tuple(checksums)))

    def _cut(self, cutter: Cutter, layout: Layout, token: int, version: int) -> Iterator[Chunk]:
        for index, spans in enumerate(layout.spans()):
            key = self._keys.chunk(token, version, index)
            yield cutter.cut(key, spans, layout.size(index))

    def _commit(self, manifest: Manifest) -> WeightVersion:
        stored = encode_manifest(manifest)
        if len(stored) > MAX_MANIFEST_BYTES:
            raise EncodeError(f"{len(manifest.layout.tensors)} tensors: their list is too long.")
        chunks = manifest.layout.chunks
        reply = self._run(
            "weights_commit",
            self._owner,
            manifest.token,
            manifest.version,
            chunks,
            self._keep,
            manifest.kind,
            stored,
        )
        if reply[0] == b"ok":
            return manifest.describe(self._name, int(reply[1]) / 1000)
        if reply[0] == b"fenced":
            raise self._fenced()
        if reply[0] == b"stale":
            raise ConfigError(
                f"version {manifest.version} of weights {self._name!r} is not newer than "
                f"{reply[1]}, which was published meanwhile."
            )
        raise WeightError(
            f"only {reply[1]} of {chunks} chunks of version {manifest.version} are still in Redis "
            "at the commit: it evicts or lost them. Set maxmemory-policy to noeviction, and "
            "publish again."
        )

    def _tell_followers(self, version: int) -> None:
        """Tell the tasks that follow these weights; one that is missed learns the next version."""
        try:
            for stream in self._client.execute("SMEMBERS", self._keys.followers):
                script = scripts.load("advance")
                scripts.run(self._client, script, [stream], [version], retry_s=_TELL_S)
        except StoreError as error:
            _log.warning(
                "weights %r: not every task knows version %d: %s", self._name, version, error
            )

    def _discard(self, token: int, version: int, chunks: int) -> None:
        """Delete what was staged; without an answer from Redis it expires."""
        with contextlib.suppress(StoreError):
            self._run("weights_discard", token, version, chunks, retry_s=0)

    def _run(self, script: str, *arguments: Argument, retry_s: float | None = None) -> Reply:
        keys = [self._keys.versions]
        return scripts.run(self._client, scripts.load(script), keys, arguments, retry_s=retry_s)

    def _fenced(self) -> PublisherFenced:
        return PublisherFenced(
            f"another publisher of weights {self._name!r} was started after this one, which may "
            "publish no more. Stop one of the two; a new WeightPublisher takes over again."
        )

    def _full(self, layout: Layout) -> StoreFull:
        return StoreFull(
            f"Redis at {self._client.where} is at its memory limit. A version of weights "
            f"{self._name!r} takes {layout.nbytes} bytes, and {self._keep} + 1 of them have to "
            "fit: raise maxmemory, or keep fewer versions.",
            reason="memory",
        )
