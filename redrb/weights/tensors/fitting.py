"""Whether published tensors fit a reader's target: names, shapes, dtypes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from redrb.errors import ConfigError, WeightMismatch
from redrb.weights.tensors.dtypes import CASTABLE, DTYPE_NAMES
from redrb.weights.tensors.names import Target, describe_type, named_values
from redrb.weights.tensors.state import TensorShard, is_dtensor, local_shard
from redrb.weights.wire.layout import Layout, TensorEntry

_SHOWN = 5
_SAME = (
    "Publish the same model: shapes must be equal, and only float16, bfloat16, float32 and float64 "
    "are cast into each other."
)
_TO_EMPTY = "Give the model memory first: model.to_empty(device=...)."


def listed(names: Collection[str]) -> str:
    """Return the first few names, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(islice(names, _SHOWN)) + more


def advice_for(
    published: Collection[str],
    of_model: Collection[str],
    *,
    strict: bool | Literal["model"],
    on_meta: Collection[str],
    differing: Collection[str],
) -> str:
    """Return advice on making published weights fit a model."""
    first = [_TO_EMPTY] if on_meta else []
    if differing:
        return " ".join([*first, _SAME])
    known = set(published)
    agree = known == set(of_model) if strict is True else known.issuperset(of_model)
    if not strict:
        agree = not known.isdisjoint(of_model)
    return " ".join(first if agree else [*first, _advice_on_names(known, of_model, strict=strict)])


def _advice_on_names(
    known: Collection[str], of_model: Collection[str], *, strict: bool | Literal["model"]
) -> str:
    if of_model and all(name in known for name in of_model):
        return 'All of the model is published, and more: load it with strict="model".'
    before = _prefixes(of_model, known)
    if before:
        more = ', with strict="model"' if strict is True and len(known) > len(of_model) else ""
        return (
            f"The published names begin with {_either(before)}, the model's do not: load into "
            f'{{"{before[0][:-1]}": model}}{more}, or publish the model without that.'
        )
    before = _prefixes(known, of_model)
    if before:
        return (
            f"The model's names begin with {_either(before)}, the published ones do not: load into "
            f'the part of it that was published, or publish {{"{before[0][:-1]}": model}}.'
        )
    if not any(name in known for name in of_model):
        return "Publish the same model."
    return "Publish the same model, or load what both have with strict=False."


def _prefixes(names: Collection[str], longer: Iterable[str]) -> list[str]:
    """Return the prefixes, such as `actor.`, that turn all of `names` into names in `longer`."""
    known = set(longer)
    example = max(names, key=len, default="")
    found = sorted(name.removesuffix(example) for name in known if name.endswith(f".{example}"))
    return [prefix for prefix in found if all(prefix + name in known for name in names)]


def _either(prefixes: list[str]) -> str:
    return " or ".join(f"{prefix!r}" for prefix in prefixes[:_SHOWN])


Strict: TypeAlias = bool | Literal["model"]
"""Names that must agree: True, all of both sides; "model", all of the model. False loads the names
that both sides have."""

_TARGETS = "give a module, several by name, or a dict of tensors"


def checked_strict(strict: object) -> Strict:
    """Return `strict` after checking it, or raise ConfigError."""
    if strict is True or strict is False:
        return strict
    if isinstance(strict, str) and strict == "model":
        return "model"
    raise ConfigError(f'strict={strict!r:.40}: give True, False or "model".')


def target_shards(target: Target) -> dict[str, TensorShard]:
    """Return the live tensors of a model, of several, or of a dict of tensors."""
    if not isinstance(target, nn.Module | Mapping):
        raise ConfigError(f"cannot load weights into {describe_type(target)}: {_TARGETS}.")
    shards: dict[str, TensorShard] = {}
    for name, value in named_values(target):
        if not isinstance(name, str):
            raise ConfigError(f"cannot load weights into {name!r:.80}: names are strings.")
        if is_dtensor(value):
            shards[name] = local_shard(value)
        elif isinstance(value, Tensor):
            shards[name] = TensorShard.whole(value)
        else:
            raise ConfigError(
                f"cannot load weights into {name!r}, {describe_type(value)}: {_TARGETS}."
            )
    if not shards:
        raise ConfigError(f"there are no tensors to load weights into: {_TARGETS}.")
    return shards


def check_fits(layout: Layout, targets: Mapping[str, TensorShard], *, strict: Strict) -> list[str]:
    """Return the names to load, after checking that each of them can be loaded.

    float16, bfloat16, float32 and float64 are cast into each other; other dtypes, and all shapes,
    must be equal. A tensor of the model need not be published if a published tensor fills its
    memory. A published tensor need not be in the model if it is tied to a tensor that is.
    """
    checked_strict(strict)
    entries = {entry.name: entry for entry in layout.tensors}
    common = [name for name in entries if name in targets]
    problems: dict[str, list[str]] = {}
    if strict:
        filled = _Filled(targets[name].tensor for name in common)
        problems["in the model but not published"] = [
            name
            for name, target in targets.items()
            if name not in entries and not filled.covers(target.tensor)
        ]
    if strict is True:
        owners = {entries[name].alias or name for name in common}
        problems["published but not in the model"] = [
            name
            for name, entry in entries.items()
            if name not in targets and (entry.alias or name) not in owners
        ]
    if not strict and not common:
        problems["no name in common; published"] = list(entries)
    reasons = {name: _difference(entries[name], targets[name]) for name in common}
    differing = {name: reason for name, reason in reasons.items() if reason}
    problems["different"] = [f"{name} ({reason})" for name, reason in differing.items()]
    found = "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names)
    if found:
        on_meta = {name for name, target in targets.items() if target.tensor.is_meta}
        advice = advice_for(
            entries, targets, strict=strict, on_meta=on_meta, differing=differing.keys() - on_meta
        )
        raise WeightMismatch(
            f"these weights do not fit the model: {found}. Nothing was loaded. {advice}"
        )
    return common


class _Filled:
    """The memory of tensors that are loaded."""

    def __init__(self, loaded: Iterable[Tensor]) -> None:
        self._views = set[tuple[object, ...]]()
        self._ranges = dict[object, list[tuple[int, int]]]()
        for tensor in loaded:
            if tensor.layout == torch.strided and not tensor.is_meta:
                self._views.add(_view(tensor))
                if tensor.is_contiguous():
                    self._ranges.setdefault(tensor.device, []).append(_range(tensor))

    def covers(self, tensor: Tensor) -> bool:
        """Return whether loading fills all elements of another tensor, too."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return False
        first, last = _range(tensor)
        ranges = self._ranges.get(tensor.device, ()) if tensor.is_contiguous() else ()
        return _view(tensor) in self._views or any(a <= first and last <= b for a, b in ranges)


def _view(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _range(tensor: Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    return first, first + tensor.nbytes


def _difference(entry: TensorEntry, shard: TensorShard) -> str:
    """Return why a published tensor cannot be loaded into `shard`, "" if it can."""
    target = shard.tensor
    dtype = DTYPE_NAMES.get(target.dtype, str(target.dtype))
    if entry.shape != shard.shape or (
        entry.dtype != dtype and not {entry.dtype, dtype} <= CASTABLE
    ):
        return f"published {entry}, model {dtype}[{', '.join(map(str, shard.shape))}]"
    if target.layout != torch.strided or target.is_meta:
        return f"the model's is {'on the meta device' if target.is_meta else 'sparse'}"
    if target.is_contiguous():
        return ""
    steps = zip(target.shape, target.stride(), strict=True)
    if any(size > 1 and step == 0 for size, step in steps):
        return "the model's is expanded: several elements share memory"
    return ""
