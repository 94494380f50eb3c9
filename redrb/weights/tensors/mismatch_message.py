"""What to do where published names and a model's do not agree."""

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
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(islice(names, _SHOWN)) + more


def advice_for(
    published: Collection[str],
    own: Collection[str],
    *,
    strict: bool | Literal["model"],
    on_meta: Collection[str],
    differing: Collection[str],
) -> str:
    """Return what is to be done until published weights fit a model.

    Args:
        published: Names in the published version.
        own: Names of the model that it was to be loaded into.
        strict: Which names have to agree.
        on_meta: Names of the model's tensors that have no memory.
        differing: Names that both have, of other tensors.
    """
    first = [_TO_EMPTY] if on_meta else []
    if differing:
        return " ".join([*first, _SAME])
    known = set(published)
    agree = known == set(own) if strict is True else known.issuperset(own)
    if not strict:
        agree = not known.isdisjoint(own)
    return " ".join(first if agree else [*first, _advice_on_names(known, own, strict=strict)])


def _advice_on_names(
    known: Collection[str], own: Collection[str], *, strict: bool | Literal["model"]
) -> str:
    if own and all(name in known for name in own):
        return 'All of the model is published, and more: load it with strict="model".'
    before = _prefixes(own, known)
    if before:
        more = ', with strict="model"' if strict is True and len(known) > len(own) else ""
        return (
            f"The published names begin with {_either(before)}, the model's do not: load into "
            f'{{"{before[0][:-1]}": model}}{more}, or publish the model without that.'
        )
    before = _prefixes(known, own)
    if before:
        return (
            f"The model's names begin with {_either(before)}, the published ones do not: load into "
            f'the part of it that was published, or publish {{"{before[0][:-1]}": model}}.'
        )
    if not any(name in known for name in own):
        return "Publish the same model."
    return "Publish the same model, or load what both have with strict=False."


def _prefixes(names: Collection[str], longer: Iterable[str]) -> list[str]:
    """Return what makes names in `longer` of all `names` when it is put before them: `actor.`."""
    known = set(longer)
    example = max(names, key=len, default="")
    found = sorted(name.removesuffix(example) for name in known if name.endswith(f".{example}"))
    return [prefix for prefix in found if all(prefix + name in known for name in names)]


def _either(prefixes: list[str]) -> str:
    return " or ".join(f"{prefix!r}" for prefix in prefixes[:_SHOWN])
