"""Unpacks msgpack of unknown origin that has no declared types; nothing else reads such msgpack."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any, Final, TypeVar

import msgpack

from redrb.errors import DecodeError, RedrbError, StoreError

# ValueError: also broken UTF-8 and JSON. ArithmeticError, OSError: times that no calendar has.
# RecursionError: JSON of many levels.
SIGNS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    OSError,
    RecursionError,
)
"""Errors of the statements that parse a reply, which `Reading` turns into a `StoreError`."""


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
        if isinstance(error, SIGNS) and not isinstance(error, RedrbError):
            raise StoreError(
                f"{self._what} cannot be read: {error!s:.200}. Redis holds a value that redrb did "
                "not write: look for programs that write into its keys, and restore the data "
                "(`redrb resume`, a backup of the server) or delete it (`redrb rm`)."
            ) from error


T = TypeVar("T")

MAX_NESTING: Final = 64
"""Levels of lists and maps in a msgpack object; a deeper one breaks `repr`, `copy` and `pickle`."""

MAX_CONTAINERS: Final = 1 << 18
"""Lists and maps in a msgpack object: one of a byte takes up to 72 bytes of memory."""

_UNCHECKED_BYTES: Final = 4096

_HEADS: Final = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
"""First bytes of lists and maps."""

_CONTAINERS: Final = frozenset((list, dict))

# ValueError: msgpack's FormatError, StackError and ExtraData, broken UTF-8, foreign keys.
# OverflowError: far times. TypeError: lists as keys. RecursionError: msgpack without its extension.
_UNPACK_ERRORS = (ValueError, OverflowError, TypeError, RecursionError)


def unpack(
    data: bytes | memoryview,
    what: str,
    *,
    levels: int = MAX_NESTING,
    containers: int = MAX_CONTAINERS,
    unicode_errors: str = "strict",
    raw: bool = False,
) -> Any:
    """Unpack one msgpack object from an untrusted source.

    Maps keep their order and need distinct keys of str or bytes; timestamps become aware datetimes.

    Args:
        what: Names it in errors.
        unicode_errors: What is done with texts that are not UTF-8, as in `bytes.decode`.
        raw: Leave texts as bytes.

    Raises:
        DecodeError: It is not exactly one well-formed object, or has too many levels, lists or
            maps.
    """
    large = len(data) > _UNCHECKED_BYTES
    counter = _Counter(containers) if large or may_hold_more(data, levels) else None
    try:
        if large:
            # claimed lengths beyond the data are refused before lists of these are allocated
            unpacker = msgpack.Unpacker(read_size=len(data), max_buffer_size=len(data))
            unpacker.feed(data)
            unpacker.skip()
        found = msgpack.unpackb(
            data,
            raw=raw,
            unicode_errors=unicode_errors,
            strict_map_key=True,
            timestamp=3,
            list_hook=counter and counter.of_list,
            object_pairs_hook=counter.of_map if counter else _distinct,
        )
        if counter and counter.count > levels:
            _check_nesting(found, levels)
    except (msgpack.UnpackException, *_UNPACK_ERRORS) as error:
        raise DecodeError(f"the {what} is not valid msgpack: {error}") from error
    return found


def unpack_sequence(data: bytes, what: str) -> list[Any]:
    """Unpack msgpack objects that follow each other, each with the limits of one object."""
    unpacker = msgpack.Unpacker(read_size=len(data), max_buffer_size=len(data))
    unpacker.feed(data)
    found, at = [], 0
    try:
        while at < len(data):
            unpacker.skip()
            found.append(unpack(data[at : unpacker.tell()], what))
            at = unpacker.tell()
    except (msgpack.UnpackException, *_UNPACK_ERRORS) as error:
        if isinstance(error, DecodeError):
            raise
        raise DecodeError(f"the {what} is not valid msgpack: {error}") from error
    return found


def may_hold_more(data: bytes | memoryview, containers: int) -> bool:
    """Return whether so many bytes of `data` may begin a list or map that there are more."""
    if len(data) <= containers:
        return False
    return len(data) - len(bytes(data).translate(None, _HEADS)) > containers


def _distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a map has a key twice")
    return found


class _Counter:
    """Counts the lists and maps of one object while msgpack makes them; refuses too many."""

    __slots__ = ("count", "most")

    def __init__(self, most: int) -> None:
        self.count = 0
        self.most = most

    def of_list(self, found: T) -> T:
        self.count += 1
        if self.count > self.most:
            raise ValueError(f"it has more than {self.most} lists and maps")
        return found

    def of_map(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        return self.of_list(_distinct(pairs))


def _check_nesting(value: Any, levels: int) -> None:
    """Refuse more levels of lists and maps, by a loop: recursion would be the danger itself."""
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(levels):
        level = [
            child
            for each in level
            for child in (each.values() if type(each) is dict else each)
            if type(child) in _CONTAINERS
        ]
    if level:
        raise ValueError(f"lists and maps are nested more than {levels} levels deep")
