"""The changes between two versions of published weights, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.weights import WeightSubscriber
from redrb.weights.inspection.listing import check_kept

_ITEMS = 1 << 20  # elements that are compared at a time
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorChange:
    """The changes of one tensor.

    Attributes:
        name: Name of the tensor; of tied tensors the first name.
        elements: Number of elements.
        changed: Number of elements with other bits.
        largest: Largest absolute change. This and the next two leave out elements that are
            infinite or NaN in either version.
        largest_relative: `largest`, divided by the largest magnitude of the tensor's elements in
            the earlier version; infinite if all of them are 0.
        norm: L2 norm of the change.
        not_finite: Number of changed elements that are infinite or NaN in either version.
    """

    name: str
    elements: int
    changed: int
    largest: float
    largest_relative: float
    norm: float
    not_finite: int

    @property
    def share(self) -> float:
        """Share of changed elements."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class VersionDifference:
    """The changes between two versions.

    Attributes:
        name: Name of the weights.
        before: The earlier version.
        after: The later version.
        changes: Tensors with changed elements.
        unchanged: Number of tensors with the same bits.
        elements: Number of elements of all tensors that both versions have.
        norm: L2 norm of all changes together.
        added: Tensors that only the later version has.
        removed: Tensors that only the earlier version has.
        other: Tensors whose shape or dtype differs, with both shapes and dtypes.
    """

    name: str
    before: int
    after: int
    changes: tuple[TensorChange, ...]
    unchanged: int
    elements: int
    norm: float
    added: tuple[str, ...]
    removed: tuple[str, ...]
    other: tuple[str, ...]

    @property
    def changed(self) -> int:
        """Number of changed elements."""
        return sum(change.changed for change in self.changes)

    @property
    def share(self) -> float:
        """Share of changed elements."""
        return self.changed / self.elements if self.elements else 0.0


def compare_versions(
    client: Client, name: str, before: int, after: int | None = None, *, namespace: str = "default"
) -> VersionDifference:
    """Compare two kept versions; both are in memory meanwhile.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights.
        before: The earlier version.
        after: The later version; default: the newest.
        namespace: Namespace of the publisher.

    Raises:
        ConfigError: A version is not kept, or only one of them is an adapter.
        WeightCorrupt, DecodeError, StoreUnavailable: As `WeightSubscriber.fetch` does.
    """
    newest = check_kept(client, name, namespace, before, after)
    later = newest if after is None else after
    subscriber = WeightSubscriber(client, name, namespace=namespace)
    old, new = subscriber.fetch(before), subscriber.fetch(later)
    if not old.keys() & new.keys():
        raise ConfigError(
            f"versions {before} and {later} of weights {name!r} have no tensor in common: is "
            "one of them an adapter? `redrb weights show` lists their kinds."
        )
    return _difference(name, before, later, old, new)


def _difference(
    name: str, before: int, after: int, old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> VersionDifference:
    changes: list[TensorChange] = []
    other: list[str] = []
    seen: set[tuple[int, int]] = set()
    elements = unchanged = 0
    for tensor_name, one in old.items():
        two = new.get(tensor_name)
        if two is None or (id(one), id(two)) in seen:
            continue
        seen.add((id(one), id(two)))  # tied tensors are compared once
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            other.append(f"{tensor_name} ({_about(one)} -> {_about(two)})")
            continue
        change = compare(tensor_name, one, two)
        elements += change.elements
        if change.changed:
            changes.append(change)
        else:
            unchanged += 1
    return VersionDifference(
        name,
        before,
        after,
        tuple(changes),
        unchanged,
        elements,
        math.hypot(*(change.norm for change in changes)),
        tuple(key for key in new if key not in old),
        tuple(key for key in old if key not in new),
        tuple(other),
    )


def compare(name: str, old: Tensor, new: Tensor) -> TensorChange:
    """Compare two tensors of equal shape and dtype, a part at a time."""
    changed = not_finite = 0
    largest = squares = 0.0
    flat = _indexable(old.reshape(-1)), _indexable(new.reshape(-1))
    for start in range(0, old.numel(), _ITEMS):
        one, two = (part[start : start + _ITEMS] for part in flat)
        differs = _differs(one, two)
        count = int(differs.sum())
        if not count:
            continue
        changed += count
        was, now = _wide(one[differs]), _wide(two[differs])
        gaps = (now - was).abs().double()
        finite = was.isfinite() & now.isfinite()
        not_finite += int((~finite).sum())
        gaps = gaps[finite]
        if gaps.numel():
            largest = max(largest, float(gaps.max()))
            squares += float(gaps.square().sum())
    relative = _ratio(largest, flat[0]) if largest else 0.0
    norm = math.sqrt(squares)
    return TensorChange(name, old.numel(), changed, largest, relative, norm, not_finite)


def _ratio(largest: float, values: Tensor) -> float:
    """Return a change divided by the largest magnitude of the finite `values`."""
    magnitude = 0.0
    for start in range(0, values.numel(), _ITEMS):
        sizes = _wide(values[start : start + _ITEMS]).abs()
        sizes = sizes[sizes.isfinite()]
        magnitude = max(magnitude, float(sizes.max()) if sizes.numel() else 0.0)
    return largest / magnitude if magnitude else math.inf


def _differs(one: Tensor, two: Tensor) -> Tensor:
    width = one.element_size()
    bits = [part.contiguous().view(_WIDTHS[width]) for part in (one, two)]
    differs = bits[0] != bits[1]
    return differs.view(-1, 2).any(1) if width == 16 else differs


def _indexable(values: Tensor) -> Tensor:
    """Return values of a dtype that torch can index; of packed dtypes the bytes."""
    return values.view(torch.uint8) if str(values.dtype) == "torch.float4_e2m1fn_x2" else values


def _wide(values: Tensor) -> Tensor:
    """Return the values as float64 or complex128."""
    if values.dtype.is_complex:
        return values.to(torch.complex128)
    return values.to(torch.float64)


def _about(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
