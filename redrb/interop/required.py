"""The check that the library of an interop module is installed."""

from __future__ import annotations

from importlib.util import find_spec

from redrb.errors import ConfigError


def require(package: str, *, extra: str) -> None:
    """Raise ConfigError with the command that installs `package`, if it is missing."""
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed: pip install 'redrb[{extra}]'.")
