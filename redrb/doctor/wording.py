"""Shows names that come from Redis without characters that a terminal would obey."""

from __future__ import annotations

_LONGEST = 60


def shown(text: str, *, longest: int = _LONGEST) -> str:
    """Return a name, or another text, that is safe to print, and not too long."""
    safe = text if text.isascii() and text.isprintable() else ascii(text)
    return safe if len(safe) <= longest else f"{safe[:longest]}..."
