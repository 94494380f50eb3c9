"""Runs failed work again: after which errors, until when and after which pauses.

The policy is composed with tenacity. Work runs without it at first; only a failure goes through it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import tenacity

from redrb.connection.stop import Stop
from redrb.errors import StoreUnavailable

T = TypeVar("T")

Kinds: TypeAlias = type[Exception] | tuple[type[Exception], ...]
Passes: TypeAlias = Callable[[BaseException], bool]
Note: TypeAlias = Callable[[Any], object]

PAUSES = tenacity.wait_random_exponential(multiplier=0.02, max=1.0)
"""Random pauses, of at most 20 ms at first, then of at most twice as long each time, up to 1 s.

Clients that lost a server together do not come back together ("full jitter").
"""


def again(
    attempt: Callable[[], T],
    failed: list[Exception],
    *,
    passes: Passes,
    over: Callable[[], bool],
    note: Note,
    pause: Callable[[float], Any],
) -> T:
    """Run `attempt` again, after its first run has failed.

    Call it outside of the `except` block: later errors do not have the first one as their context.

    Args:
        failed: The error of the first run, in a list, which this call empties. Frames that refer to
            their own error keep their objects alive until garbage is collected.
        passes: Whether the attempt may succeed a little later, after such an error.
        over: Whether no attempt may follow; asked once after each error that passes.
        note: Called with each error after which an attempt follows, before the pause.
        pause: Waits for so many seconds, or until it is woken.

    Raises:
        Exception: The error of the last attempt: it does not pass, or `over` was true after it.
    """
    policy = _Policy(passes, over, note, pause)

    def run() -> T:
        if failed:
            raise failed.pop()
        return attempt()

    try:
        return tenacity.Retrying(**policy.parts(PAUSES))(run)
    finally:
        policy.forget()


def insist(
    work: Callable[[], T],
    stop: Stop,
    note: Note,
    *,
    errors: Kinds = StoreUnavailable,
    unless: Kinds = (),
    over: Callable[[], bool] = lambda: False,
    left_s: Callable[[], float] = lambda: math.inf,
    once_more: bool = False,
) -> T:
    """Run work until it succeeds, however long Redis is away, or until the stop is asked.

    Args:
        note: Called with each error after which it is run again.
        errors: Errors after which it is run again, except `unless`.
        over: A further reason to end; asked after each error.
        left_s: Seconds until the work must have succeeded.
        once_more: Whether the work is run once more when the stop ends a pause.

    Raises:
        Exception: Another error; or that of the last run, when the stop is asked or the time is up.
    """
    failed: list[Exception] = []
    last: list[Exception] = []
    try:
        return work()
    except errors as error:
        failed.append(error)

    def run() -> T:
        if last and stop and not once_more:
            raise last.pop()
        last.clear()
        return work()

    def noted(error: Exception) -> None:
        note(error)
        last[:] = [error]

    return again(
        run,
        failed,
        passes=lambda error: isinstance(error, errors) and not isinstance(error, unless),
        over=lambda: bool(stop) or over() or left_s() <= 0,
        note=noted,
        pause=lambda seconds: stop.wait(min(seconds, left_s())),
    )


async def insist_async(
    work: Callable[[], Awaitable[T]],
    note: Note,
    *,
    passes: Passes,
    over: Callable[[], bool] = lambda: False,
    pause: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    pauses: tenacity.wait.wait_base = PAUSES,
) -> T:
    """Run asynchronous work until it succeeds; the arguments are those of `again`."""
    failed: list[Exception] = []
    try:
        return await work()
    except Exception as error:  # noqa: BLE001 (the policy raises the ones that do not pass)
        failed.append(error)
    policy = _Policy(passes, over, note, pause)

    async def run() -> T:
        if failed:
            raise failed.pop()
        return await work()

    try:
        return await tenacity.AsyncRetrying(**policy.parts(pauses))(run)
    finally:
        policy.forget()


class _Policy:
    """The parts of a policy; keeps nothing when it has ended, as tenacity's objects keep it."""

    def __init__(
        self, passes: Passes, over: Callable[[], bool], note: Note, pause: Callable[[float], Any]
    ) -> None:
        self._passes, self._over, self._note, self._pause = passes, over, note, pause
        self._state: tenacity.RetryCallState | None = None

    def parts(self, pauses: tenacity.wait.wait_base) -> dict[str, Any]:
        """Return the arguments of tenacity's class."""
        return {
            "retry": self._is_repeated,
            "stop": lambda _: self._over(),
            "wait": pauses,
            "sleep": lambda seconds: self._pause(seconds),
            "before_sleep": lambda state: self._note(state.outcome.exception()),
            "retry_error_callback": lambda state: state.outcome.result(),
        }

    def forget(self) -> None:
        """Drop the last error, which holds the frames that hold this policy, and all else."""
        if self._state is not None:
            self._state.outcome = None
        vars(self).clear()

    def _is_repeated(self, state: tenacity.RetryCallState) -> bool:
        self._state = state
        error: Any = state.outcome and state.outcome.exception()
        return error is not None and self._passes(error)
