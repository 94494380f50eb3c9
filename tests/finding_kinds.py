"""All kinds of findings that redrb declares."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def finding_kinds(*rooms: str) -> dict[str, dict[str, Any]]:
    """Return severity, cause and repairs by code, of "state" or "doctor"."""
    declared = tomllib.loads(
        (files("redrb.watch.state.findings") / "kinds.toml").read_text("utf-8")
    )
    return {code: kind for room in rooms for code, kind in declared[room].items()}
