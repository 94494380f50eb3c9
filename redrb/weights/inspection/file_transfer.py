"""Versions of weights into files, and files into versions: `redrb weights get` and `put`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from redrb.checks import MOST
from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.weights import WeightPublisher, WeightSubscriber
from redrb.weights.files.adapter_folder import SETTINGS, load_adapter, save_adapter
from redrb.weights.files.safetensors import load_safetensors, save_safetensors
from redrb.weights.inspection.listing import kept, kept_version
from redrb.weights.reading.catalogue import Catalogue
from redrb.weights.wire.manifest import WeightVersion

_SUFFIX = ".safetensors"
_HEAD = 8  # bytes before the JSON header of a safetensors file


def get_weights(
    client: Client,
    name: str,
    path: str | Path,
    *,
    namespace: str = "default",
    version: int | None = None,
    base_model: str | None = None,
) -> WeightVersion:
    """Write a version into a safetensors file, or an adapter into a PEFT folder; returns it.

    All of it is fetched into memory and checked; then the file appears, or replaces an earlier one,
    when it is complete.

    Args:
        client, name, namespace: As for `WeightSubscriber`.
        path: The file, such as `policy.safetensors`, or the adapter's folder.
        version: A kept version; default: the newest.
        base_model: Name or path of the model that an adapter belongs to.
    """
    found = kept_version(client, name, namespace, version)
    target = Path(path)
    _check_target(target, is_adapter=found.kind == "lora")
    subscriber = WeightSubscriber(client, name, namespace=namespace)
    if found.kind == "lora":
        adapter = subscriber.adapter(found.version)
        save_adapter(target, adapter.tensors, adapter.configs, base_model=base_model)
    else:
        about = {"redrb": f"version {found.version} of {name}"}
        save_safetensors(target, subscriber.fetch(found.version), metadata=about)
    return found


def put_weights(
    client: Client,
    name: str,
    path: str | Path,
    *,
    namespace: str = "default",
    dtype: str | None = None,
    keep: int | None = None,
) -> tuple[WeightVersion, tuple[int, ...], bool]:
    """Publish the tensors in files as the next version; take over from any other publisher.

    Args:
        client, name, namespace: As for `WeightPublisher`.
        path: A safetensors file, a folder as Hugging Face writes it (one file or an index of
            shards), or a PEFT adapter's folder.
        dtype: Publish floating-point tensors as this dtype; default: as they are.
        keep: Versions to keep; older ones are deleted, as by `WeightPublisher`. Default: all
            versions.

    Returns:
        The version; the versions that were deleted because of `keep`; whether there was a publisher
        before, which is fenced now if it still runs.
    """
    found = _checked_source(Path(path))
    # read first, so that a bad file fences no publisher
    source: Any = load_adapter(found) if (found / SETTINGS).is_file() else load_safetensors(found)
    catalogue = Catalogue(client, name, namespace)
    fence = f"{catalogue.keys.prefix}fence"
    took_over = bool(catalogue.client.execute("HEXISTS", fence, "owner"))
    publisher = WeightPublisher(
        client,
        name,
        namespace=namespace,
        dtype=dtype,
        keep=MOST if keep is None else keep,
        deltas=False,
    )
    before = _numbers(catalogue)  # the new publisher is the owner: no other commits from here on
    with publisher:
        is_adapter = isinstance(source, tuple)
        published = publisher.publish_lora(source) if is_adapter else publisher.publish(source)
    return published, tuple(sorted(before - _numbers(catalogue))), took_over


def _numbers(catalogue: Catalogue) -> set[int]:
    return {found.version for found in kept(catalogue)}


def _check_target(target: Path, *, is_adapter: bool) -> None:
    """Check, before anything is fetched, that a path can be written."""
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


def _checked_source(found: Path) -> Path:
    if not found.exists():
        raise ConfigError(f"{found} cannot be read: it does not exist.")
    if found.is_dir():
        return found
    try:
        with found.open("rb") as file:
            begin = file.read(_HEAD + 1)
    except OSError as error:
        raise ConfigError(f"{found} cannot be read: {error.strerror}.") from error
    if begin[_HEAD:] != b"{":
        raise ConfigError(
            f"{found} is no safetensors file. Give one, a folder of them, or a PEFT adapter's "
            "folder; safetensors.torch.save_file writes other tensors into such a file."
        )
    return found
