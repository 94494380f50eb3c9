"""The compiled core, if there is one of this version; imported without torch."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any, Final

INTERFACE: Final = 5
"""Number of the functions' signatures: a core that an older version compiled is not used."""


def load() -> tuple[Any, str]:
    """Return the compiled core, or None, and the name of the kernel that runs.

    Without a core the plain kernel runs, as after an installation without a compiler. A core that
    is there and cannot be used is a fault of the installation, and makes the codec several times
    slower: this warns, and the name has the reason.
    """
    try:
        core = import_module("redrb.codec._core")
    except ModuleNotFoundError:
        return None, "plain Python"
    except ImportError as error:
        reason = str(error)
    else:
        if core.INTERFACE == INTERFACE:
            return core, "compiled"
        reason = f"the compiled core has interface {core.INTERFACE}, redrb needs {INTERFACE}"
    warnings.warn(
        f"redrb's codec runs in plain Python, which is slow: {reason}. Reinstall redrb.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None, f"plain Python, because {reason}: reinstall redrb"


compiled, NAME = load()
"""The compiled core or None; the name of the kernel that runs."""
