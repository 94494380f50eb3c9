"""`WeightPublisher`: upload a version's chunks, then make it the newest in one atomic step."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from redrb.checks import checked_int, checked_int_or_none
from redrb.connection import Client, check_client
from redrb.errors import ConfigError, EncodeError, WeightError
from redrb.keys import WeightKeys
from redrb.registry import Registry
from redrb.scopes import Closing
from redrb.weights.lora.adapter import adapter_of
from redrb.weights.publishing.baseline import Baseline
from redrb.weights.publishing.changes import Watch
from redrb.weights.publishing.committer import Committer
from redrb.weights.tensors.dtypes import CASTABLE, DTYPE_NAMES, published_dtype
from redrb.weights.tensors.names import StateLike, describe_type, named_values
from redrb.weights.tensors.state import StateBytes, is_dtensor, plain
from redrb.weights.wire.layout import ALIGNMENT, CHUNK_BYTES, MAX_NAME_LENGTH, Layout, TensorEntry
from redrb.weights.wire.lora_config import LoraConfig
from redrb.weights.wire.manifest import MAX_CHUNKS, MAX_TENSORS, WeightVersion


def published_tensors(state: StateLike) -> dict[str, Tensor]:
    """Return the checked tensors of a state, or raise EncodeError."""
    tensors: dict[str, Tensor] = {}
    for name, value in named_values(state):
        if name in tensors:
            raise EncodeError(f"the state has two tensors named {name!r}.")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
            raise EncodeError(
                f"{name!r:.80} is not a tensor's name: 1 to {MAX_NAME_LENGTH} letters."
            )
        if name.encode(errors="ignore").decode() != name:
            raise EncodeError(f"{name!r:.80} is not a tensor's name: it is not valid in UTF-8.")
        if not isinstance(value, Tensor):
            raise EncodeError(
                f"{name!r:.80} is {describe_type(value)}, not a tensor: leave it out."
            )
        if is_dtensor(value):
            raise EncodeError(
                f"{name!r} is sharded over ranks: call its full_tensor() on all ranks, and publish "
                "the result on one of them."
            )
        if value.layout != torch.strided or value.is_meta:
            raise EncodeError(
                f"{name!r} is sparse or on the meta device: there are no plain bytes."
            )
        if value.dtype not in DTYPE_NAMES:
            raise EncodeError(f"{name!r} is {value.dtype}, which cannot be published.")
        tensors[name] = value
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise EncodeError(f"a version holds 1 to {MAX_TENSORS} tensors, not {len(tensors)}.")
    return tensors


def lay_out(
    tensors: Mapping[str, Tensor], chunk_bytes: int, cast: torch.dtype | None = None
) -> Layout:
    """Give each tensor its place; tied tensors (the same view of one memory) share one."""
    entries: list[TensorEntry] = []
    owners: dict[tuple[object, ...], TensorEntry] = {}
    end = 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        owner = owners.get(view) if tensor.numel() else None
        dtype = DTYPE_NAMES[tensor.dtype]
        if cast is not None and dtype in CASTABLE:
            dtype = DTYPE_NAMES[cast]
        if owner is None:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            owners[view] = entry = TensorEntry(name, dtype, shape, offset)
            end = offset + entry.nbytes
        else:
            entry = TensorEntry(name, dtype, shape, owner.offset, owner.name)
        entries.append(entry)
    nbytes = -(-end // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(entries), nbytes, chunk_bytes)


_ATTEMPTS = 3


class WeightPublisher(Closing):
    """The only publisher of the weights `name`; a new publisher takes over from the one before.

    Readers see either the version before or the whole new version, even if the publisher is killed;
    uploaded chunks of an uncommitted version expire.

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
    ) -> None:
        check_client(client)
        keep = checked_int("keep", keep, 1)
        anchor_every = checked_int("anchor_every", anchor_every, 1)
        max_bytes = checked_int_or_none("max_bytes", max_bytes, 1)
        self._client = client
        self._name = name
        keys = WeightKeys.of(namespace, name)
        self._cast = published_dtype(dtype)
        self._baseline = Baseline(deltas=deltas, anchor_every=anchor_every)
        self._committer = Committer(client, keys, name, keep=keep, max_bytes=max_bytes or 0)
        self._publishing = threading.Lock()
        self._closed = False
        self._may_republish = False
        self._committer.take_over()
        self._registry = Registry(client, namespace)
        self._registry.add("weights", name)

    def __repr__(self) -> str:
        return f"<redrb.WeightPublisher {self._name!r} on {self._client.where}>"

    def publish(self, state: StateLike, *, version: int | None = None) -> WeightVersion:
        """Publish a version; when this returns, every reader can load it.

        Do not train until this returns. Tensors that change meanwhile are noticed before the commit
        by torch's count of writes, by the first 64 KiB of each chunk of 4 MiB, and, with deltas and
        where all is sent, by all bytes. Not noticed are writes elsewhere that torch does not count,
        such as those through `.data`: then readers may load a mixture.

        The version is sent as a delta or in full, whichever is less. It is sent in full every
        `anchor_every` versions, if names or shapes changed, whenever the version before is not
        certain, and when a reader has found a version damaged. Tied tensors are sent once; chunks
        that equal those of the last full version (frozen tensors) are not sent again.

        Args:
            state: A module (its parameters and persistent buffers), several by name, a state dict,
                or an iterable of (name, tensor). Several models, such as
                `{"actor": actor, "critic": critic}`, are one version, which a reader never mixes
                with others; their tensors are named `actor.<name>`.
            version: Number of the version, larger than all before; default: the newest plus 1.

        Raises:
            ConfigError: `version` is not larger than the newest version.
            EncodeError: A value in `state` cannot be published, or changed meanwhile. Nothing was
                published.
            PublisherFenced: Another publisher of this name was created after this one.
            StoreFull: Redis is at its memory limit; nothing of this version is left there.
            StoreUnavailable: Redis stayed away; if `uncertain`, the version may be published.
        """
        return self._publish(state, checked_int_or_none("version", version, 1))

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
            EncodeError: Tensors and settings do not fit each other, or tensors changed meanwhile.
                Nothing was published.
            PublisherFenced, StoreFull, StoreUnavailable: As `publish` does.
        """
        version = checked_int_or_none("version", version, 1)
        tensors, configs = adapter_of(model)
        return self._publish(tensors, version, configs)

    def republish(self) -> WeightVersion | None:
        """Publish the last version once more, in full, if a reader has found it damaged.

        The next `publish` does the same: this is for a process that waits for what readers make
        with new weights. It publishes what it keeps for deltas, once at most for each `publish`.

        Returns:
            The version; None: no reader asks, no copy is kept (`deltas=False`, or the last publish
            failed), the last version is an adapter, or its number was given.

        Raises:
            PublisherFenced, StoreFull, StoreUnavailable: As `publish` does.
        """
        with self._publishing:
            state = self._baseline.state
            if not self._may_republish or state is None or self._closed:
                return None
            if not self._committer.is_asked():
                return None
            self._may_republish = False
            return self._send(state)

    def close(self) -> None:
        """Wait for a call that another thread has begun, and refuse further ones."""
        with self._publishing:
            self._closed = True

    def _publish(
        self, state: StateLike, version: int | None, adapter: dict[str, LoraConfig] | None = None
    ) -> WeightVersion:
        tensors = published_tensors(state)
        layout = lay_out(tensors, CHUNK_BYTES, self._cast)
        if layout.chunks > MAX_CHUNKS:
            raise EncodeError(
                f"{layout.nbytes} bytes: the limit of a version is {MAX_CHUNKS * CHUNK_BYTES}."
            )
        with self._publishing:
            if self._closed:
                raise ConfigError("this publisher was closed: create a new WeightPublisher.")
            watch = Watch(tensors)
            live = {entry.name: plain(tensors[entry.name]) for entry in layout.owners()}
            source = StateBytes(layout, live)
            watch.begin(source)
            published = self._send(source, version, adapter, watch)
            self._may_republish = adapter is None and version is None
            return published

    def _send(
        self,
        source: StateBytes,
        version: int | None = None,
        adapter: dict[str, LoraConfig] | None = None,
        watch: Watch | None = None,
    ) -> WeightVersion:
        """Publish a state or an adapter; `watch` is None for a state that nobody can change."""
        baseline = self._baseline
        for _ in range(_ATTEMPTS):
            attempt = self._committer.begin(version, source)
            state = baseline.state if adapter is not None and version is None else None
            if attempt.is_asked and state is not None:
                self._send(state)  # an adapter belongs to weights that are whole
                continue
            if attempt.is_asked:
                baseline.forget()
            difference, published = None, None
            with self._committer.discarding(attempt):
                if adapter is not None:
                    uploaded = attempt.upload(None, whole=True, adapter=adapter)
                else:
                    difference = baseline.difference(source, attempt.newest_state)
                    whole = baseline.stores_in_full(difference)
                    uploaded = attempt.upload(difference, whole=whole, anchor=baseline.anchor)
                    if difference is None:
                        baseline.copy(source, uploaded.manifest)
                if watch is not None:
                    watch.check()
                published = self._committer.commit(attempt, uploaded.manifest)
                if published is not None and adapter is None:
                    baseline.advance(uploaded, difference)
            if published is not None:
                if attempt.is_first or published.kind == "full":  # Redis may have lost its data
                    self._registry.add("weights", self._name)
                return published
            baseline.forget()  # its chunks are gone: the next attempt sends all of them
        raise WeightError(
            f"weights {self._name!r}: chunks were gone at the commit: Redis evicts or lost them. "
            "Set maxmemory-policy to noeviction, and publish again."
        )
