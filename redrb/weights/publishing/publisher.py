"""`WeightPublisher`: stage a version's chunks, then make it the newest in one atomic step."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from redrb.checks import checked_int, checked_int_or_none
from redrb.connection import Client, check_client
from redrb.errors import ConfigError, EncodeError
from redrb.keys import WeightKeys
from redrb.registry import Registry
from redrb.weights.lora import LoraConfig, adapter_of, configs_to_wire
from redrb.weights.publishing.baseline import Baseline
from redrb.weights.publishing.committer import Committer
from redrb.weights.publishing.rank_publishing import FollowingRank, LeadingRank, RankPublisher
from redrb.weights.publishing.single_publishing import SinglePublishing
from redrb.weights.tensors.copying import plain
from redrb.weights.tensors.dtypes import published_dtype
from redrb.weights.tensors.names import StateLike
from redrb.weights.tensors.published_state import lay_out, state_shards
from redrb.weights.tensors.shard import TensorShard
from redrb.weights.tensors.state import State
from redrb.weights.wire.layout import CHUNK_BYTES, Layout
from redrb.weights.wire.manifest import MAX_CHUNKS, MAX_VERSION, WeightVersion


class WeightPublisher:
    """The only publisher of the weights `name`; a new publisher takes over from the one before.

    Readers see either the version before or the whole new version, even if the publisher is killed;
    staged chunks of an uncommitted version expire.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights.
        namespace: Keeps experiments on one server apart.
        keep: Versions that readers can fetch, >= 1. Older versions are deleted, except those that
            kept versions need (a full version and the deltas after it) or that a reader is
            fetching.
        max_bytes: Keep fewer versions if `keep` of them are larger than this; the newest is always
            kept. Default: no limit.
        dtype: Publish floating-point tensors as this dtype, such as "bfloat16" or torch.bfloat16;
            default: as they are. Deltas of float32 are hardly smaller than the weights.
        deltas: Send only the changes, exactly, if that is less. This needs as much memory on the
            host as a version. False sends every version in full.
        anchor_every: Store every n-th version in full, for readers that join.
        rank: Rank of this process, if several publish together. Each calls `publish` as often as
            the others with its part (`DTensor`s or `TensorShard`s) and sends its shards; rank 0
            commits the version.
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
        self._baseline = Baseline(deltas=deltas, anchor_every=anchor_every)
        self._committer = Committer(client, self._keys, name, keep=keep, max_bytes=max_bytes or 0)
        self._single = SinglePublishing(client, self._keys, self._committer, self._baseline, name)
        self._publishing = threading.Lock()
        self._closed = False
        self._ranks: RankPublisher | None = None
        if rank:
            self._ranks = FollowingRank(
                *(client, self._keys, self._committer, self._baseline),
                name=name,
                rank=rank,
                timeout=timeout,
            )
            return
        if world_size > 1:
            self._ranks = LeadingRank(
                *(client, self._keys, self._committer, self._baseline),
                name=name,
                world_size=world_size,
                timeout=timeout,
            )
        self._committer.take_over()
        Registry(client, namespace).add("weights", name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<redrb.WeightPublisher {self._name!r} on {self._client.where}>"

    def publish(self, state: StateLike, *, version: int | None = None) -> WeightVersion:
        """Publish a version; when this returns, every reader can load it.

        Do not train until this returns: the values during the call are published. The version is
        sent as a delta or in full, whichever is less. It is sent in full every `anchor_every`
        versions, if names or shapes changed, and whenever the version before is not certain. Tied
        tensors are sent once; chunks that equal those of the last full version (frozen tensors)
        are not sent again.

        Args:
            state: A module (its parameters and persistent buffers), several by name, a state dict,
                or an iterable of (name, tensor). Several models, such as
                `{"actor": actor, "critic": critic}`, are one version, which a reader never mixes
                with others; their tensors are named `actor.<name>`.
            version: Number of the version, larger than all before; default: the newest plus 1.

        Raises:
            ConfigError: `version` is not larger than the newest version.
            EncodeError: A value in `state` cannot be published. Nothing was sent.
            PublisherFenced: Another publisher of this name was created after this one.
            StoreFull: Redis is at its memory limit; nothing of this version is left there.
            StoreUnavailable: Redis stayed away; if `uncertain`, the version may be published.
        """
        layout, shards = self._prepared(state, version)
        with self._publishing:
            self._check_open()
            return self._publish(layout, shards, version)

    def publish_lora(
        self,
        model: nn.Module | tuple[Mapping[str, Any], Mapping[str, LoraConfig]],
        *,
        version: int | None = None,
    ) -> WeightVersion:
        """Publish only the LoRA adapter of a model (Hu et al. 2021, arXiv:2106.09685).

        Readers whose model has the same LoRA layers load it there. Others merge it into the newest
        weights of this publisher, or into their model's weights if it has published none.

        Args:
            model: A model with LoRA layers of PEFT or ColossalAI (`lora_A`, `lora_B`), or a pair:
                tensors named `<layer>.lora_A` and `<layer>.lora_B`, and settings by layer.
            version: As in `publish`.

        Raises:
            ConfigError: There are no LoRA layers, or `version` is not larger than the newest one.
            EncodeError: Tensors and settings do not fit each other. Nothing was sent.
            PublisherFenced, StoreFull, StoreUnavailable: As `publish` does.
        """
        version = checked_int_or_none("version", version, 1, MAX_VERSION)
        if self._ranks is not None:
            raise ConfigError(
                "ranks cannot publish an adapter together: use a WeightPublisher without rank=."
            )
        tensors, configs = adapter_of(model)
        shards = self._shards(tensors)
        layout = self._laid_out(shards)
        with self._publishing:
            self._check_open()
            return self._publish(layout, shards, version, adapter=configs_to_wire(configs))

    def close(self) -> None:
        """Wait for a call that another thread has begun, and refuse further ones."""
        with self._publishing:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this publisher was closed: create a new WeightPublisher.")

    def _prepared(
        self, state: StateLike, version: int | None
    ) -> tuple[Layout, dict[str, TensorShard]]:
        """Return the checked state; report to the other ranks if it cannot be published."""
        try:
            version = checked_int_or_none("version", version, 1, MAX_VERSION)
            shards = self._shards(state)
            return self._laid_out(shards), shards
        except (ConfigError, EncodeError) as error:
            if self._ranks is not None:
                with self._publishing:
                    self._ranks.give_up(error)
            raise

    def _shards(self, state: StateLike) -> dict[str, TensorShard]:
        shards = state_shards(state)
        for name, shard in shards.items():
            if not shard.is_whole and self._ranks is None:
                raise EncodeError(
                    f"{name!r} is one rank's shard: publish on all ranks together, with rank= and "
                    "world_size=."
                )
        return shards

    def _laid_out(self, shards: Mapping[str, TensorShard]) -> Layout:
        layout = lay_out(shards, CHUNK_BYTES, self._cast)
        if self._ranks is not None:  # each rank's part begins with a new chunk
            layout = replace(layout, nbytes=layout.chunks * layout.chunk_bytes)
        if layout.chunks > MAX_CHUNKS:
            raise EncodeError(
                f"{layout.nbytes} bytes: the limit of a version is {MAX_CHUNKS * CHUNK_BYTES}."
            )
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
        return self._single.publish(source, version, adapter)
