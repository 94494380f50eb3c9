"""Calls the function of a stage, which the user wrote: its errors are results."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from redrb.errors import ConfigError
from redrb.experience import BufferItem
from redrb.stream.take.forwarding import ForwardedGroup

Group: TypeAlias = list[BufferItem]
Result: TypeAlias = ForwardedGroup | Exception
"""The group to forward, None to filter it, or the error that the function raised."""


def check_function(function: object) -> None:
    """Check that a stage can call a function.

    Raises:
        ConfigError: It cannot be called with one argument.
    """
    if not callable(function):
        raise ConfigError(f"function={function!r:.80}: give a function of a group's samples.")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"function={function!r:.80} cannot be called with one argument ({error}): give a "
            "function of a group's samples, or with batched=True of a list of groups."
        ) from error
    except ValueError:  # a function of C that does not say what it takes
        pass


def result_of(function: Callable[[Group], Any], group: Group) -> Result:
    """Return what a function returns for a group, or the error that it raises."""
    try:
        result: Result = function(group)
    except Exception as error:  # noqa: BLE001 (the user's function: its group fails)
        return error
    return result


async def together(calls: Sequence[Awaitable[ForwardedGroup]]) -> list[Result]:
    """Return the results of coroutines that run at the same time, an error where one raised it."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException) and not isinstance(each, Exception):
            raise each
    return results  # type: ignore[return-value]
