"""Versions of weights to files, and files to versions."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from redrb.connection import Client
from redrb.errors import ConfigError, DecodeError, WeightError
from redrb.weights import WeightPublisher, WeightSubscriber, WeightVersion
from redrb.weights.files.adapter_folder import SETTINGS, load_adapter, save_adapter
from redrb.weights.files.safetensors import load_safetensors
from redrb.weights.inspection.listing import catalogue_of, check_kept, kept, layout_of
from redrb.weights.inspection.mapped_file import mapped_file
from redrb.weights.reading.catalogue import Catalogue, Pin
from redrb.weights.reading.load_target import LoadTarget
from redrb.weights.reading.retrying import fetch_retrying
from redrb.weights.reading.state_copies import InPlaceCopy
from redrb.weights.tensors.fitting import target_shards
from redrb.weights.wire.manifest import MAX_VERSION

_KEEP_ALL = MAX_VERSION
_SUFFIX = ".safetensors"
_HEAD = 8  # bytes before the header, which is JSON, of a safetensors file


@dataclass(frozen=True, slots=True)
class SavedVersion:
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
class PublishedFile:
    """A version that was published.

    Attributes:
        name: Name of the weights.
        version: The version.
        kind: "full" or "lora".
        tensors: Tensors in it.
        nbytes: Their bytes.
        dropped: Versions that were deleted, since `keep` left no room for them.
        took_over: Whether there was a publisher before, which is fenced now if it still runs.
        seconds: How long it took.
    """

    name: str
    version: int
    kind: str
    tensors: int
    nbytes: int
    dropped: tuple[int, ...]
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
) -> SavedVersion:
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
        ConfigError: There is no such version, or the file cannot be written, or an adapter is
            to be a file, or other weights a folder.
        EncodeError: safetensors has no such dtype.
        WeightCorrupt, DecodeError, StoreUnavailable: As `WeightSubscriber.fetch` does.
    """
    begin = time.monotonic()
    wanted = check_kept(client, name, namespace, version) if version is None else version
    found = catalogue_of(client, name, namespace).entry(wanted)
    if found is None:  # it is told which there are; unless one has just gone, or come
        check_kept(client, name, namespace, wanted)
        raise WeightError(
            f"version {wanted} of weights {name!r} has just been replaced: try again."
        )
    target = Path(path)
    _check_target(target, is_adapter=found.kind == "lora")
    if found.kind == "lora":
        adapter = WeightSubscriber(client, name, namespace=namespace).adapter(wanted)
        save_adapter(target, adapter.tensors, adapter.configs, base_model=base_model)
    else:
        _receive(catalogue_of(client, name, namespace), wanted, target)
    seconds = time.monotonic() - begin
    return SavedVersion(target, name, wanted, found.kind, found.tensors, found.nbytes, seconds)


def put_weights(
    client: Client,
    name: str,
    path: str | Path,
    *,
    namespace: str = "default",
    dtype: str | None = None,
    keep: int | None = None,
) -> PublishedFile:
    """Publish what is in files as the next version. Takes over from any other publisher.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights.
        path: A safetensors file, a folder as Hugging Face writes it (one file or an index of
            shards), or a PEFT adapter's folder.
        namespace: Where to.
        dtype: Publish floating-point tensors as this dtype; default: as they are.
        keep: Versions to keep; older ones are deleted, as by `WeightPublisher`. Default: all that
            are there, and the new one.

    Raises:
        ConfigError: There is no such file, it is of another kind, or an argument is not usable.
        DecodeError: A file is damaged.
        EncodeError, StoreFull, StoreUnavailable: As `WeightPublisher.publish` does.
    """
    begin = time.monotonic()
    found = Path(path)
    # files are read before the publisher before is fenced
    _check_source(found)
    adapter: Any = load_adapter(found) if (found / SETTINGS).is_file() else None
    tensors = load_safetensors(found) if adapter is None else {}
    catalogue = catalogue_of(client, name, namespace)
    fence = f"{catalogue.keys.prefix}fence"
    took_over = bool(catalogue.client.execute("HEXISTS", fence, "owner"))
    publisher = WeightPublisher(
        client,
        name,
        namespace=namespace,
        dtype=dtype,
        keep=_KEEP_ALL if keep is None else keep,
        deltas=False,
    )
    before = _numbers(catalogue)  # from here on nobody else commits any
    try:
        published = _publish(publisher, tensors, adapter)
    finally:
        publisher.close()
    return PublishedFile(
        name,
        published.version,
        published.kind,
        published.tensors,
        published.nbytes,
        tuple(sorted(before - _numbers(catalogue))),
        took_over,
        time.monotonic() - begin,
    )


def _numbers(catalogue: Catalogue) -> set[int]:
    return {found.version for found in kept(catalogue)}


def _check_target(target: Path, *, is_adapter: bool) -> None:
    """Say what is wrong with a path before anything is fetched."""
    folder = target.resolve().parent
    if is_adapter and target.suffix == _SUFFIX:
        raise ConfigError(
            f"{target} cannot be written: an adapter is saved as a folder, as PEFT does. Give a "
            f"name without {_SUFFIX}."
        )
    if not folder.is_dir():
        shown = target.parent
        why = f"{shown} is no folder" if folder.exists() else f"{shown} does not exist"
    elif not is_adapter and target.is_dir():
        why = f"{target} is a folder: give the name of a file, such as {target / 'model'}{_SUFFIX}"
    elif not os.access(folder, os.W_OK):
        why = f"this user may not write into {target.parent}"
    else:
        return
    raise ConfigError(f"{target} cannot be written: {why}.")


def _check_source(found: Path) -> None:
    """Say what is wrong with a file; what is in a folder is read as it is."""
    if not found.exists():
        raise ConfigError(f"{found} cannot be read: it does not exist.")
    if found.is_dir():
        return
    try:
        with found.open("rb") as file:
            begin = file.read(_HEAD + 1)
    except OSError as error:
        raise ConfigError(f"{found} cannot be read: {error.strerror}.") from error
    if begin[_HEAD:] != b"{":
        raise ConfigError(
            f"{found} is no safetensors file: only these are read, folders of them, and adapters' "
            "folders as PEFT's. Write its tensors with safetensors.torch.save_file first."
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
                wanted = LoadTarget(target_shards(tensors), strict=True)
                current = InPlaceCopy(catalogue, wanted).follow(pin, steps, lambda _: None)
                if current.state is None:
                    raise DecodeError(f"version {version} of weights {catalogue.name!r} has none.")
                wanted.load(current.state)

    fetch_retrying(catalogue.name, attempt, forget=lambda: None)
