"""Versions of weights to files, and files to versions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from redrb.connection import Client
from redrb.errors import DecodeError, WeightCorrupt, WeightError
from redrb.inspection.mapped import mapped_file
from redrb.inspection.published import catalogue_of, check_kept, kept, layout_of
from redrb.weights import WeightPublisher, WeightSubscriber, WeightVersion
from redrb.weights.files.folder import SETTINGS, load_adapter, save_adapter
from redrb.weights.files.safetensors import load_safetensors
from redrb.weights.reading.copies import LiveCopy
from redrb.weights.reading.loading import Wanted
from redrb.weights.reading.route import Catalogue, Pin
from redrb.weights.tensors import target_shards
from redrb.weights.wire.chunks import ChunkGoneError

T = TypeVar("T")

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Got:
    """A version that was written.

    Attributes:
        path: The file, or an adapter's folder.
        name: Name of the weights.
        version: The version.
        kind: "full", "delta" (what is written is whole) or "lora".
        tensors: Tensors that were written, tied ones counted by each name.
        nbytes: Their bytes.
        seconds: How long it took.
    """

    path: Path
    name: str
    version: int
    kind: str
    tensors: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Put:
    """A version that was published.

    Attributes:
        name: Name of the weights.
        version: The version.
        kind: "full" or "lora".
        tensors: Tensors in it.
        nbytes: Their bytes.
        took_over: Whether there was a publisher before, which is fenced now if it still runs.
        seconds: How long it took.
    """

    name: str
    version: int
    kind: str
    tensors: int
    nbytes: int
    took_over: bool
    seconds: float


def get_weights(
    client: Client,
    name: str,
    path: str | Path,
    *,
    namespace: str = "default",
    version: int | None = None,
    base_model: str | None = None,
) -> Got:
    """Write a version into a safetensors file, an adapter into a PEFT folder.

    It appears, or replaces the one before, when it is complete and checked. Tensors are received
    straight into the file, so that little memory is taken; those that ranks published in shards,
    and an adapter, are in memory first.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights.
        path: The file, such as `policy.safetensors`, or the adapter's folder.
        namespace: That of the publisher.
        version: One that is kept; default: the newest.
        base_model: Name or path of the model that an adapter belongs to.

    Raises:
        ConfigError: There is no such version, or the file cannot be written.
        EncodeError: safetensors has no such dtype.
        WeightCorrupt, DecodeError, StoreUnavailable: As `WeightSubscriber.fetch` does.
    """
    begin = time.monotonic()
    newest = check_kept(client, name, namespace, version)
    wanted = newest if version is None else version
    found = next(v for v in kept(catalogue_of(client, name, namespace)) if v.version == wanted)
    target = Path(path)
    if found.kind == "lora":
        adapter = WeightSubscriber(client, name, namespace=namespace).adapter(wanted)
        save_adapter(target, adapter.tensors, adapter.configs, base_model=base_model)
    else:
        _receive(catalogue_of(client, name, namespace), wanted, target)
    seconds = time.monotonic() - begin
    return Got(target, name, wanted, found.kind, found.tensors, found.nbytes, seconds)


def put_weights(
    client: Client,
    name: str,
    path: str | Path,
    *,
    namespace: str = "default",
    dtype: str | None = None,
    keep: int = 2,
) -> Put:
    """Publish what is in files as the next version. Takes over from any other publisher.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights.
        path: A safetensors file, a folder as Hugging Face writes it (one file or an index of
            shards), or a PEFT adapter's folder.
        namespace: Where to.
        dtype: Publish floating-point tensors as this dtype; default: as they are.
        keep: Versions to keep; older ones are deleted, as by `WeightPublisher`.

    Raises:
        ConfigError: There is no such file, or an argument is not usable.
        DecodeError: A file is damaged.
        EncodeError, StoreFull, StoreUnavailable: As `WeightPublisher.publish` does.
    """
    begin = time.monotonic()
    found = Path(path)
    # files are read before the publisher before is fenced
    adapter: Any = load_adapter(found) if (found / SETTINGS).is_file() else None
    tensors = load_safetensors(found) if adapter is None else {}
    catalogue = catalogue_of(client, name, namespace)
    fence = f"{catalogue.keys.prefix}fence"
    took_over = bool(catalogue.client.execute("HEXISTS", fence, "owner"))
    publisher = WeightPublisher(
        client, name, namespace=namespace, dtype=dtype, keep=keep, deltas=False
    )
    try:
        published = _publish(publisher, tensors, adapter)
    finally:
        publisher.close()
    return Put(
        name,
        published.version,
        published.kind,
        published.tensors,
        published.nbytes,
        took_over,
        time.monotonic() - begin,
    )


def _publish(
    publisher: WeightPublisher, tensors: Mapping[str, Tensor], adapter: Any
) -> WeightVersion:
    if adapter is not None:
        return publisher.publish_lora(adapter)
    return publisher.publish(tensors)


def _receive(catalogue: Catalogue, version: int, target: Path) -> None:
    def attempt() -> None:
        with Pin(catalogue) as pin:
            steps = pin.route(have=0, wanted=version)
            layout = layout_of(steps)
            about = {"redrb": f"version {version} of {catalogue.name}"}
            with mapped_file(target, layout, metadata=about) as tensors:
                wanted = Wanted(target_shards(tensors), strict=True)
                current = LiveCopy(catalogue, wanted).follow(pin, steps, lambda _: None)
                if current.state is None:
                    raise DecodeError(f"version {version} of weights {catalogue.name!r} has none.")
                wanted.load(current.state)

    _retrying(attempt)


def _retrying(attempt: Callable[[], T]) -> T:
    for _ in range(_ATTEMPTS - 1):
        try:
            return attempt()
        except (ChunkGoneError, WeightCorrupt):
            continue
    try:
        return attempt()
    except ChunkGoneError as error:
        raise WeightError(
            f"{error} Check that the server's maxmemory-policy is noeviction, and take a version "
            "that is kept."
        ) from error
