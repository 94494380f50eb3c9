"""Objects as the dicts of their fields, which are stored, and as the declared class again."""

from __future__ import annotations

import dataclasses
from typing import Any

from redrb.errors import ConfigError, RecordError


def check_rollout_type(kind: object) -> type | None:
    """Return a class that was declared, or None.

    Raises:
        ConfigError: It is no class.
    """
    if kind is not None and not isinstance(kind, type):
        raise ConfigError(f"rollout_type={kind!r:.80} is not a class.")
    return kind


def check_declared(rollout: object, kind: type | None) -> None:
    """Check that a rollout can be given back as it is put.

    Raises:
        RecordError: It is an object of a class that was not declared.
    """
    if kind is dict or isinstance(rollout, dict) or type(rollout) is kind:
        return
    name = type(rollout).__name__
    raise RecordError(
        f"a rollout is a {name}: pass ReplayBuffer(rollout_type={name}), so that `get` returns "
        "objects of this class, or rollout_type=dict, so that it returns dicts."
    )


def is_record(value: object) -> bool:
    """Return whether a value is an object of a class with declared fields."""
    kind = type(value)
    declares = hasattr(kind, "model_fields") or hasattr(kind, "__struct_fields__")
    return declares or dataclasses.is_dataclass(kind)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of an object: those that its class declares, or else its attributes.

    Raises:
        RecordError: The object has no fields.
    """
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

    Raises:
        ConfigError: The class does not take the fields.
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
