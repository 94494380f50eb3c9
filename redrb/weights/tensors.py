"""Between models and bytes: what a state holds, its bytes without a copy, loading in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from redrb.errors import ConfigError, EncodeError, WeightError, WeightMismatch
from redrb.weights.layout import ALIGNMENT, ITEM_BYTES, Layout, TensorEntry
from redrb.weights.manifest import MAX_NAME_LENGTH, MAX_TENSORS

State: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Target: TypeAlias = nn.Module | Mapping[str, Tensor]
Strict: TypeAlias = bool | Literal["model"]
"""What names must agree: on both sides, on none, or all of the model's must be published."""

# some of float8 and float4 came with later versions of torch
_NAMES = {getattr(torch, name): name for name in ITEM_BYTES if hasattr(torch, name)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_CAST = frozenset({"float16", "bfloat16", "float32", "float64"})
_SHOWN = 5


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a module: the live ones, not copies."""
    live = {id(tensor) for tensor in module.parameters()}
    live.update(id(tensor) for tensor in module.buffers())
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if id(tensor) in live}


def state_tensors(state: State) -> dict[str, Tensor]:
    """Return what is to be published, checked.

    Raises:
        EncodeError: Something in it cannot be published.
    """
    if isinstance(state, nn.Module):
        named: Iterable[tuple[str, Tensor]] = module_tensors(state).items()
    else:
        named = state.items() if isinstance(state, Mapping) else state
    tensors: dict[str, Tensor] = {}
    for name, tensor in named:
        if name in tensors:
            raise EncodeError(f"tensor {name!r} comes twice.")
        _check_publishable(name, tensor)
        tensors[name] = tensor
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise EncodeError(f"a version holds 1 to {MAX_TENSORS} tensors, not {len(tensors)}.")
    return tensors


def lay_out(tensors: Mapping[str, Tensor], chunk_bytes: int) -> Layout:
    """Give each tensor its place; tied ones (the same memory, read the same way) share one."""
    entries: list[TensorEntry] = []
    owners: dict[tuple[object, ...], TensorEntry] = {}
    end = 0
    for name, tensor in tensors.items():
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        owner = owners.get(view) if tensor.numel() else None
        offset = -(-end // ALIGNMENT) * ALIGNMENT if owner is None else owner.offset
        alias = None if owner is None else owner.name
        entry = TensorEntry(name, _NAMES[tensor.dtype], tuple(tensor.shape), offset, alias)
        if owner is None:
            owners[view] = entry
            end = offset + entry.nbytes
        entries.append(entry)
    nbytes = -(-end // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(entries), nbytes, chunk_bytes)


def byte_view(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 [nbytes], row-major; a copy only if it is strided."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def empty_tensors(layout: Layout, names: Iterable[str]) -> dict[str, Tensor]:
    """Return uninitialised CPU tensors for `names`, each with its own memory; tied ones share it.

    Raises:
        WeightError: This torch does not know a dtype, or has no memory for it.
    """
    entries = {entry.name: entry for entry in layout.tensors}
    tensors: dict[str, Tensor] = {}
    by_owner: dict[str, Tensor] = {}
    for name in names:
        entry = entries[name]
        owner = entry.alias or name
        if owner not in by_owner:
            by_owner[owner] = _empty(entry)
        tensors[name] = by_owner[owner]
    return tensors


def target_tensors(target: Target) -> dict[str, Tensor]:
    """Return the live tensors of a model or of a dict of tensors.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(target, nn.Module):
        return module_tensors(target)
    if not isinstance(target, Mapping):
        raise ConfigError(
            f"cannot load weights into {type(target).__name__}: give a module or a dict of tensors."
        )
    return dict(target)


def check_fits(layout: Layout, targets: Mapping[str, Tensor], *, strict: Strict) -> list[str]:
    """Return the names to load, after checking that every one of them can be.

    float16, bfloat16, float32 and float64 are cast into each other; every other dtype, and every
    shape, must be equal.

    Raises:
        WeightMismatch: With all that is missing, unexpected and different.
    """
    entries = {entry.name: entry for entry in layout.tensors}
    common = [name for name in entries if name in targets]
    problems: dict[str, list[str]] = {}
    if strict:
        problems["in the model but not published"] = [n for n in targets if n not in entries]
    if strict is True:
        problems["published but not in the model"] = [n for n in entries if n not in targets]
    if not strict and not common:
        problems["no name in common; published"] = list(entries)
    differing = ((name, _difference(entries[name], targets[name])) for name in common)
    problems["different"] = [f"{name} ({found})" for name, found in differing if found]
    told = "; ".join(f"{what}: {_listed(names)}" for what, names in problems.items() if names)
    if told:
        raise WeightMismatch(
            f"these weights do not fit the model: {told}. Nothing was loaded. Publish the same "
            "model, or load what both have with strict=False."
        )
    return common


def load_in_place(values: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy CPU tensors into live ones; `check_fits` was asked before."""
    inference = any(targets[name].is_inference() for name in values)
    with torch.inference_mode(inference), torch.no_grad():
        for name, value in values.items():
            _copy(value, targets[name])
    for device in {targets[name].device for name in values}:
        if device.type == "cuda":  # casts are still under way there: others may use other streams
            torch.cuda.current_stream(device).synchronize()


def _check_publishable(name: object, tensor: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise EncodeError(f"{name!r:.80} is not a tensor's name: 1 to {MAX_NAME_LENGTH} letters.")
    if name.encode(errors="ignore").decode() != name:
        raise EncodeError(f"{name!r:.80} is not a tensor's name: UTF-8 cannot hold it.")
    if not isinstance(tensor, Tensor):
        raise EncodeError(f"{name!r} is a {type(tensor).__name__}, not a tensor: leave it out.")
    if hasattr(tensor, "full_tensor"):
        raise EncodeError(f"{name!r} is sharded: publish tensor.full_tensor() on one rank.")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise EncodeError(f"{name!r} is sparse or on the meta device: there are no plain bytes.")
    if tensor.dtype not in _NAMES:
        raise EncodeError(f"{name!r} is {tensor.dtype}, which cannot be published.")


def _empty(entry: TensorEntry) -> Tensor:
    if entry.dtype not in _DTYPES:
        raise WeightError(f"{entry.name!r} is {entry.dtype}: this version of torch has none.")
    try:
        return torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    except RuntimeError as error:
        raise WeightError(f"no memory for {entry.name!r}, {entry.nbytes} bytes.") from error


def _copy(value: Tensor, target: Tensor) -> None:
    plain = target.is_contiguous() and not (target.is_conj() or target.is_neg())
    if target.device.type != "cpu" or target.dtype != value.dtype or not plain:
        target.copy_(value)
        return
    # where cores are busy, the barrier of torch's threads takes 20 times as long as the copy
    byte_view(target).numpy()[:] = byte_view(value).numpy()
    if not target.is_inference():
        increment_version(target)


def _difference(entry: TensorEntry, target: Tensor) -> str:
    """Return why a published tensor cannot be loaded into `target`, or nothing."""
    dtype = _NAMES.get(target.dtype, str(target.dtype))
    if entry.shape != tuple(target.shape) or (
        entry.dtype != dtype and not {entry.dtype, dtype} <= _CAST
    ):
        return f"published {entry}, model {dtype}[{', '.join(map(str, target.shape))}]"
    if target.layout != torch.strided or target.is_meta or hasattr(target, "full_tensor"):
        return "the model's is sparse, sharded or on the meta device"
    steps = zip(target.shape, target.stride(), strict=True)
    if any(size > 1 and step == 0 for size, step in steps):
        return "the model's is expanded: several elements share one place"
    return ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
