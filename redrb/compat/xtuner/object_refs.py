"""Ray's ObjectRefs in rollouts: Redis stores the objects, and `get` puts them back into Ray.

Ray is never imported or started here: without it there are no ObjectRefs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from redrb.errors import RecordError

RESOLVE_S = 60.0
"""Most seconds that a put waits for an object which is still computed."""

_put_back = ContextVar("put_back", default=False)


def is_reference(value: object) -> bool:
    """Return whether a value is an ObjectRef that this process can resolve."""
    ray = _running_ray()
    return ray is not None and isinstance(value, ray.ObjectRef)


def resolved(reference: Any, field: str) -> Any:
    """Return the object of an ObjectRef, or raise RecordError."""
    ray = _running_ray()
    try:
        return ray.get(reference, timeout=RESOLVE_S)
    except ray.exceptions.RayError as error:
        raise RecordError(
            f"{field} holds {reference}, whose object Ray does not give: {error}", field=field
        ) from error


def restored(value: Any) -> Any:
    """Return an ObjectRef of a stored object within `putting_back`, else the object itself."""
    ray = _running_ray() if _put_back.get() else None
    return value if ray is None else ray.put(value)


@contextmanager
def putting_back() -> Iterator[None]:
    """Put objects that were stored for ObjectRefs back into Ray, where it runs."""
    token = _put_back.set(True)
    try:
        yield
    finally:
        _put_back.reset(token)


def _running_ray() -> Any:
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None
