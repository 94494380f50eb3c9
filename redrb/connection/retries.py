"""Runs failed work again: after which errors, until when and after which pauses.

The policy is composed with tenacity, which judges failures only: work that succeeds is no slower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import tenacity

from redrb.connection.stop import Stop
from redrb.errors import StoreUnavailable

T = TypeVar("T")

Kinds: TypeAlias = type[Exception] | tuple[type[Exception], ...]
Note: TypeAlias = Callable[[Any], object]

PAUSES = tenacity.wait_random_exponential(multiplier=0.02, max=1.0)
"""Random pauses, of at most 20 ms at first, then of at most twice as long each time, up to 1 s.

Clients that lost a server together do not come back together ("full jitter").
"""


def again(
    attempt: Callable[[], T],
    first: Exception,
    *,
    passes: Callable[[BaseException], bool],
    over: Callable[[], bool],
    note: Note,
    pause: Callable[[float], Any],
) -> T:
    """Run `attempt` again, after its first run raised `first`.

    Args:
        passes: Whether the attempt may succeed a little later, after such an error.
        over: Whether no attempt may follow.
        note: Called with each error after which an attempt follows, before the pause.
        pause: Waits for so many seconds, or until it is woken.

    Raises:
        Exception: The error of the last attempt: one that does not pass, or when it was over.
    """
    failed = [first]  # the policy judges the first error as it judges others

    def run() -> T:
        if failed:
            raise failed.pop()
        return attempt()

    policy = tenacity.Retrying(sleep=pause, **_policy(passes, over, note))
    return policy(run)


def insist(
    work: Callable[[], T],
    stop: Stop,
    note: Note,
    *,
    errors: Kinds = StoreUnavailable,
    unless: Kinds = (),
    over: Callable[[], bool] = lambda: False,
) -> T:
    """Run work until it succeeds, however long Redis is away, or until the stop is asked.

    Args:
        note: Called with each error after which it is run again.
        errors: Errors after which it is run again, but those of `unless`.
        over: A further reason to end; asked after each error.

    Raises:
        Exception: Another error; or that of the last run, when the stop is asked.
    """
    try:
        return work()
    except errors as first:
        return again(
            work,
            first,
            passes=lambda error: isinstance(error, errors) and not isinstance(error, unless),
            over=lambda: bool(stop) or over(),
            note=note,
            pause=stop.wait,
        )


async def insist_async(
    work: Callable[[], Awaitable[T]],
    note: Note,
    *,
    passes: Callable[[BaseException], bool],
    over: Callable[[], bool] = lambda: False,
    pause: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    pauses: tenacity.wait.wait_base = PAUSES,
) -> T:
    """Run asynchronous work until it succeeds; the arguments are those of `again`."""

    async def run() -> T:  # tenacity awaits coroutine functions only
        return await work()

    return await tenacity.AsyncRetrying(sleep=pause, **_policy(passes, over, note, pauses))(run)


def _policy(
    passes: Callable[[BaseException], bool],
    over: Callable[[], bool],
    note: Note,
    pauses: tenacity.wait.wait_base = PAUSES,
) -> dict[str, Any]:
    return {
        "retry": tenacity.retry_if_exception(passes),
        "stop": lambda _state: over(),
        "wait": pauses,
        "before_sleep": partial(_note, note),
        "reraise": True,
    }


def _note(note: Note, state: tenacity.RetryCallState) -> None:
    error: Any = state.outcome and state.outcome.exception()
    note(error)
    error.with_traceback(None)  # it holds the frames of all callers
