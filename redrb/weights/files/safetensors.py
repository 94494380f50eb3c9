"""Weights in safetensors files: one file, or Hugging Face's folder of shards."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from redrb.checks import require_package
from redrb.errors import ConfigError, DecodeError, EncodeError
from redrb.staging import staging

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_METADATA: Final = "__metadata__"
MAX_JSON_BYTES: Final = 64 << 20


def safetensors_torch() -> ModuleType:
    """Import and return `safetensors.torch`, which only this package needs."""
    require_package("safetensors", extra="export")
    import safetensors.torch

    return safetensors.torch


def save_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors into one file, which appears, or replaces an earlier one, when it is complete.

    Tied tensors (the same view of one memory) are written under each of their names: vLLM and
    transformers fill a name that is missing with nothing, or with random values. The header then
    has `{other name: first name in the alphabet}`, by which `load_safetensors` ties them again.
    `safetensors.torch.load_model` takes such a file with `strict=False`. Contiguous CPU tensors are
    written without a copy in memory; all others, and further names of tied ones, are copied first.

    Args:
        metadata: Further texts for the file's header, such as `{"step": "12"}`; "format" is "pt".

    Raises:
        EncodeError: A tensor is sharded, sparse, of a dtype that safetensors does not support, or
            named `__metadata__`.
        ConfigError: The file cannot be written, `metadata` reads as a tied tensor, or safetensors
            is not installed.
    """
    library = safetensors_torch()
    ties = _ties(tensors)
    header = {"format": "pt", **(metadata or {})}
    for key, value in header.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"metadata {key!r:.80} and its value must be texts.")
        if key in tensors or value in tensors:
            raise ConfigError(f"metadata {key!r:.80} would read as a tied tensor: rename it.")
    with replacing(Path(path)) as fresh:
        library.save_file(_apart(tensors), fresh, metadata={**header, **ties})


def load_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Return all tensors of a file or folder, on the CPU; tied tensors are one object.

    Raises:
        ConfigError, DecodeError: As `iterate_safetensors` does.
    """
    return dict(iterate_safetensors(path))


def iterate_safetensors(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file or folder one by one, as vLLM's `load_weights` takes them.

    One file is open at a time, and tensors are mapped from it: tensors that the caller does not
    keep use no memory. A tied tensor follows the tensor that it is tied to, and is the same object;
    where the file has other bytes under its name, it is a tensor of these.

    Args:
        path: A file, or a folder with `model.safetensors.index.json` or `model.safetensors`.

    Raises:
        ConfigError: The file does not exist, or safetensors is not installed.
        DecodeError: A file is damaged, missing, or outside of the folder.
    """
    safetensors_torch()
    found = Path(path)
    if not found.is_dir():
        return _of_file(found, None)
    if (found / INDEX).exists():
        return _of_index(found)
    if not (found / SINGLE).exists():
        raise ConfigError(f"{found} has neither {INDEX} nor {SINGLE}: give the path of the file.")
    return _of_file(found / SINGLE, None)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield the path of a new file, which is renamed to `target` if the block ends well."""
    errors: tuple[type[Exception], ...] = (OSError, _library_error())
    try:
        with staging(target) as folder:
            fresh = folder / target.name
            fresh.touch()
            mode = fresh.stat().st_mode
            yield fresh
            fresh.chmod(mode)  # the mode of a new file; safetensors sets one for this user only
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            fresh.replace(target)
    except errors as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the map in a JSON file, or raise ConfigError or DecodeError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    try:
        found = json.loads(text) if len(text) <= MAX_JSON_BYTES else None
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{path} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise DecodeError(f"{path} is not a map of at most {MAX_JSON_BYTES} bytes.")
    return found


def _of_index(folder: Path) -> Iterator[tuple[str, Tensor]]:
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise DecodeError(f"{folder / INDEX} has no weight_map.")
    shards: dict[str, list[str]] = {}
    for name, shard in places.items():
        # not resolved: in Hugging Face's cache the files are links to another folder
        parts = PurePosixPath(shard).parts if isinstance(shard, str) else ()
        if not parts or "\0" in shard or parts[0] == "/" or ".." in parts:
            raise DecodeError(f"{folder / INDEX}: {shard!r:.80} is not a file inside the folder.")
        shards.setdefault(shard, []).append(name)
    for shard in shards:
        if not (folder / shard).is_file():
            raise DecodeError(f"{folder} is incomplete: {shard!r:.80} is missing.")
    for shard, names in shards.items():
        yield from _of_file(folder / shard, names, places)


def _of_file(
    path: Path, wanted: list[str] | None, elsewhere: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors `wanted` of a file (None: all), and those tied to them, not `elsewhere`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            chosen = sorted(names) if wanted is None else wanted
            ties: dict[str, list[str]] = {}
            for name, kept in (file.metadata() or {}).items():
                if kept in names and name != kept and (name in chosen or name not in elsewhere):
                    ties.setdefault(kept, []).append(name)
            if wanted is not None and not names.issuperset(wanted):
                missing = min(set(wanted) - names)
                raise DecodeError(f"{path} lacks {missing!r:.80}, which the index says it has.")
            over = set[str]()
            for name in chosen:
                if name not in over:
                    tensor = file.get_tensor(name)
                    yield name, tensor
                    for tied in ties.get(name, ()):
                        if tied not in names or _same(file.get_tensor(tied), tensor):
                            over.add(tied)
                            yield tied, tensor
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    except SafetensorError as error:
        raise DecodeError(f"{path} is not a whole safetensors file: {error}.") from error


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of a file have the same bytes, and mean the same by them."""
    return (tensor.dtype, tensor.shape) == (other.dtype, other.shape) and torch.equal(
        *(each.reshape(-1).view(torch.uint8) for each in (tensor, other))
    )


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Check the tensors; returns the names of tied ones, and the first name of each."""
    owners: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        _check(name, tensor)
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        owner = owners.setdefault(view, name) if tensor.numel() else name
        if owner != name:
            ties[name] = owner
    return ties


def _check(name: str, tensor: Tensor) -> None:
    if name == _METADATA:
        raise EncodeError(f"no tensor of a safetensors file can be named {name}: rename it.")
    if hasattr(tensor, "full_tensor"):
        raise EncodeError(f"{name!r} is sharded: write tensor.full_tensor() on one rank.")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise EncodeError(f"{name!r} is sparse or on the meta device: there are no plain bytes.")
    if not _holds(tensor.dtype):
        raise EncodeError(
            f"{name!r} is {tensor.dtype}, which this version of safetensors does not support: cast "
            "it, or leave it out."
        )


@cache
def _holds(dtype: torch.dtype) -> bool:
    library = safetensors_torch()
    errors: tuple[type[Exception], ...] = (
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        _library_error(),
    )
    try:
        probe = torch.empty(2, dtype=dtype)
        found = library.load(library.save({"x": probe}))["x"]
    except errors:
        return False
    return bool(found.dtype == dtype and found.shape == probe.shape)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory; others are copied."""
    apart: dict[str, Tensor] = {}
    ends: dict[tuple[torch.device, int], int] = {}
    by_place = sorted(tensors.items(), key=lambda item: (item[1].data_ptr(), -item[1].nbytes))
    for name, tensor in by_place:
        plain = tensor.detach().resolve_conj().resolve_neg()
        memory = (plain.device, plain.untyped_storage().data_ptr())
        if plain.is_contiguous():
            if plain.data_ptr() < ends.get(memory, 0):  # inside of another tensor
                plain = plain.clone()
            else:
                ends[memory] = plain.data_ptr() + plain.nbytes
        apart[name] = plain.contiguous()
    return {name: apart[name] for name in tensors}


def _library_error() -> type[Exception]:
    from safetensors import SafetensorError

    found: type[Exception] = SafetensorError
    return found
