"""All kinds of findings that the modules of redrb declare."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from redrb.state.model import FindingKind


def finding_kinds(*packages: str) -> set[FindingKind]:
    """Return the kinds that the modules of packages, such as "redrb.doctor", declare."""
    modules = (
        import_module(f"{name}.{each.name}")
        for name in packages
        for each in iter_modules(import_module(name).__path__)
    )
    return {kind for one in modules for kind in vars(one).values() if isinstance(kind, FindingKind)}
