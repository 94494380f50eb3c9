"""Objects as the dicts of their fields, which are stored, and as the declared class again."""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from typing import Any

from redrb.errors import ConfigError, RecordError


def check_declared(rollout: Any, kind: type | None) -> None:
    """Check that a rollout can be given back as it is put, or raise RecordError."""
    own: Any = type(rollout)
    name = own.__name__
    if kind is dict or isinstance(rollout, dict):
        return
    if own is kind:
        lacking = _not_taken(own)
        if not (hasattr(own, "model_fields") or hasattr(own, "__struct_fields__")):
            try:
                _signature(own).bind(**dict.fromkeys(fields_of(rollout)))
            except TypeError as error:
                lacking = f"its constructor: {error}"
        if lacking:
            raise RecordError(
                f"rollout_type={name}: `get` could not make the object again of the fields that "
                f"`put` stores: {lacking}. Pass rollout_type=dict, so that `get` returns dicts."
            )
        return
    raise RecordError(
        f"a rollout is a {name}: pass ReplayBuffer(rollout_type={name}), so that `get` returns "
        "objects of this class, or rollout_type=dict, so that it returns dicts."
    )


@cache
def _not_taken(kind: Any) -> str:
    """Say which declared fields the conversion of a class does not take by their name; "": none."""
    if hasattr(kind, "model_fields"):
        settings = kind.model_config
        if settings.get("populate_by_name") or settings.get("validate_by_name"):
            return ""
        names = [name for name, one in kind.model_fields.items() if one.validation_alias]
        return f"{', '.join(names)} have aliases (set populate_by_name)" if names else ""
    if hasattr(kind, "__struct_fields__"):
        pairs = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
        names = [name for name, encoded in pairs if name != encoded]
        return f"{', '.join(names)} are renamed" if names else ""
    return ""


_signature = cache(inspect.signature)


def is_record(value: object) -> bool:
    """Return whether a value is an object of a class with declared fields."""
    kind = type(value)
    declares = hasattr(kind, "model_fields") or hasattr(kind, "__struct_fields__")
    return declares or dataclasses.is_dataclass(kind)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of an object: those that its class declares, or else its attributes."""
    kind = type(value)
    names: Any
    if hasattr(kind, "model_fields"):
        names = [*kind.model_fields, *(value.model_extra or ())]
    elif hasattr(kind, "__struct_fields__"):
        names = kind.__struct_fields__
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.init]
    elif hasattr(value, "__dict__"):
        names = vars(value)
    else:
        raise RecordError(f"a rollout is a {kind.__name__}: use a dict, or an object with fields.")
    return {name: getattr(value, name) for name in names}


def as_declared(kind: type | None, fields: dict[str, Any]) -> Any:
    """Return fields as an object of the declared class; without one, or for `dict`, as they are.

    A pydantic model and a msgspec Struct convert nested fields by their annotations.
    """
    if kind is None or kind is dict:
        return fields
    made: Any = kind
    refusals: tuple[type[Exception], ...] = (TypeError, ValueError)
    try:
        if hasattr(kind, "model_validate"):
            return made.model_validate(fields)
        if hasattr(kind, "__struct_fields__"):
            import msgspec

            refusals = (*refusals, msgspec.ValidationError)
            return msgspec.convert(fields, kind)
        return made(**fields)
    except refusals as error:
        raise ConfigError(
            f"rollout_type={kind.__name__} does not take a stored rollout: {error}. Its group "
            "stays stored: give the class that it was put as, or rollout_type=dict."
        ) from error
