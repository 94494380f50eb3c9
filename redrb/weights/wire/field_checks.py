"""Checks of single values of a manifest, which came over the network."""

from __future__ import annotations

import reprlib
from typing import Any

from redrb.errors import DecodeError


def integer_field(fields: dict[str, Any], name: str, least: int, most: int) -> int:
    """Return an integer field of a manifest.

    Raises:
        DecodeError: It is missing, no integer, or out of range.
    """
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        raise DecodeError(
            f"manifest: {name} is {shortened(value)}, not an integer {least} to {most}."
        )
    return value


def shortened(value: object) -> str:
    """Return a value's repr for an error message, at most 80 letters."""
    return reprlib.repr(value)[:80]
