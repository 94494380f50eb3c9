"""Extras as JSON: values that JSON lacks become an object with one key that begins with `$`."""

from __future__ import annotations

import base64
import binascii
import math
from datetime import datetime
from typing import Any

from redrb.errors import DecodeError


def to_json(value: Any) -> Any:
    """Return the JSON form of `value`.

    Bytes become `{"$bytes": base64}`, times `{"$datetime": ISO 8601}`, numbers that are not finite
    `{"$float": "nan" | "inf" | "-inf"}`, and maps with keys that are bytes or begin with `$`
    `{"$map": [[key, value], ...]}`.
    """
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, datetime):
        return {"$datetime": value.isoformat()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, list | tuple):
        made = []
        for one in value:  # no comprehension: each of its levels would cost two of the stack
            made.append(to_json(one))
        return made
    return _map_to_json(value) if isinstance(value, dict) else value


def _map_to_json(value: dict[Any, Any]) -> dict[str, Any]:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        made = {}
        for key, one in value.items():
            made[key] = to_json(one)
        return made
    return {"$map": [[to_json(key), to_json(one)] for key, one in value.items()]}


def from_json(value: Any) -> Any:
    """Return the value of a JSON form that `to_json` returned.

    Raises:
        DecodeError: An object with a key that begins with `$` has no known form.
    """
    if isinstance(value, list):
        return [from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: from_json(one) for key, one in value.items()}
    try:
        ((kind, held),) = value.items()
        return _special(kind, held)
    except (ValueError, TypeError, binascii.Error) as error:
        raise DecodeError(f"{value!s:.80} is the form of no value: {error}.") from error


def _special(kind: str, held: Any) -> Any:
    if kind == "$bytes":
        return base64.b64decode(held, validate=True)
    if kind == "$datetime":
        return datetime.fromisoformat(held)
    if kind == "$float" and held in ("nan", "inf", "-inf"):
        return float(held)
    if kind == "$map":
        return {from_json(key): from_json(one) for key, one in held}
    raise ValueError(f"there is no {kind}")
