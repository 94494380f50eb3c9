"""Between models and bytes: what a state holds, its bytes without a copy, loading in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from redrb.errors import ConfigError, EncodeError, WeightError, WeightMismatch
from redrb.weights.mismatch_message import advice_on, listed
from redrb.weights.wire.delta import Bytes
from redrb.weights.wire.layout import ALIGNMENT, ITEM_BYTES, Layout, Piece, TensorEntry
from redrb.weights.wire.manifest import MAX_NAME_LENGTH, MAX_TENSORS
from redrb.weights.wrapping import plain_name, unwrapped

Value: TypeAlias = "Tensor | TensorShard"
Models: TypeAlias = nn.Module | Mapping[str, nn.Module]
StateLike: TypeAlias = Models | Mapping[str, Value] | Iterable[tuple[str, Value]]
Target: TypeAlias = Models | Mapping[str, Value]
Strict: TypeAlias = bool | Literal["model"]
"""What names must agree: on both sides, on none, or all of the model's must be published."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A box of a larger tensor: what one rank has of it.

    `DTensor`s are understood by themselves; this is for shards that are plain tensors.

    Args:
        tensor: The elements `start` to `start + tensor.shape`.
        shape: Of the whole tensor.
        start: Index of the first element.

    Raises:
        ConfigError: It is no tensor, or the box is not inside.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            raise ConfigError(f"a shard of a {type(self.tensor).__name__}: give it a tensor.")
        sizes = tuple(self.tensor.shape)
        fits = len(sizes) == len(self.start) == len(self.shape) and all(
            at >= 0 and at + size <= whole
            for at, size, whole in zip(self.start, sizes, self.shape, strict=True)
        )
        if not fits:
            raise ConfigError(
                f"a shard of {list(sizes)} that starts at {list(self.start)} is not inside of "
                f"{list(self.shape)}."
            )

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorShard:
        """Return all of a tensor."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the tensor."""
        return tuple(self.tensor.shape) == self.shape


# some of float8 and float4 came with later versions of torch
_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in ITEM_BYTES if hasattr(torch, name)
}
_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}
_CAST = frozenset({"float16", "bfloat16", "float32", "float64"})
_STATES = "give a module, several by name, a state dict or (name, tensor) pairs"
_TARGETS = "give a module, several by name, or a dict of tensors"
_NAMED = "give the module, its state dict, or named_parameters()"


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a module: the live ones, not copies.

    A wrapped one (`torch.compile`, `DistributedDataParallel` ...) has the names of the plain one.

    Raises:
        EncodeError: Two names are one without the wrappers.
    """
    module = unwrapped(module)
    live = {id(tensor) for tensor in module.parameters()}
    live.update(id(tensor) for tensor in module.buffers())
    found: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in live and found.setdefault(plain_name(name), tensor) is not tensor:
            raise EncodeError(
                f"{name!r} and another tensor are both {plain_name(name)!r} without the parts of "
                "torch.compile and checkpoint wrappers: rename one of the two."
            )
    return found


def models_tensors(models: Models) -> dict[str, Tensor]:
    """Return the live tensors of a module; of several, with their models' names before theirs."""
    if isinstance(models, nn.Module):
        return module_tensors(models)
    return {
        f"{model}.{name}": tensor
        for model, module in models.items()
        for name, tensor in module_tensors(module).items()
    }


def state_shards(state: StateLike) -> dict[str, TensorShard]:
    """Return what is to be published, checked; of a `DTensor` what this rank has of it.

    Raises:
        EncodeError: Something in it cannot be published.
    """
    shards: dict[str, TensorShard] = {}
    names = 0
    for name, value in _named(state):
        if name in shards:
            raise EncodeError(f"tensor {name!r} comes twice.")
        _check_name(name)
        names += 1
        shard = value if isinstance(value, TensorShard) else _shard_of(name, value)
        if shard is None:  # another rank has the same
            continue
        _check_publishable(name, shard.tensor)
        shards[name] = shard
    if not 0 < names <= MAX_TENSORS:
        raise EncodeError(f"a version holds 1 to {MAX_TENSORS} tensors, not {names}.")
    return shards


def lay_out(
    shards: Mapping[str, TensorShard], chunk_bytes: int, cast: torch.dtype | None = None
) -> Layout:
    """Give each tensor its place; tied ones (the same memory, read the same way) share one.

    Args:
        shards: From `state_shards`.
        chunk_bytes: Bytes of a chunk.
        cast: Dtype of floating-point tensors in the state; default: their own.
    """
    entries: list[TensorEntry] = []
    owners: dict[tuple[object, ...], TensorEntry] = {}
    end = 0
    for name, shard in shards.items():
        tensor = shard.tensor
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        owner = owners.get(view) if tensor.numel() and shard.is_whole else None
        dtype = _NAMES[tensor.dtype]
        if cast is not None and dtype in _CAST:
            dtype = _NAMES[cast]
        if owner is None:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            piece = Piece(shard.start, tuple(tensor.shape), offset)
            owner = entry = TensorEntry(name, dtype, shard.shape, (piece,))
            owners[view] = entry
            end = offset + piece.elements * entry.item_bytes
        else:
            entry = TensorEntry(name, dtype, shard.shape, owner.pieces, owner.name)
        entries.append(entry)
    nbytes = -(-end // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(entries), nbytes, chunk_bytes)


def published_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to which tensors are cast before they are published.

    Args:
        dtype: torch's, or its name.

    Raises:
        ConfigError: It is not a floating-point dtype.
    """
    if dtype is None:
        return None
    name = _NAMES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in _CAST:
        raise ConfigError(f"dtype={dtype!r}: floating-point tensors are cast to {sorted(_CAST)}.")
    return _DTYPES[name]


def checked_strict(strict: object) -> Strict:
    """Return `strict` as it is.

    Raises:
        ConfigError: It is none of its three values.
    """
    if strict is True or strict is False:
        return strict
    if isinstance(strict, str) and strict == "model":
        return "model"
    raise ConfigError(f'strict={strict!r:.40}: it is True, False or "model".')


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return torch's dtype of a tensor.

    Raises:
        WeightError: This torch does not know it.
    """
    if entry.dtype not in _DTYPES:
        raise WeightError(f"{entry.name!r} is {entry.dtype}: this version of torch has none.")
    return _DTYPES[entry.dtype]


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements lie together; itself if they do."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat_view(tensor: Tensor) -> Bytes:
    """Return the bytes of a contiguous CPU tensor, not a copy of them."""
    view: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def target_shards(target: Target) -> dict[str, TensorShard]:
    """Return the live tensors of a model, of several, or of a dict of tensors.

    Raises:
        ConfigError: It is none of these, or without tensors.
        EncodeError: Two names of a wrapped module are one without the wrappers.
    """
    if not isinstance(target, nn.Module | Mapping):
        raise ConfigError(f"cannot load weights into {_kind(target)}: {_TARGETS}.")
    shards: dict[str, TensorShard] = {}
    for name, value in _named(target):
        if not isinstance(name, str):
            raise ConfigError(f"cannot load weights into {name!r:.80}: names are strings.")
        if isinstance(value, TensorShard):
            shards[name] = value
        elif _is_dtensor(value):
            shards[name] = _local_shard(value)
        elif isinstance(value, Tensor):
            shards[name] = TensorShard.whole(value)
        else:
            raise ConfigError(f"cannot load weights into {name!r}, {_kind(value)}: {_TARGETS}.")
    if not shards:
        raise ConfigError(f"there are no tensors to load weights into: {_TARGETS}.")
    return shards


def check_fits(layout: Layout, targets: Mapping[str, TensorShard], *, strict: Strict) -> list[str]:
    """Return the names to load, after checking that every one of them can be.

    float16, bfloat16, float32 and float64 are cast into each other; every other dtype, and every
    shape, must be equal.

    Raises:
        ConfigError: `strict` is none of its values.
        WeightMismatch: With all that is missing, unexpected and different.
    """
    checked_strict(strict)
    entries = {entry.name: entry for entry in layout.tensors}
    common = [name for name in entries if name in targets]
    problems: dict[str, list[str]] = {}
    if strict:
        problems["in the model but not published"] = [n for n in targets if n not in entries]
    if strict is True:
        problems["published but not in the model"] = [n for n in entries if n not in targets]
    if not strict and not common:
        problems["no name in common; published"] = list(entries)
    differences = {name: _difference(entries[name], targets[name]) for name in common}
    differing = {name: found for name, found in differences.items() if found}
    problems["different"] = [f"{name} ({found})" for name, found in differing.items()]
    told = "; ".join(f"{what}: {listed(names)}" for what, names in problems.items() if names)
    if told:
        on_meta = {name for name, target in targets.items() if target.tensor.is_meta}
        advice = advice_on(
            entries, targets, strict=strict, on_meta=on_meta, differing=differing.keys() - on_meta
        )
        raise WeightMismatch(
            f"these weights do not fit the model: {told}. Nothing was loaded. {advice}"
        )
    return common


def load_in_place(target: TensorShard, value: Tensor, start: tuple[int, ...]) -> None:
    """Copy what a box of values has of a target's elements; `check_fits` was asked before.

    Args:
        target: All of a tensor or a shard of it.
        value: A box of the same tensor, on the CPU.
        start: Index of its first element in the whole tensor.
    """
    live = target.tensor
    with torch.inference_mode(live.is_inference()), torch.no_grad():
        if target.is_whole and tuple(value.shape) == target.shape:
            _copy(value, live)
            return
        ends = zip(start, value.shape, target.start, live.shape, strict=True)
        into, out = [], []
        for first, size, own_first, own_size in ends:
            low, high = max(first, own_first), min(first + size, own_first + own_size)
            if low >= high:
                return
            into.append(slice(low - own_first, high - own_first))
            out.append(slice(low - first, high - first))
        live[tuple(into)].copy_(value[tuple(out)])


def synchronize(targets: Iterable[TensorShard]) -> None:
    """Wait for copies to accelerators: casts are still under way there."""
    for device in {target.tensor.device for target in targets}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _named(state: StateLike) -> Iterator[tuple[Any, Any]]:
    if isinstance(state, nn.Module):
        yield from module_tensors(state).items()
        return
    for name, value in state.items() if isinstance(state, Mapping) else _pairs(state):
        if isinstance(value, nn.Module):
            for inner, tensor in module_tensors(value).items():
                yield f"{name}.{inner}", tensor
        else:
            yield name, value


def _pairs(state: Any) -> Iterator[tuple[Any, Any]]:
    """Give what should be pairs of a name and a tensor."""
    if isinstance(state, Tensor | str | bytes) or not isinstance(state, Iterable):
        raise EncodeError(f"cannot publish {_kind(state)}: {_STATES}.")
    for pair in state:
        if isinstance(pair, Tensor):
            raise EncodeError(f"cannot publish tensors without names: {_NAMED}.")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise EncodeError(f"cannot publish {_kind(pair)} without a name: {_STATES}.")
        yield pair[0], pair[1]


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _is_dtensor(value: object) -> bool:
    return hasattr(value, "full_tensor") and hasattr(value, "placements")


def _shard_of(name: str, value: Any) -> TensorShard | None:
    if not isinstance(value, Tensor):
        raise EncodeError(f"{name!r:.80} is {_kind(value)}, not a tensor: leave it out.")
    if not _is_dtensor(value):
        return TensorShard.whole(value)
    sharded: Any = value
    placements = sharded.placements
    if any(placement.is_partial() for placement in placements):
        raise EncodeError(f"{name!r} is a DTensor of partial sums: redistribute it first.")
    coordinate = sharded.device_mesh.get_coordinate() or []
    if any(at and placement.is_replicate() for at, placement in zip(coordinate, placements)):  # noqa: B905
        return None
    return _local_shard(value)


def _local_shard(value: Any) -> TensorShard:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return TensorShard(value.to_local(), tuple(value.shape), tuple(start))


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise EncodeError(f"{name!r:.80} is not a tensor's name: 1 to {MAX_NAME_LENGTH} letters.")
    if name.encode(errors="ignore").decode() != name:
        raise EncodeError(f"{name!r:.80} is not a tensor's name: UTF-8 cannot hold it.")


def _check_publishable(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_meta:
        raise EncodeError(f"{name!r} is sparse or on the meta device: there are no plain bytes.")
    if tensor.dtype not in _NAMES:
        raise EncodeError(f"{name!r} is {tensor.dtype}, which cannot be published.")


def _copy(value: Tensor, target: Tensor) -> None:
    ordinary = target.is_contiguous() and not (target.is_conj() or target.is_neg())
    if target.device.type != "cpu" or target.dtype != value.dtype or not ordinary:
        target.copy_(value)
        return
    # where cores are busy, the barrier of torch's threads takes 20 times as long as the copy
    flat_view(target)[:] = flat_view(value)
    if not target.is_inference():
        increment_version(target)


def _difference(entry: TensorEntry, shard: TensorShard) -> str:
    """Return why a published tensor cannot be loaded into `shard`, or nothing."""
    target = shard.tensor
    dtype = _NAMES.get(target.dtype, str(target.dtype))
    if entry.shape != shard.shape or (entry.dtype != dtype and not {entry.dtype, dtype} <= _CAST):
        return f"published {entry}, model {dtype}[{', '.join(map(str, shard.shape))}]"
    if target.layout != torch.strided or target.is_meta:
        return f"the model's is {'on the meta device' if target.is_meta else 'sparse'}"
    steps = zip(target.shape, target.stride(), strict=True)
    if any(size > 1 and step == 0 for size, step in steps):
        return "the model's is expanded: several elements share one place"
    return ""
