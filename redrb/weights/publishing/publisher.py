"""Publishing: stage a version's chunks, then make it the newest in one atomic step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from redrb.checks import checked_int, checked_int_or_none
from redrb.connection import Client, check_client
from redrb.errors import ConfigError, EncodeError, StoreFull, WeightError
from redrb.keys import WeightKeys
from redrb.weights.lora import LoraConfig, adapter_of, configs_to_wire
from redrb.weights.publishing.baseline import Baseline
from redrb.weights.publishing.committer import BegunVersion, Committer
from redrb.weights.publishing.manifest_assembly import assemble_manifest
from redrb.weights.publishing.rank_publishing import FollowingRank, LeadingRank, RankPublisher
from redrb.weights.publishing.staging import StagingAttempt, StagingPlace
from redrb.weights.tensors.copying import plain
from redrb.weights.tensors.dtypes import published_dtype
from redrb.weights.tensors.names import StateLike
from redrb.weights.tensors.published_state import lay_out, state_shards
from redrb.weights.tensors.shard import TensorShard
from redrb.weights.tensors.state import State
from redrb.weights.wire.layout import CHUNK_BYTES, Layout
from redrb.weights.wire.manifest import MAX_CHUNKS, MAX_VERSION, WeightVersion

_log = logging.getLogger("redrb")

_ATTEMPTS = 3


class _Submission(Future[WeightVersion]):
    """A version on its way, which cannot be cancelled any more.

    Attributes:
        seen: Whether anybody has looked at how it ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> WeightVersion:
        """Return the version, or raise why there is none."""
        found = self.exception(timeout)
        if found is not None:
            raise found
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why there is no version, None where there is one."""
        found = super().exception(timeout)
        self.seen = True
        return found


class WeightPublisher:
    """The one publisher of the weights `name`; making another one takes over from it.

    Readers see the version before or the new one, whole, wherever a publisher is killed; what it
    had staged expires.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights.
        namespace: Keeps experiments on one server apart.
        keep: Versions that a reader can fetch; older ones are deleted, but what these stand on
            (a full version and the deltas after it) and what a reader is fetching.
        max_bytes: Keep fewer than `keep` where they take more bytes than this; the newest always
            stays. Default: any number.
        dtype: Publish floating-point tensors as this dtype, such as "bfloat16" or
            torch.bfloat16; default: as they
            are. Deltas of float32 are hardly smaller than the weights.
        deltas: Send what changed, where that is little, exactly. Takes as much memory on the host
            as a version. False: every version is sent in full.
        anchor_every: Every so many versions one is stored in full, for readers that join.
        rank: Rank of this process where several publish together: each calls `publish` as often
            as the others, with what it has (`DTensor`s, or `TensorShard`s), sends its own shards,
            and rank 0 commits the version.
        world_size: Number of ranks.
        timeout: Seconds that ranks wait for each other.

    Raises:
        ConfigError: A name or number is not usable.
        StoreUnavailable: Redis could not be reached.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        namespace: str = "default",
        keep: int = 2,
        max_bytes: int | None = None,
        dtype: str | torch.dtype | None = None,
        deltas: bool = True,
        anchor_every: int = 25,
        rank: int = 0,
        world_size: int = 1,
        timeout: float = 300.0,
    ) -> None:
        check_client(client)
        keep, world_size = checked_int("keep", keep, 1), checked_int("world_size", world_size, 1)
        rank = checked_int("rank", rank, 0, world_size - 1)
        anchor_every = checked_int("anchor_every", anchor_every, 1)
        max_bytes = checked_int_or_none("max_bytes", max_bytes, 1)
        self._client = client
        self._keys = WeightKeys.of(namespace, name)
        self._name = name
        self._cast = published_dtype(dtype)
        self._memory = Baseline(deltas=deltas, anchor_every=anchor_every)
        self._issuer = Committer(client, self._keys, name, keep=keep, max_bytes=max_bytes or 0)
        self._publishing = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._submitted: _Submission | None = None
        self._closed = False
        self._ranks: RankPublisher | None = None
        if rank:
            self._ranks = FollowingRank(
                *(client, self._keys, self._issuer, self._memory),
                name=name,
                rank=rank,
                timeout=timeout,
            )
            return
        if world_size > 1:
            self._ranks = LeadingRank(
                *(client, self._keys, self._issuer, self._memory),
                world_size=world_size,
                timeout=timeout,
            )
        self._issuer.take_over()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<redrb.WeightPublisher {self._name!r} on {self._client.where}>"

    def publish(self, state: StateLike, *, version: int | None = None) -> WeightVersion:
        """Publish a version; when this returns, every reader can have it.

        What the tensors hold during the call is published: do not train until it returns. It is
        sent as a delta to the version before, or in full: whichever is less, and in full every
        `anchor_every` versions, when names or shapes changed, and whenever it is not certain what
        the version before was. Tied tensors are sent once, and so is a chunk of a full version
        that is in the full version before (frozen tensors).

        Args:
            state: A module (its parameters and persistent buffers), several by name
                (`{"actor": actor, "critic": critic}`: tensors are named `actor.<name>`, and a
                reader never mixes versions of them), a state dict, or an iterable of
                (name, tensor).
            version: Its number, larger than every one before; default: one more than the last.

        Raises:
            ConfigError: `version` is not larger than the newest one.
            EncodeError: Something in `state` cannot be published. Nothing was sent.
            PublisherFenced: Another publisher of this name was made after this one.
            StoreFull: Redis is at its memory limit; nothing of this version is left there.
            StoreUnavailable: Redis stayed away; with `uncertain` the version may be published.
        """
        layout, shards = self._prepared(state, version)
        with self._publishing:
            self._wait_for_submitted()
            self._check_open()
            return self._publish(layout, shards, version)

    def publish_lora(
        self,
        model: nn.Module | tuple[Mapping[str, Any], Mapping[str, LoraConfig]],
        *,
        version: int | None = None,
    ) -> WeightVersion:
        """Publish only the LoRA adapter of a model (Hu et al. 2021, arXiv:2106.09685).

        Readers whose model has the same LoRA layers load it there; others merge it into the
        weights that this publisher published last, or, where it published none, into their own.

        Args:
            model: With LoRA layers of PEFT or ColossalAI (`lora_A`, `lora_B`); or tensors
                `<layer>.lora_A` and `<layer>.lora_B` and settings by layer.
            version: As in `publish`.

        Raises:
            ConfigError: There are no LoRA layers, or `version` is not larger than the newest one.
            EncodeError: Tensors and settings do not fit each other. Nothing was sent.
            PublisherFenced, StoreFull, StoreUnavailable: As `publish` does.
        """
        version = checked_int_or_none("version", version, 1, MAX_VERSION)
        if self._ranks is not None:
            raise ConfigError(
                "one rank publishes an adapter: make a publisher without rank= for it."
            )
        tensors, configs = adapter_of(model)
        shards = self._shards(tensors)
        layout = self._laid_out(shards)
        with self._publishing:
            self._wait_for_submitted()
            self._check_open()
            return self._publish(layout, shards, version, adapter=configs_to_wire(configs))

    def submit(self, state: StateLike, *, version: int | None = None) -> Future[WeightVersion]:
        """Publish beside training: copies the tensors, and encodes and sends them in a thread.

        When this returns, training may go on. Takes as much memory on the host as a version once
        more. One version is on its way at a time: the next call waits until it is published.

        Returns:
            What `publish` returns, or raises. Where it failed, that is logged, and `close` raises
            it if nobody has looked.
        """
        layout, shards = self._prepared(state, version)
        with self._publishing:
            self._wait_for_submitted()
            self._check_open()
            copied = {
                entry.name: _copied(shards[entry.name])
                for entry in layout.tensors
                if entry.alias is None
            }
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="redrb-publisher")
            self._submitted = _Submission()
            self._thread.submit(self._end, self._submitted, layout, copied, version)
            return self._submitted

    def close(self) -> None:
        """Wait for what `submit` has on its way, and end its thread.

        Raises:
            RedrbError: The last version that was submitted failed, and nobody has looked.
        """
        with self._publishing:
            self._closed = True
            last, self._submitted = self._submitted, None
            if self._thread is not None:
                self._thread.shutdown()
        if last is not None and not last.seen:
            last.result()

    def _end(
        self,
        submission: _Submission,
        layout: Layout,
        shards: Mapping[str, TensorShard],
        version: int | None,
    ) -> None:
        try:
            published = self._publish(layout, shards, version)
        except BaseException as error:  # noqa: BLE001 (it is the future's)
            _log.warning("weights %r: what was submitted is not published: %s", self._name, error)
            submission.set_exception(error)
        else:
            submission.set_result(published)

    def _wait_for_submitted(self) -> None:
        if self._submitted is not None:
            wait([self._submitted])

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this publisher was closed: make a new one.")

    def _prepared(
        self, state: StateLike, version: int | None
    ) -> tuple[Layout, dict[str, TensorShard]]:
        """Return what is to be published; where it cannot be, other ranks are told."""
        try:
            version = checked_int_or_none("version", version, 1, MAX_VERSION)
            shards = self._shards(state)
            return self._laid_out(shards), shards
        except (ConfigError, EncodeError) as error:
            if self._ranks is not None:
                with self._publishing:
                    self._wait_for_submitted()
                    self._ranks.give_up(error)
            raise

    def _shards(self, state: StateLike) -> dict[str, TensorShard]:
        shards = state_shards(state)
        for name, shard in shards.items():
            if not shard.is_whole and self._ranks is None:
                raise EncodeError(
                    f"{name!r} is one rank's shard: publish it on all ranks together, with rank= "
                    "and world_size=."
                )
        return shards

    def _laid_out(self, shards: Mapping[str, TensorShard]) -> Layout:
        layout = lay_out(shards, CHUNK_BYTES, self._cast)
        if self._ranks is not None:  # the next rank's part begins with a chunk of its own
            layout = replace(layout, nbytes=layout.chunks * layout.chunk_bytes)
        if layout.chunks > MAX_CHUNKS:
            raise EncodeError(f"{layout.nbytes} bytes are more than a version may hold.")
        return layout

    def _publish(
        self,
        layout: Layout,
        shards: Mapping[str, TensorShard],
        version: int | None,
        adapter: Any = None,
    ) -> WeightVersion:
        owners = (entry.name for entry in layout.tensors if entry.alias is None)
        source = State(layout, {name: plain(shards[name].tensor) for name in owners})
        if self._ranks is not None:
            return self._ranks.publish(source, version)
        for _ in range(_ATTEMPTS):
            begun = self._issuer.begin(version)
            published = self._attempt(source, begun, adapter)
            if published is not None:
                return published
            self._memory.forget()  # what it stands on is gone: all of it is sent
        raise WeightError(
            f"weights {self._name!r}: chunks were gone at the commit: Redis evicts or lost them. "
            "Set maxmemory-policy to noeviction, and publish again."
        )

    def _attempt(self, source: State, begun: BegunVersion, adapter: Any) -> WeightVersion | None:
        """Publish once; None when what it stands on is gone."""
        place = StagingPlace(begun.version, begun.token, 0, self._issuer.spread)
        attempt = StagingAttempt(self._client, self._keys, place, source)
        try:
            if adapter is not None:
                part = attempt.stage(None, whole=True)
                manifest = assemble_manifest(
                    [part], kind="lora", base=begun.newest_state, adapter=adapter
                )
                published = self._issuer.commit(begun, manifest)
            else:
                difference = self._memory.difference(source, begun.newest_state)
                whole = difference is None or self._memory.anchor_due
                part = attempt.stage(difference, whole=whole, anchor=self._memory.anchor)
                manifest = assemble_manifest(
                    [part],
                    kind="full" if whole else "delta",
                    base=difference.base if difference is not None else 0,
                    before=self._memory.checksums if difference is not None else (),
                )
                published = self._issuer.commit(begun, manifest)
                if published is not None:
                    self._memory.advance(manifest, source, part, difference)
        except BaseException as error:
            self._issuer.discard(attempt)
            if isinstance(error, StoreFull):
                raise self._full(source.layout) from error
            raise
        if published is None:
            self._issuer.discard(attempt)
        return published

    def _full(self, layout: Layout) -> StoreFull:
        return StoreFull(
            f"Redis at {self._client.where} is at its memory limit. A full version of weights "
            f"{self._name!r} takes {layout.nbytes} bytes, and two or more of them have to fit, "
            "with the deltas between: raise maxmemory, keep fewer versions, or give max_bytes.",
            reason="memory",
        )


def _copied(shard: TensorShard) -> TensorShard:
    return replace(shard, tensor=shard.tensor.detach().to("cpu", copy=True))
