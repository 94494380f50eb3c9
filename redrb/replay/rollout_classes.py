"""The classes that rollouts may be rebuilt as: only classes that this process knows already.

Names of classes come from Redis, so they are never imported: a name is looked up among the classes
that this process has put, and those that are reachable from `rollout_type` by annotations.
"""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from redrb.errors import ConfigError, RecordError

_seen: dict[str, type] = {}
"""Every class of which this process has put an object, by name."""

_NOT_STATE = frozenset(("__dict__", "__weakref__"))


def name_of(kind: type) -> str:
    """Return the name under which a class is stored."""
    return f"{kind.__module__}:{kind.__qualname__}"


def remember(kind: type) -> str:
    """Note that this process puts objects of a class, and return its name."""
    name = name_of(kind)
    _seen[name] = kind
    return name


class RolloutClasses:
    """The classes that one buffer may rebuild.

    Attributes:
        rollout_type: The class of all rollouts; None: the class of which each was put.
    """

    def __init__(self, rollout_type: type | None = None) -> None:
        if rollout_type is not None and not isinstance(rollout_type, type):
            raise ConfigError(f"rollout_type={rollout_type!r:.80} is not a class.")
        self.rollout_type = rollout_type
        reached = _reached_from(rollout_type)
        self._reachable = {name_of(kind): kind for kind in reached}
        # a script's class is named __main__:... in the script, and otherwise elsewhere
        counts = Counter(kind.__qualname__ for kind in reached)
        self._by_qualname = {
            kind.__qualname__: kind for kind in reached if counts[kind.__qualname__] == 1
        }

    def rollout(self, name: str) -> type:
        """Return the class for a rollout that was put as an object of the class `name`.

        It is `rollout_type`, or a subclass of it that this process knows.

        Raises:
            ConfigError: This process does not know the class.
        """
        base, found = self.rollout_type, self._known(name)
        if base is None:
            return self.find(name)
        return found if found is not None and issubclass(found, base) else base

    def find(self, name: str) -> type:
        """Return the class called `name`.

        Raises:
            ConfigError: This process does not know the class.
        """
        found = self._known(name)
        if found is None:
            raise ConfigError(
                f"rollouts hold a {name}, and this process does not know that class: give "
                "ReplayBuffer(rollout_type=...) the class of your rollouts, with annotations that "
                "name the classes of its fields, or rollout_type=dict for dicts."
            )
        return found

    def find_enum(self, name: str) -> type[Enum] | None:
        """Return the enum called `name`; None if this process does not know it."""
        found = self._known(name)
        return found if found is not None and issubclass(found, Enum) else None

    def _known(self, name: str) -> type | None:
        qualname = name.partition(":")[2]
        return self._reachable.get(name) or _seen.get(name) or self._by_qualname.get(qualname)


def is_record(value: object) -> bool:
    """Return whether a value is an object of a dataclass or of a model with declared fields."""
    kind = type(value)
    return dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields")


def state_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object, including slots.

    Raises:
        RecordError: The object has no attributes.
    """
    state = dict(getattr(value, "__dict__", {}))
    slots = list(_slots(type(value)))
    for name in slots:
        if hasattr(value, name):
            state[name] = getattr(value, name)
    if not state and not slots and not hasattr(value, "__dict__"):
        raise RecordError(
            f"a rollout is a {type(value).__name__}: use a dict, or an object with attributes."
        )
    return state


def rebuild(kind: type, state: dict[str, Any]) -> Any:
    """Return an object of a class with these attributes, without running `__init__`.

    Raises:
        RecordError: The class has no attributes, or not these.
    """
    try:
        made: Any = object.__new__(kind)
        for name, value in state.items():
            object.__setattr__(made, name, value)
    except (TypeError, AttributeError) as error:
        raise RecordError(f"a {kind.__name__} cannot be rebuilt: {error}.") from error
    return made


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in _NOT_STATE:
                is_private = name.startswith("__") and not name.endswith("__")
                yield f"_{base.__name__.lstrip('_')}{name}" if is_private else name


def _reached_from(kind: type | None) -> set[type]:
    """Return a class, the classes in its annotations, and so on."""
    found: set[type] = set()
    waiting = [] if kind is None else [kind]
    while waiting:
        next_kind = waiting.pop()
        if next_kind not in found:
            found.add(next_kind)
            hints = _hints(next_kind)
            waiting += [part for hint in hints for part in _parts(hint) if _is_rebuilt(part)]
    return found


def _hints(kind: type) -> Iterable[Any]:
    models = getattr(kind, "model_fields", None)
    if isinstance(models, dict):
        return [field.annotation for field in models.values() if hasattr(field, "annotation")]
    try:
        return typing.get_type_hints(kind).values()
    except (NameError, TypeError, AttributeError):  # names that exist for type checkers only
        return ()


def _parts(hint: Any) -> Iterator[type]:
    """Return the classes in an annotation such as `list[Call] | None`."""
    arguments = typing.get_args(hint)
    if isinstance(hint, type) and not arguments:
        yield hint
    for argument in arguments:
        yield from _parts(argument)


def _is_rebuilt(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields") or issubclass(kind, Enum)
