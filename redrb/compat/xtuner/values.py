"""Values of a rollout's fields as msgpack can store them, and back.

Lists, dicts with string keys, numbers, text and bytes are stored as they are. Any other value is
stored as a dict whose key `TAG` names its kind. docs/contributing/decisions/xtuner.md lists the
kinds.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from redrb.codec.wire import INT64_RANGE
from redrb.compat.xtuner.arrays import pack_numpy, pack_tensor, unpack_numpy, unpack_tensor
from redrb.compat.xtuner.object_refs import is_reference, resolved, restored
from redrb.compat.xtuner.rollout_fields import fields_of, is_record
from redrb.errors import DecodeError, RecordError
from redrb.experience import Status

TAG = "$"
MAX_DEPTH = 64

_PLAIN = {str, float, bool, bytes, type(None)}
_UINT64_END = 2**64


def pack_value(value: Any, field: str, depth: int = 0) -> Any:
    """Return a value as msgpack can store it, or raise RecordError.

    Args:
        value: None, bool, int of 64 bits, float, str, bytes, list, tuple, set, dict, aware
            datetime, numpy array or scalar, torch tensor, or Ray ObjectRef of these. Of an Enum its
            value is stored, of an object of a dataclass, pydantic model or msgspec Struct the dict
            of its fields.
        field: The rollout's field, for error messages.
        depth: Number of containers around the value.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth > MAX_DEPTH:
        raise RecordError(
            f"{field} is nested deeper than {MAX_DEPTH}, or contains itself.", field=field
        )
    if kind is int:
        return _checked_int(value, field)
    if kind is list:
        return _pack_list(value, field, depth)
    return _pack_other(value, field, depth + 1)


def unpack_value(value: Any) -> Any:
    """Return the value that `pack_value` has packed, or raise DecodeError."""
    if isinstance(value, list):
        if set(map(type, value)).isdisjoint((list, dict)):
            return value
        return [unpack_value(each) for each in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: unpack_value(each) for key, each in value.items()}
    unpack = _UNPACK.get(value[TAG]) if isinstance(value[TAG], str) else None
    if unpack is None:
        _malformed(value)
    try:
        return unpack(value)
    except (TypeError, ValueError) as error:  # a list as a key or in a set, no status
        if isinstance(error, DecodeError):
            raise
        raise DecodeError(f"a stored rollout is malformed: {error}.") from error


def _checked_int(value: int, field: str) -> int:
    if not INT64_RANGE.start <= value < _UINT64_END:
        raise RecordError(f"{field} holds {value}: it does not fit into 64 bits.", field=field)
    return value


def _pack_list(values: list[Any], field: str, depth: int) -> list[Any]:
    kinds = set(map(type, values))
    if kinds == {int}:
        _checked_int(min(values), field)
        _checked_int(max(values), field)
        return values
    if kinds <= _PLAIN:
        return values
    return [pack_value(value, field, depth + 1) for value in values]


def _pack_other(value: Any, field: str, depth: int) -> Any:
    if isinstance(value, Status):
        return {TAG: "status", "of": value.value}
    if isinstance(value, Enum):
        return pack_value(value.value, field, depth)
    if isinstance(value, dict):
        return _pack_dict(value, field, depth)
    if isinstance(value, np.generic) and not isinstance(value, np.object_ | np.void):
        packed = pack_numpy(value, field)
        return {TAG: "scalar", "dtype": packed["dtype"], "data": packed["data"]}
    if isinstance(value, np.ndarray):
        return {TAG: "numpy", **pack_numpy(value, field)}
    if isinstance(value, Tensor):
        return {TAG: "tensor", **pack_tensor(value, field)}
    for kind in (tuple, set, frozenset, list):
        if isinstance(value, kind) and not hasattr(value, "_fields"):
            listed = _pack_list(list(value), field, depth)
            return listed if kind is list else {TAG: kind.__name__, "of": listed}
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value
    if is_record(value):
        return _pack_dict(fields_of(value), field, depth)
    if isinstance(value, int):  # of a subclass, as are the next ones
        return _checked_int(int(value), field)
    if isinstance(value, float | bytes):
        return float(value) if isinstance(value, float) else bytes(value)
    if isinstance(value, str):
        return str.__str__(value)
    if is_reference(value):
        return {TAG: "ref", "of": pack_value(resolved(value, field), field, depth)}
    own = type(value)
    raise RecordError(
        f"{field} holds a {own.__module__}.{own.__qualname__}, which cannot be stored: use "
        "None, bool, int, float, str, bytes, lists, dicts, numpy arrays, torch tensors, enums, "
        "dataclasses or models of these; where Ray does not run, resolve a Ray ObjectRef with "
        "ray.get first.",
        field=field,
    )


def _pack_dict(values: dict[Any, Any], field: str, depth: int) -> dict[str, Any]:
    if TAG not in values and set(map(type, values)) <= {str}:
        return {key: pack_value(value, field, depth) for key, value in values.items()}
    pairs = [
        [pack_value(key, field, depth), pack_value(value, field, depth)]
        for key, value in values.items()
    ]
    return {TAG: "dict", "of": pairs}


def _unpack_dict(value: dict[str, Any]) -> dict[Any, Any]:
    pairs = _list(value)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        _malformed(value)
    return {key: each for key, each in pairs}  # noqa: C416 (dict() would accept strings as pairs)


def _unpack_array(value: dict[str, Any]) -> Any:
    unpack = unpack_tensor if value[TAG] == "tensor" else unpack_numpy
    return unpack(value.get("dtype"), value.get("shape"), value.get("data"))


_UNPACK: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tuple": lambda value: tuple(_list(value)),
    "set": lambda value: set(_list(value)),
    "frozenset": lambda value: frozenset(_list(value)),
    "dict": _unpack_dict,
    "ref": lambda value: restored(unpack_value(value.get("of"))),
    "status": lambda value: Status(value.get("of", "")),
    "scalar": lambda value: unpack_numpy(value.get("dtype"), [], value.get("data"))[()],
    "numpy": _unpack_array,
    "tensor": _unpack_array,
}


def _list(value: dict[str, Any]) -> list[Any]:
    elements = value.get("of")
    if not isinstance(elements, list):
        _malformed(value)
    unpacked: list[Any] = unpack_value(elements)
    return unpacked


def _malformed(value: object) -> NoReturn:
    raise DecodeError(f"a stored rollout is malformed: {value!r:.80}.")
