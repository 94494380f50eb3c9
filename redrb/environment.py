"""Reads and sets environment variables; nothing else in redrb does."""

from __future__ import annotations

import os

URL = "REDRB_URL"
"""Where Redis is, with user and password."""

PREFIX = "REDRB_"


def variable(name: str, default: str | None = None) -> str | None:
    """Return environment variable `name`, or `default` where it is unset or empty."""
    return os.environ.get(name) or default


def set_variable(name: str, value: str) -> None:
    """Set environment variable `name` for this process, for libraries that read it."""
    os.environ[name] = value


def search_path() -> str:
    """Return the PATH that is searched for servers."""
    return os.environ.get("PATH", os.defpath)


def child_environment(*, without: str = "", **changes: str) -> dict[str, str]:
    """Return the environment for a process that is started.

    Variables whose names begin with `without` are not inherited; "": all are.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not (without and name.startswith(without))
    }
    return {**inherited, **changes}
