"""`Stage`: takes groups from one task, adds fields to them, and forwards them to the next task."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

from redrb.algorithms.user_functions import attempt
from redrb.checks import checked_int, checked_int_or_none
from redrb.connection.deadline import Deadline, here
from redrb.connection.stop import STOP_TIMEOUT_S, Stop, checked_stop_seconds
from redrb.errors import (
    BatchTimeout,
    ConfigError,
    EncodeError,
    LeaseLost,
    RecordError,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from redrb.experience import BufferItem
from redrb.stream import ExperienceStream, Lease
from redrb.stream.take.forwarding import ForwardedGroup
from redrb.stream.take.hand_back import hand_back
from redrb.watch.metrics.events import Write

Group: TypeAlias = list[BufferItem]
Result: TypeAlias = ForwardedGroup | Exception
"""The group to forward, None to filter it, or the error that the function raised."""


async def together(calls: Sequence[Awaitable[ForwardedGroup]]) -> list[Result]:
    """Return the results of coroutines that run at the same time, an error where one raised it."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException) and not isinstance(each, Exception):
            raise each
    return results  # type: ignore[return-value]


_log = logging.getLogger("redrb")


class Stage:
    """Takes groups from a task, calls a function with each, and forwards what it returns.

    Every group is forwarded exactly once, however many stages run side by side and however many of
    them die. A group whose function raises is taken again, counts a failed delivery, and goes to
    the dead letters after the task's `max_deliveries`; the other groups of its batch are forwarded.

    Examples:
        >>> def score(group):
        ...     for item in group:
        ...         item.reward = reward_of(item)
        ...     return group
        >>> Stage(rollouts, scored, score).run()

    Attributes:
        source: The task that groups are taken from.
        target: The task that they are forwarded to.
        ending: Has the time for Redis once a signal has come; streams are closed after `run` in
            `Deadline(budget=ending)`.
    """

    def __init__(
        self,
        source: ExperienceStream,
        target: ExperienceStream,
        function: Callable[..., Any],
        *,
        batch: int = 16,
        batched: bool = False,
        stop_timeout: float = STOP_TIMEOUT_S,
        write: Write | None = None,
    ) -> None:
        """Make a stage; `run` starts it.

        Args:
            source: The task that groups are taken from.
            target: The task that they are forwarded to.
            function: Gets the samples of a group, a list of `BufferItem`, which it may change, and
                returns the samples to forward, or None to filter the group. A coroutine function is
                called for all groups of a batch at the same time.
            batch: Most groups of a batch; a stage takes what waits, at least one group.
            batched: The function gets a list of groups, and returns a list with a result for each.
                If it raises, it is called again with each group alone.
            stop_timeout: Seconds that `run` may spend on Redis after SIGTERM or Ctrl-C. Half of
                them is the longest wait for room in the next task; then the groups of the batch
                wait again.
            write: Writes an event `stage` for each batch, such as `TensorBoardLog(folder).write`,
                with `groups` (forwarded), `filtered`, `failed`, `wait_for_batch_s`, `function_s`
                and `forward_s`; for a batch whose lease was lost an event `stage_lost`.

        Raises:
            ConfigError: An argument is not usable.
        """
        for name, stream in (("source", source), ("target", target)):
            if not isinstance(stream, ExperienceStream):
                raise ConfigError(f"{name}={stream!r:.80}: give an ExperienceStream.")
        if repr(source) == repr(target):  # names namespace, task and server
            raise ConfigError(
                f"source and target are the same task {source.task!r}: the stage would take the "
                "groups that it has forwarded again, without end. Forward them to another task."
            )
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
        self.source = source
        self.target = target
        source.worker.role = target.worker.role = "stage"
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (the method of an object)
        )
        self._batch = checked_int("batch", batch, 1)
        self._batched = batched
        self._stop_timeout = checked_stop_seconds("stop_timeout", stop_timeout)
        self._stop = self.ending = Stop(self._stop_timeout)
        self._write = write
        self._batches = 0
        self._figures: Counter[str] = Counter()  # of the batch
        self._seconds: dict[str, float] = {}
        self._warned = False
        self._failure = ""  # of the last traceback in the log

    def run(self, *, batches: int | None = None) -> None:
        """Take, call and forward until `stop`, SIGTERM or Ctrl-C; the current batch is finished.

        Args:
            batches: Batches after which it returns; None: never by itself.

        Raises:
            StoreUnavailable: Redis stayed away. The groups of the batch wait again.
            ConfigError: The next task takes none of the groups, such as one without a declared tag.
                The groups of the batch wait again.
        """
        left = checked_int_or_none("batches", batches, 1)
        with (
            self._stop.on_signals(),
            Deadline(budget=self._stop),
            asyncio.Runner() as runner,
        ):
            while not self._stop and (left is None or left > 0):
                with self._timed("wait_for_batch_s"):
                    lease = self._take()
                if lease is None:
                    return
                self._handle(lease, runner)
                left = None if left is None else left - 1

    def stop(self, why: str = "stop() was called") -> None:
        """Ask `run` to end after the current batch; any thread may call it."""
        self._stop.ask(why)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def _report(self, event: str, **values: float) -> None:
        self._batches += 1
        self._figures.clear()
        self._seconds = {}
        if self._write is not None:
            self._write(event, step=self._batches, **values)

    def _take(self) -> Lease | None:
        """Take the groups that wait, or wait for one; None when the stage is to end."""
        with Deadline(stop=self._stop):
            try:
                with suppress(BatchTimeout):
                    return self.source.take(self._batch, at_least=1, timeout=0)
                return self.source.take(1)
            except (BatchTimeout, StoreError):
                if not self._stop:
                    raise
                return None

    def _handle(self, lease: Lease, runner: asyncio.Runner) -> None:
        try:
            with lease:
                with self._timed("function_s"):
                    results = self._results(lease, runner)
                errors = {seq: each for seq, each in results.items() if isinstance(each, Exception)}
                for seq, error in errors.items():
                    self._fail(lease, seq, error)
                made = {
                    seq: each for seq, each in results.items() if not isinstance(each, Exception)
                }
                with self._timed("forward_s"):
                    self._forward(lease, made)
            failed, filtered = self._figures["failed"], self._figures["filtered"]
            groups = {"groups": len(results) - filtered - failed}
            self._report("stage", **groups, filtered=filtered, failed=failed, **self._seconds)
        except LeaseLost as error:
            self._report("stage_lost")
            _log.warning("a stage goes on: %s", error)
        except StoreFull as error:
            if not self._stop:
                raise
            _log.warning("a stage ends, and its groups wait again: %s", error)

    def _results(self, lease: Lease, runner: asyncio.Runner) -> dict[int, Result]:
        groups = lease.groups()
        results: list[Result]
        if not self._batched and self._is_async:
            results = runner.run(together([self._function(group) for group in groups]))
        elif not self._batched:
            results = [attempt(partial(self._function, group)) for group in groups]
        else:
            found = attempt(partial(self._call_batch, groups, runner))
            if isinstance(found, Exception) and len(lease) > 1:
                _log.warning("the function of a stage failed for a batch: %r", found)
                again = lease.groups()  # the function may have changed the others
                alone = [attempt(partial(self._call_batch, [group], runner)) for group in again]
                found = [each if isinstance(each, Exception) else each[0] for each in alone]
            results = [found] if isinstance(found, Exception) else found
        filtered = sum(each is None for each in results)
        self._figures["filtered"] += filtered
        if filtered and not self._warned:
            self._warned = True
            _log.warning(
                "task %r: the function of a stage returned None, so its group is filtered and not "
                "forwarded; return the samples to forward them",
                self.source.task,
            )
        return dict(zip(lease.ids, results, strict=True))

    def _call_batch(self, groups: list[Group], runner: asyncio.Runner) -> list[Result]:
        returned = self._function(groups)
        results = list(runner.run(returned) if self._is_async else returned)
        if len(results) != len(groups):
            raise ConfigError(
                f"the function of a stage returned {len(results)} results for {len(groups)} groups:"
                " return one for each, None for groups to filter."
            )
        return results

    def _forward(self, lease: Lease, groups: dict[int, ForwardedGroup]) -> None:
        """Forward groups; those that the next task refuses fail, the others are forwarded.

        It waits for room however long there is none, for a short time once the stage ends.
        """
        if not groups:
            return
        try:
            try:
                with Deadline(stop=self._stop):
                    lease.forward(self.target, groups)
            except (StoreFull, StoreUnavailable):
                if not self._stop:
                    raise
                seconds = min(self._stop_timeout, here().left_s) / 2
                lease.forward(self.target, groups, timeout=seconds)
        except (RecordError, EncodeError, ConfigError, StoreError) as error:
            if not isinstance(error, RecordError | EncodeError) and not error.bad_groups:
                hand_back(lease)  # the error that ended it matters more
                raise
            if len(groups) == 1:
                self._fail(lease, next(iter(groups)), error)
                return
            for seq, group in groups.items():
                self._forward(lease, {seq: group})

    def _fail(self, lease: Lease, seq: int, error: Exception) -> None:
        again, self._failure = repr(error) == self._failure, repr(error)
        _log.warning(
            "task %r: a stage failed for group %d: %r",
            self.source.task,
            seq,
            error,
            exc_info=None if again else error,
        )
        self._figures["failed"] += 1
        lease.fail(error, [seq])
