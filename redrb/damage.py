"""`Reading`: damage in a value that was read from Redis becomes a `StoreError`.

Any program that reaches the server can write into the keys of redrb, so every function that turns
replies into numbers, texts and times runs within a `Reading`.
"""

from __future__ import annotations

from contextlib import ContextDecorator

from redrb.errors import RedrbError, StoreError

# ValueError: also broken UTF-8 and JSON. ArithmeticError, OSError: times that no calendar has.
# RecursionError: JSON of many levels.
_SIGNS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    OSError,
    RecursionError,
)


def whole(value: bytes | str | int) -> int:
    """Return a whole number of 64 bits, as all counters are; raises ValueError for others."""
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{value!r:.40} is beyond 64 bits")
    return number


class Reading(ContextDecorator):
    """Turns errors of the statements that parse a reply into a `StoreError`.

    It is a context manager and a decorator. Errors of redrb pass through.
    """

    def __init__(self, what: str) -> None:
        """Name in errors what is parsed, such as "the counters of a task"."""
        self._what = what

    def __enter__(self) -> None:
        """Begin to parse."""

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Raise `StoreError` if parsing has failed."""
        if isinstance(error, _SIGNS) and not isinstance(error, RedrbError):
            raise StoreError(
                f"{self._what} cannot be read: {error!s:.200}. Redis holds a value that redrb did "
                "not write: look for programs that write into its keys, and restore the data "
                "(`redrb resume`, a backup of the server) or delete it (`redrb rm`)."
            ) from error
