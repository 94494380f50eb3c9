"""Fields of a rollout, read and written in a dict or in an object of any class.

The names of the fields are those of XTuner v1's `RolloutState`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from enum import Enum
from functools import cache
from operator import index
from typing import Any

from redrb.errors import ConfigError, RecordError
from redrb.experience import Status


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


TOKEN_FIELDS = (
    "prompt_ids",
    "tokens",
    "response_ids",
    "response_model_steps",
    "response_mask",
    "logprobs",
    "routed_experts",
    "input_ids",
    "labels",
    "position_ids",
)
"""Fields that hold one number a token, or an array."""

STEPS_END = 2**53
"""Steps must be below this: Redis sorts by doubles, which represent them exactly."""

_MISSING = object()
_STATUSES = {status.value: status for status in Status}


def read(rollout: Any, name: str) -> Any:
    """Return a field of a rollout; None if there is no such field."""
    if isinstance(rollout, dict):
        return rollout.get(name)
    return getattr(rollout, name, None)


def has(rollout: Any, name: str) -> bool:
    """Return whether a rollout has a field; its value may be None."""
    if isinstance(rollout, dict):
        return name in rollout
    return getattr(rollout, name, _MISSING) is not _MISSING


def write(rollout: Any, name: str, value: object) -> None:
    """Set a field of the caller's rollout, or raise RecordError."""
    if isinstance(rollout, dict):
        rollout[name] = value
        return
    try:
        setattr(rollout, name, value)
    except (AttributeError, TypeError, ValueError) as error:  # frozen, read-only or validated
        raise RecordError(
            f"{name} of a {type(rollout).__name__} cannot be set to {value!r:.40}, and a replay "
            f"buffer updates rollouts in place: make the field assignable ({error}).",
            field=name,
        ) from error


def length(rollout: Any, name: str) -> int:
    """Return the length of a field with one value a token; 0 if it is None."""
    value = read(rollout, name)
    if value is None:
        return 0
    try:
        return len(value)
    except TypeError as error:
        raise _wrong(name, value, "a list with one entry a token") from error


def steps_of(rollout: Any) -> list[int]:
    """Return the model step of each response token; empty if no step is known."""
    value = read(rollout, "response_model_steps")
    if value is None:
        return []
    listed = _listed("response_model_steps", value)
    try:
        steps = listed if set(map(type, listed)) <= {int} else list(map(index, listed))
    except TypeError as error:
        raise _wrong("response_model_steps", value, "a list of ints") from error
    for step in (min(steps), max(steps)) if steps else ():
        if not 0 <= step < STEPS_END:
            raise RecordError(
                f"response_model_steps holds {step}: model steps count up from 0.",
                field="response_model_steps",
            )
    return steps


def mask_of(rollout: Any) -> list[bool] | None:
    """Return whether each response token counts; None: all count."""
    value = read(rollout, "response_mask")
    return None if value is None else list(map(bool, _listed("response_mask", value)))


def counted_tokens(rollout: Any) -> list[bool] | None:
    """Return whether each token with a model step counts; None if no token of the response does."""
    size, mask = length(rollout, "response_ids"), mask_of(rollout)
    counts = [True] * size if mask is None else mask
    if not size or not any(counts):
        return None
    return [place < len(counts) and counts[place] for place in range(len(steps_of(rollout)))]


def is_agentic(group: Sequence[Any]) -> bool:
    """Return whether any rollout of a group has `input_ids` or `labels`."""
    return any(
        read(rollout, name) is not None for rollout in group for name in ("input_ids", "labels")
    )


def status_of(rollout: Any) -> Status:
    """Return a rollout's status; completed if it has none, or raise RecordError."""
    value = read(rollout, "status")
    found = Status.COMPLETED if value is None else find_status(value)
    if found is None:
        raise RecordError(f"status is {value!r}: {_known_statuses()}", field="status")
    return found


def find_status(value: object) -> Status | None:
    """Return the status of a name or enum member; None if it is unknown."""
    names = (value.value, value.name) if isinstance(value, Enum) else (value,)
    for name in names:
        if isinstance(name, str) and name.lower() in _STATUSES:
            return _STATUSES[name.lower()]
    return None


def checked_status(value: object) -> Status:
    """Return the status of a name or enum member, or raise ConfigError."""
    found = find_status(value)
    if found is None:
        raise ConfigError(f"status {value!r}: {_known_statuses()}")
    return found


def write_status(rollout: Any, status: Status) -> None:
    """Set a rollout's status, in the type of its old status."""
    old = read(rollout, "status")
    if isinstance(old, Enum) and not isinstance(old, Status):
        members = [each for each in type(old) if find_status(each) is status]
        if not members:
            raise RecordError(
                f"{type(old).__name__} has no member {status.value!r}: add it, or use "
                "redrb.Status.",
                field="status",
            )
        write(rollout, "status", members[0])
    elif isinstance(old, str) and not isinstance(old, Status):
        write(rollout, "status", status.value)
    else:
        write(rollout, "status", status)


def _known_statuses() -> str:
    return f"use one of redrb.Status ({', '.join(Status)}), or an enum with these values."


def _listed(name: str, value: Any) -> list[Any]:
    """Return a list, tuple, or one-dimensional array or tensor as a list."""
    if isinstance(value, list):
        return value
    try:
        listed = value.tolist() if hasattr(value, "tolist") else list(value)
    except TypeError as error:
        raise _wrong(name, value, "a list with one entry a token") from error
    if not isinstance(listed, list):
        raise _wrong(name, value, "a list with one entry a token")
    return listed


def _wrong(name: str, value: object, expected: str) -> RecordError:
    return RecordError(f"{name} is {value!r:.80}, not {expected}.", field=name)
