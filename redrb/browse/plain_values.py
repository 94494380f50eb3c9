"""Extras as values that JSON can hold, cut where they are long."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any, Final

from redrb.browse.choice import Limits

_KEY: Final = 256
"""Characters of a key."""


class PlainValues:
    """Makes plain values of one group's extras and tags."""

    def __init__(self, limits: Limits) -> None:
        self.cut = 0
        self._limits = limits
        self._text = 8 * limits.text
        self._entries = limits.entries

    def of(self, value: Any) -> Any:
        """Return a value; bytes, times and numbers that are not finite become texts."""
        if isinstance(value, str):
            return self._short(value)
        if isinstance(value, dict):
            return {
                (key if isinstance(key, str) else repr(key))[:_KEY]: self.of(each)
                for key, each in self._first(list(value.items()))
            }
        if isinstance(value, list | tuple):
            return [self.of(each) for each in self._first(value)]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, bytes):
            return f"<{len(value):,} bytes>"
        return value.isoformat() if isinstance(value, datetime) else f"<{type(value).__name__}>"

    def _short(self, text: str) -> str:
        """Return a text, cut; all texts of a group together are bounded too."""
        most = max(min(self._limits.text, self._text), 0)
        self._text -= min(len(text), most)
        if len(text) <= most:
            return text
        self.cut += 1
        return f"{text[:most]}… ({len(text):,} characters)"

    def _first(self, values: Any) -> Any:
        most = max(self._entries, 0)
        self._entries -= min(len(values), most)
        if len(values) > most:
            self.cut += 1
        return values[:most]
