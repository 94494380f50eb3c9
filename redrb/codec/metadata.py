"""Packs the metadata of groups: versions, statuses, group id, tags and extras."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, index
from typing import Any, TypeVar

import msgpack

from redrb.codec.collecting import check_text
from redrb.codec.wire import (
    COMPLETED,
    INT64_RANGE,
    MAX_EXTRAS_BYTES,
    MAX_GROUP_ID_BYTES,
    MAX_NAME_BYTES,
    MAX_TAGS,
    STATUS_CODES,
    STATUSES,
)
from redrb.errors import DecodeError, EncodeError
from redrb.experience.batching import METADATA
from redrb.experience.records import BufferItem
from redrb.experience.status import Status, group_status
from redrb.packing import FLAT, pack, pack_equal
from redrb.unpacking import MAX_CONTAINERS, MAX_NESTING, may_hold_more, unpack

T = TypeVar("T")
Row = tuple[Any, Any, Any, Any, Any]
"""Policy version, status, group id, tags and extras of one sample: the order of METADATA."""

_SCALARS = (str, int, float, bool)
_row = attrgetter(*METADATA)
_HELD = (
    "msgpack holds None, bool, 64-bit int, float, str, bytes, aware datetime, list, and dict with "
    "keys of str or bytes"
)
_LEVELS_ABOVE = 2
"""Levels around an extra: the list of the samples' extras, and the map of one sample's."""


@dataclass(slots=True)
class Metadata:
    """One group's metadata, ready for the wire.

    Attributes:
        policy_version: The oldest of the samples' policy versions.
        newest: The newest of them.
        tails: How many elements the header has after the columns, without trailing defaults.
        tail: These elements, packed.
        extras: The packed extras; empty where no sample has any.
    """

    samples: int
    policy_version: int | None
    newest: int | None
    status: Status
    tails: int
    tail: bytes
    extras: bytes


def metadata_of_items(
    groups: Sequence[Sequence[BufferItem]], policy_version: int | None
) -> list[Metadata]:
    """Return each group's metadata; samples without a version have `policy_version`."""
    return [
        _lone_metadata(_row(group[0]), policy_version)
        if len(group) == 1
        else _metadata(list(map(_row, group)), policy_version)
        for group in groups
    ]


def _metadata(rows: Sequence[Row], default: int | None) -> Metadata:
    """Return the metadata of a group of several samples."""
    given, statuses, ids, tags, extras = zip(*rows, strict=True)
    versions = _versions(given, default)
    known = [version for version in versions if version is not None]
    codes = list(map(_status_code, statuses))
    same_version = versions.count(versions[0]) == len(versions)
    same_status = codes.count(codes[0]) == len(codes)
    status = STATUSES[codes[0]] if same_status else group_status(STATUSES[code] for code in codes)
    group_id = ids[0]
    if ids.count(group_id) != len(ids):
        other = next(each for each in ids if each != group_id)
        raise EncodeError(
            f"one group holds samples of group_id {group_id!r} and {other!r}: "
            "put the completions of different prompts as different groups."
        )
    if group_id is not None:
        _checked_id(group_id)
    version, code = versions[0] if same_version else versions, codes[0] if same_status else codes
    tail = _tail(version, code, group_id, _tags(tags))
    oldest, newest = (min(known), max(known)) if known else (None, None)
    return Metadata(len(rows), oldest, newest, status, len(tail), _packed(tail), _extras(extras))


def _lone_metadata(row: Row, default: int | None) -> Metadata:
    """Return the metadata of a group of one sample: the fast path of `_metadata`."""
    version, status, group_id, tags, extras = row
    if version is None:
        version = default
    if type(version) is not int or version not in INT64_RANGE:
        version = _version(version)
    code = _status_code(status)
    if not (tags or extras):
        return _short_metadata(version, code, None if group_id is None else _checked_id(group_id))
    if group_id is not None:
        _checked_id(group_id)
    tail = _tail(version, code, group_id, _tags([tags]))
    return Metadata(
        1, version, version, STATUSES[code], len(tail), _packed(tail), _extras([extras])
    )


@lru_cache(maxsize=256)
def _short_metadata(version: int | None, code: int, group_id: str | None) -> Metadata:
    """Return the metadata of one sample without tags and extras; few are different."""
    tail = _tail(version, code, group_id, None)
    return Metadata(1, version, version, STATUSES[code], len(tail), _packed(tail), b"")


def _packed(tail: tuple[Any, ...]) -> bytes:
    """Return up to 15 elements, packed one after the other."""
    packed: bytes = msgpack.packb(tail)
    return packed[1:]  # without the head of a short list


def _tail(versions: Any, codes: Any, group_id: str | None, tags: Any) -> tuple[Any, ...]:
    if tags is not None:
        return (versions, codes, group_id, tags)
    if group_id is not None:
        return (versions, codes, group_id)
    if codes != COMPLETED:
        return (versions, codes)
    return () if versions is None else (versions,)


def _versions(values: Sequence[Any], default: int | None) -> list[int | None]:
    """Return the versions of samples, checked."""
    if set(map(type, values)) == {int} and min(values) >= 0 and max(values) in INT64_RANGE:
        return list(values)
    return [_version(default if value is None else value) for value in values]


def _version(value: object) -> int | None:
    if value is None:
        return None
    try:
        number = int(index(value))  # type: ignore[arg-type]
    except TypeError as error:
        raise EncodeError(f"policy_version is {value!r}, not an int or None.") from error
    if number not in INT64_RANGE:
        raise EncodeError(f"policy_version {number} does not fit in 64 bits.")
    return number


def _status_code(status: object) -> int:
    code = STATUS_CODES.get(status) if isinstance(status, str) else None  # type: ignore[call-overload]
    if code is None:
        known = ", ".join(STATUSES)
        raise EncodeError(f"status is {status!r}: use one of redrb.Status ({known}).")
    return int(code)


def _checked_id(group_id: str) -> str:
    check_text(group_id, MAX_GROUP_ID_BYTES, "group_id")
    return group_id


def _tags(rows: Sequence[Any]) -> dict[str, Any] | list[dict[str, Any]] | None:
    if not any(rows):
        return None
    tags = [_map(row, "tags") for row in rows]
    packed = [_pack_map(each, "tag", _check_tag) for each in tags]
    for each in tags:
        if len(each) > MAX_TAGS:
            raise EncodeError(f"{len(each)} tags are more than {MAX_TAGS}: put text into extras.")
    return tags[0] if packed.count(packed[0]) == len(packed) else tags


def _map(row: object, what: str) -> dict[str, Any]:
    if not isinstance(row, Mapping | None):
        raise EncodeError(f"{what} is a {type(row).__name__} ({row!r:.40}): give a dict, or None.")
    return dict(row or {})


def _check_tag(key: str, value: object) -> None:
    check_text(key, MAX_NAME_BYTES, "a tag's key")
    if not isinstance(value, _SCALARS):
        raise EncodeError(
            f"tag {key!r} is a {type(value).__name__}: a tag is a str, int, float or bool; "
            "put the rest into extras."
        )


def _extras(rows: Sequence[Any]) -> bytes:
    if not any(rows):
        return b""
    packed = [_pack_map(_map(row, "extras"), "extra", _check_extra) for row in rows]
    joined = b"".join([msgpack.Packer().pack_array_header(len(packed)), *packed])
    if len(joined) > MAX_EXTRAS_BYTES:
        raise EncodeError(f"extras have {len(joined)} bytes, the limit is {MAX_EXTRAS_BYTES}.")
    if may_hold_more(joined, MAX_CONTAINERS):
        try:
            unpack(joined, "extras")
        except DecodeError as error:
            raise EncodeError(f"extras cannot be stored: {error}") from error
    return joined


def _check_extra(key: str, value: object) -> None:
    """Refuse values that would not come back equal, such as tuples and maps with int keys."""
    check_text(key, MAX_EXTRAS_BYTES, "an extra's key")
    if type(value) not in FLAT:
        try:
            pack_equal(value, levels=MAX_NESTING - _LEVELS_ABOVE)
        except ValueError as error:
            raise EncodeError(f"extra {key!r} cannot be stored: {error} ({_HELD}).") from error


def _pack_map(values: Mapping[str, Any], what: str, check: Callable[[str, object], None]) -> bytes:
    """Return `values` as msgpack; the error names the key whose value cannot be packed."""
    for key, value in values.items():
        check(key, value)
    try:
        return _pack(values)
    except EncodeError:
        for key, value in values.items():
            try:
                _pack(value)
            except EncodeError as error:
                raise EncodeError(f"{what} {key!r} cannot be stored: {error}") from error.__cause__
        raise


def _pack(value: object) -> bytes:
    try:
        return pack(value)
    except ValueError as error:
        raise EncodeError(f"{error} ({_HELD}).") from error
