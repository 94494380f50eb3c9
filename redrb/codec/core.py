"""The compiled core, if there is one of this version; imported without torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

INTERFACE: Final = 3
"""Number of the functions' signatures: a core that an older version compiled is not used."""


def _compiled() -> Any:
    try:
        core = import_module("redrb.codec._core")
    except ImportError:
        return None
    return core if getattr(core, "INTERFACE", 1) == INTERFACE else None


compiled: Final = _compiled()

NAME: Final = "plain Python" if compiled is None else "compiled"
"""Name of the kernel that runs."""
