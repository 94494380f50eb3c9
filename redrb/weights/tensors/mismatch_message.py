"""Advice for the message of `WeightMismatch`: how to make published weights fit a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Literal

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
