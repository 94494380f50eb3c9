"""Values of a rollout's fields as msgpack can store them, and back.

Lists, dicts with string keys, numbers, text and bytes are stored as they are. Any other value is
stored as a dict whose key `TAG` names its kind; docs/decisions/0011 lists the kinds.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from redrb.codec.wire import INT64_RANGE
from redrb.errors import DecodeError, RecordError
from redrb.experience import Status
from redrb.replay.arrays import pack_numpy, pack_tensor, unpack_numpy, unpack_tensor
from redrb.replay.rollout_classes import (
    RolloutClasses,
    is_record,
    name_of,
    rebuild,
    remember,
    state_of,
)

TAG = "$"
MAX_DEPTH = 64

_PLAIN = {str, float, bool, bytes, type(None)}
_UINT64_END = 2**64


def pack_value(value: Any, field: str, depth: int = 0) -> Any:
    """Return a value as msgpack can store it.

    Args:
        value: None, bool, int of 64 bits, float, str, bytes, list, tuple, set, dict, Enum, aware
            datetime, numpy array or scalar, torch tensor, or an object of a dataclass or model.
        field: The rollout's field, for error messages.
        depth: Number of containers around the value.

    Raises:
        RecordError: The value is, or contains, something else.
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


def unpack_value(value: Any, classes: RolloutClasses) -> Any:
    """Return the value that `pack_value` has packed.

    Raises:
        DecodeError: The packed value is malformed.
        ConfigError: It is an object of a class that this process does not know.
    """
    if isinstance(value, list):
        if set(map(type, value)).isdisjoint((list, dict)):
            return value
        return [unpack_value(each, classes) for each in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: unpack_value(each, classes) for key, each in value.items()}
    unpack = _UNPACK.get(value[TAG]) if isinstance(value[TAG], str) else None
    if unpack is None:
        _malformed(value)
    return unpack(value, classes)


def as_dict(state: dict[str, Any]) -> dict[str, Any]:
    """Return an object's attributes without dunder names, which belong to its class."""
    return {name: value for name, value in state.items() if not name.startswith("__")}


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
    if isinstance(value, Enum):
        packed = pack_value(value.value, field, depth)
        return {TAG: "enum", "class": remember(type(value)), "value": packed}
    if isinstance(value, dict):
        return _pack_dict(value, field, depth)
    if isinstance(value, np.generic) and not isinstance(value, np.object_ | np.void):
        dtype, _, data = pack_numpy(value, field)
        return {TAG: "scalar", "dtype": dtype, "data": data}
    if isinstance(value, np.ndarray):
        return {TAG: "numpy", **_named(pack_numpy(value, field))}
    if isinstance(value, Tensor):
        return {TAG: "tensor", **_named(pack_tensor(value, field))}
    for kind in (tuple, set, frozenset, list):
        if isinstance(value, kind) and not hasattr(value, "_fields"):
            packed = _pack_list(list(value), field, depth)
            return packed if kind is list else {TAG: kind.__name__, "of": packed}
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value
    if is_record(value):
        state = _pack_dict(state_of(value), field, depth)
        return {TAG: "object", "class": remember(type(value)), "state": state}
    return _pack_subclass(value, field)


def _pack_subclass(value: Any, field: str) -> Any:
    """Return a value of a subclass of a plain type as that type, or raise RecordError."""
    if isinstance(value, int):
        return _checked_int(int(value), field)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    raise RecordError(
        f"{field} holds a {name_of(type(value)).replace(':', '.')}, which cannot be stored: use "
        "None, bool, int, float, str, bytes, lists, dicts, numpy arrays, torch tensors, enums, "
        "dataclasses or models of these; resolve a Ray ObjectRef with ray.get first.",
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


def _named(packed: tuple[str, list[int], bytes]) -> dict[str, Any]:
    dtype, shape, data = packed
    return {"dtype": dtype, "shape": shape, "data": data}


def _unpack_enum(value: dict[str, Any], classes: RolloutClasses) -> Any:
    member, name = unpack_value(value.get("value"), classes), _text(value, "class")
    kind = Status if name == name_of(Status) else classes.find_enum(name)
    if kind is None:
        return member  # equal to the member if the enum is a str or an int as well
    try:
        return kind(member)
    except ValueError as error:
        raise DecodeError(f"{member!r:.80} is no {name}: the enum has changed.") from error


def _unpack_object(value: dict[str, Any], classes: RolloutClasses) -> Any:
    state = unpack_value(value.get("state"), classes)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        _malformed(value)
    if classes.rollout_type is dict:
        return as_dict(state)
    return rebuild(classes.find(_text(value, "class")), state)


def _unpack_dict(value: dict[str, Any], classes: RolloutClasses) -> dict[Any, Any]:
    pairs = [unpack_value(pair, classes) for pair in _list(value)]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        _malformed(value)
    try:
        return {key: each for key, each in pairs}  # noqa: C416 (dict() would accept strings as pairs)
    except TypeError as error:  # a list as a key
        raise DecodeError("a stored rollout is malformed: a dict has a list as a key.") from error


def _unpack_set(value: dict[str, Any], classes: RolloutClasses) -> set[Any]:
    try:
        return set(unpack_value(_list(value), classes))
    except TypeError as error:
        raise DecodeError("a stored rollout is malformed: a set holds a list.") from error


def _unpack_scalar(value: dict[str, Any], _: RolloutClasses) -> Any:
    return unpack_numpy(value.get("dtype"), [], value.get("data"))[()]


def _unpack_array(value: dict[str, Any], _: RolloutClasses) -> Any:
    unpack = unpack_tensor if value[TAG] == "tensor" else unpack_numpy
    return unpack(value.get("dtype"), value.get("shape"), value.get("data"))


_UNPACK: dict[str, Callable[[dict[str, Any], RolloutClasses], Any]] = {
    "tuple": lambda value, classes: tuple(unpack_value(_list(value), classes)),
    "set": _unpack_set,
    "frozenset": lambda value, classes: frozenset(_unpack_set(value, classes)),
    "dict": _unpack_dict,
    "enum": _unpack_enum,
    "object": _unpack_object,
    "scalar": _unpack_scalar,
    "numpy": _unpack_array,
    "tensor": _unpack_array,
}


def _list(value: dict[str, Any]) -> list[Any]:
    elements = value.get("of")
    if not isinstance(elements, list):
        _malformed(value)
    return elements


def _text(value: dict[str, Any], key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        _malformed(value)
    return text


def _malformed(value: object) -> NoReturn:
    raise DecodeError(f"a stored rollout is malformed: {value!r:.80}.")
