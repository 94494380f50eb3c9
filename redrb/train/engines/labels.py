"""Labels of a server's weights: which version it has, and which loading of it."""

from __future__ import annotations

import re
from dataclasses import dataclass


def weights_of(label: str | None) -> str | None:
    """Return which weights a label of `_give` names; each loading of them has another label."""
    return None if label is None else label.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Named:
    """What a label of `weights_label` says."""

    version: int
    created_ms: int
    family: str


def weights_label(version: int, created_s: float, family: str) -> str:
    """Return what names a version at servers; all makers of the same weights give it this name.

    Args:
        family: 16 hexadecimal digits that only versions of the same weights have.
    """
    return f"version-{version}-{round(created_s * 1000)}-{family}"


_LABEL = re.compile(r"version-([0-9]{1,16})-([0-9]{1,16})-([0-9a-f]{16})(?:/[0-9a-f]+)?")


def parsed(label: str | None) -> Named | None:
    """Return what a label says; None if `weights_label` has not made it."""
    found = _LABEL.fullmatch(label or "")
    return None if found is None else Named(int(found[1]), int(found[2]), found[3])


def of_same(label: str | None, other: str | None) -> Named | None:
    """Return what a label says if it names a version of the same weights as another label."""
    found, known = parsed(label), parsed(other)
    return found if found and known and found.family == known.family else None
