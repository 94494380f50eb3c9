"""`Cause`: why a delivery failed or a group was rejected, as its dead letter records it."""

from __future__ import annotations

from typing import Self

import msgspec

MOST_CHARACTERS = 2000
"""Longest message that is recorded."""


class Cause(msgspec.Struct, frozen=True):
    """Why groups end without being trained.

    Attributes:
        text: The reason, or the message of the exception.
        exception: Name of the exception's class, with its module unless it is built in; "" without
            an exception.
    """

    text: str = ""
    exception: str = ""

    @classmethod
    def of(cls, reason: str | BaseException, prefix: str = "") -> Self:
        """Return the cause that a reason or an exception is."""
        if isinstance(reason, BaseException):
            kind = type(reason)
            module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            return cls(_storable(prefix + str(reason)), _storable(module + kind.__qualname__))
        return cls(_storable(prefix + reason))


NO_CAUSE = Cause()


def _storable(text: str) -> str:
    """Return a text of bounded length that UTF-8 can hold."""
    return text[:MOST_CHARACTERS].encode(errors="replace").decode()
