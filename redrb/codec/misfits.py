"""Finds the groups that do not fit into one batch with the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from redrb.codec.layout import GroupLayout
from redrb.experience.padding import MASK_OF

_MASKS = frozenset(MASK_OF.values())


def misfits(layouts: Sequence[GroupLayout]) -> list[int]:
    """Return the indices of the groups whose fields, ranks or dtypes differ from most others'."""
    kinds = [_kind(layout) for layout in layouts]
    usual = Counter(kinds).most_common(1)[0][0] if kinds else None
    return [index for index, kind in enumerate(kinds) if kind != usual]


def _kind(layout: GroupLayout) -> frozenset[Any]:
    """Return the facts that must be equal in a batch: each field's dtype, rank, inner dimensions.

    Masks are left out, because a missing mask can be made.
    """
    return frozenset(
        (field.name,) if shape is None else (field.name, field.dtype.code, len(shape), shape[1:])
        for column, field in enumerate(layout.fields)
        for shape in layout.shapes(column)
        if field.name not in _MASKS
    )
