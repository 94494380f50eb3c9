"""`EpisodeMaker`: runs episodes of many prompts at the same time, and sends their groups."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from redrb.checks import checked_int, checked_number
from redrb.connection.deadline import Deadline
from redrb.connection.stop import STOP_TIMEOUT_S, Stop, checked_stop_seconds
from redrb.errors import ConfigError, RedrbError, SendFailed
from redrb.stream import ExperienceStream
from redrb.train.announcements import FollowedWeights, JobEnd
from redrb.train.episodes.groups import (
    Episode,
    EpisodeEngine,
    EpisodeRunner,
    Finish,
    Groups,
    with_group_advantages,
)
from redrb.train.episodes.running import run_and_end, warn_if_blocked
from redrb.train.episodes.sink import Sink
from redrb.words import counted

_log = logging.getLogger("redrb")


class EpisodeMaker:
    """Runs coroutines that sample from an engine, and puts the groups of each prompt.

    Each group is put when its last episode has ended. In a task with `max_staleness` a group begins
    with the right to do so. A group with an episode that raises is filtered, and the others go on.

    At the end, by SIGTERM, Ctrl-C or `stop`, sampling is aborted: episodes get what is sampled so
    far, and return samples with the status ABORTED. Their groups are put too, and a maker that
    starts later, here or elsewhere, takes them and finishes them, each exactly once.

    Examples:
        >>> async def episode(prompt, engine, partial=None):
        ...     trajectory = Trajectory(prompt["input_ids"], partial)
        ...     trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=256))
        ...     return trajectory.item(reward=score(trajectory.actions, prompt["answer"]))
        >>> EpisodeMaker(stream, episode, engine, weights=weights).run(prompts)

    Attributes:
        admission_s: Seconds for which the maker had no group, and waited for a right to begin one.
    """

    def __init__(
        self,
        stream: ExperienceStream,
        episode: Episode,
        engine: EpisodeEngine,
        *,
        weights: FollowedWeights | None = None,
        group_size: int = 8,
        groups: int = 32,
        finish: Finish = with_group_advantages,
        parts: bool = False,
        resume: bool = True,
        end_with_job: bool = True,
        drain_timeout: float = 10.0,
        stop_timeout: float = STOP_TIMEOUT_S,
    ) -> None:
        """Make a maker; `run` starts it.

        Args:
            stream: The task that gets the groups. Opened with `on_bad_group="drop"`, it filters
                groups that cannot be stored; otherwise they end the maker.
            episode: `async def episode(prompt, engine)`, which returns a sample or several. With a
                third parameter `partial`, it gets the unfinished sample of an aborted episode, and
                goes on with it; otherwise such an episode begins anew.
            engine: What samples, such as `SGLangEngine`; closed at the end of `run`.
            weights: Gives new versions to the engine while episodes run; the first one is waited
                for. None: the server keeps its weights.
            group_size: Episodes of each prompt.
            groups: Most groups that are begun at a time.
            finish: Completes the samples of a group before it is put, or returns None to filter it;
                may be a coroutine function; default: advantages relative to the group.
            parts: Put the samples of each episode when it ends, as parts of their group; `finish`
                is not called, and unfinished episodes are dropped.
            resume: Take and finish groups of unfinished samples before new ones are begun.
            end_with_job: End when the trainer of `weights` announces the end of the job.
            drain_timeout: Seconds that episodes get to return after sampling was aborted.
            stop_timeout: Seconds that `run` may spend on Redis after SIGTERM or Ctrl-C.

        Raises:
            ConfigError: An argument is not usable, or `resume` and the order "admission" meet, in
                which unfinished groups cannot be put back.
        """
        # its scores are rights, and a continuation has none
        keeps_aborted = stream.settings().values.get("order") != "admission"
        if resume and not keeps_aborted:
            raise ConfigError(
                f"task {stream.task!r} has the order 'admission', in which unfinished groups "
                "cannot be put back: give resume=False."
            )
        self._stop = Stop(checked_stop_seconds("stop_timeout", stop_timeout))
        self._groups = partial(
            Groups,
            runner=EpisodeRunner(episode, engine),
            stop=self._stop,
            size=checked_int("group_size", group_size, 1),
            finish=finish,
            parts=parts,
            resumes=resume,
            keeps_aborted=keeps_aborted,
        )
        self._stream, self._engine, self._weights = stream, engine, weights
        self._episode_name = getattr(episode, "__qualname__", type(episode).__name__)
        stream.worker.role = "maker"  # it takes aborted groups as well
        stream.worker.engine = engine
        self._counted: FollowedWeights | None = None  # weights whose versions the task counts
        if weights is not None:
            own = stream.worker.weights_name in ("", weights.name)
            self._counted = weights if own and weights.namespace == stream.namespace else None
            stream.worker.weights_name = weights.name
        self._slots = checked_int("groups", groups, 1)
        self._end_with_job = end_with_job
        self._drain_s = checked_number("drain_timeout", drain_timeout)
        self._sink: Sink | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self.admission_s = 0.0

    @property
    def stopped(self) -> str:
        """Why `run` was asked to end; "" if it was not."""
        return self._stop.reason

    def stop(self, why: str = "stop() was called") -> None:
        """Ask `run` to end; any thread may call it."""
        self._stop.ask(why)

    def fail(self, error: Exception) -> None:
        """Ask `run` to end and to raise an error; any thread may call it."""
        self._error = self._error or error
        self._stop.ask(f"an error came up: {error!r:.200}")

    @property
    def backpressure_s(self) -> float:
        """Seconds for which groups have waited for room among those that are not in Redis."""
        return self._sink.backpressure_s if self._sink else 0.0

    @property
    def right_version(self) -> int | None:
        """Weight version of the task when it gave the newest right; None before."""
        return self._sink.version if self._sink else None

    def run(self, prompts: Iterable[Any]) -> None:
        """Run episodes of all prompts, then wait for their groups to be put.

        Args:
            prompts: Any objects; those of unfinished episodes are stored, so that they must consist
                of values that msgpack can hold. The iterable is read as groups begin.

        Raises:
            EngineError: The first weights could not be loaded, the server was away for longer than
                its `retry_s`, or it has answered something else than completions.
            SendFailed: Groups could not be put.
            Exception: Any error that `fail` was called with.
        """
        self._stream.worker.begins()
        with self._stop.on_signals(), Deadline(budget=self._stop):
            run_and_end(self._run(iter(prompts)), self._drain_s)
        if self._error is not None:
            raise self._error

    async def _run(self, prompts: Iterator[Any]) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        with ExitStack() as scope:

            def wake() -> None:
                loop.call_soon_threadsafe(ended.set)

            scope.enter_context(self._stop.waking(wake))
            sink = self._sink = Sink(self._stream, self._stop, most_unsent=self._slots)
            scope.callback(sink.close)
            reach = partial(self._reach, self._counted, ended) if self._counted else None
            groups = self._groups(sink=sink, reach=reach)
            if self._weights is not None and self._end_with_job:
                scope.enter_context(JobEnd(self._weights, (), self._stop).watching())
            if self._stop:
                ended.set()
            async with self._engine:
                following = await self._follow(ended)
                following += [asyncio.create_task(warn_if_blocked(self._episode_name))]
                try:
                    await self._work(groups, sink, prompts, ended)
                finally:
                    for task in following:
                        task.cancel()

    async def _follow(self, ended: asyncio.Event) -> list[asyncio.Task[None]]:
        if self._weights is None:
            return []
        if not await self._waits(self._weights.update(), ended):
            return []
        return [asyncio.create_task(self._weights.follow())]

    async def _reach(self, weights: FollowedWeights, ended: asyncio.Event, version: int) -> None:
        """Wait for the weight version of a right, so that its group is not older than it."""
        await self._waits(weights.reach(version), ended)

    async def _waits(self, loading: Coroutine[Any, Any, object], ended: asyncio.Event) -> bool:
        loaded, stopped = asyncio.create_task(loading), asyncio.create_task(ended.wait())
        with self._stream.worker.waiting("weights"):
            await asyncio.wait((loaded, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loaded.done():
            loaded.cancel()
            return False
        loaded.result()
        return True

    async def _work(
        self, groups: Groups, sink: Sink, prompts: Iterator[Any], ended: asyncio.Event
    ) -> None:
        """Begin groups until the prompts or the maker end; then wait for the groups."""
        stopped = asyncio.create_task(ended.wait())
        try:
            await self._begin_groups(groups, prompts, stopped)
            await self._drain(sink, stopped)
            await self._flush(sink, stopped)
        except BaseException as error:
            self._stop.ask(f"an error came up: {error!r:.200}")
            await self._drain(sink, stopped)
            raise
        finally:
            stopped.cancel()

    async def _begin_groups(
        self, groups: Groups, prompts: Iterator[Any], stopped: asyncio.Task[Any]
    ) -> None:
        beginning: asyncio.Task[Any] | None = None
        try:
            while not self._stop:
                if len(self._running) < self._slots and beginning is None:
                    beginning = asyncio.create_task(groups.next(prompts))
                waited = {*self._running, stopped, *([beginning] if beginning else [])}
                idle_since = None if self._running else time.monotonic()
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if idle_since is not None:
                    self.admission_s += time.monotonic() - idle_since
                self._check()
                if beginning is not None and beginning.done():
                    group, beginning = beginning.result(), None
                    if group is None:
                        return
                    self._running.add(asyncio.create_task(group))
        except BaseException as error:
            self._stop.ask(f"an error came up: {error!r:.200}")  # ends the wait for a right
            raise
        finally:
            if beginning is not None and (group := await beginning) is not None:
                self._running.add(asyncio.create_task(group))

    def _check(self) -> None:
        done = {task for task in self._running if task.done()}
        self._running -= done
        for task in done:
            task.result()

    async def _drain(self, sink: Sink, stopped: asyncio.Task[Any]) -> None:
        """Wait for the groups; when the maker is to end, abort sampling and wait a while."""
        while self._running and not self._stop:
            waited = {*self._running, stopped}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self._check()
        if not self._running:
            return
        with suppress(RedrbError, TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await self._engine.abort()
        _, left = await asyncio.wait(self._running, timeout=self._drain_s)
        if left:
            groups = counted(len(left), "group")
            _log.warning("a maker ends and gives up %s, which did not end in time", groups)
            sink.give_up()
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=self._drain_s)
            self._running -= left
        self._check()

    async def _flush(self, sink: Sink, stopped: asyncio.Task[Any]) -> None:
        """Wait until all groups are in Redis; when the maker is to end, only for a while."""
        flushing = asyncio.create_task(sink.flush())
        if not self._stop:
            await asyncio.wait((flushing, stopped), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((flushing,), timeout=self._drain_s)
        if not flushing.done():
            sink.give_up()
        try:
            await flushing
        except SendFailed as failure:
            if failure.dropped or not self._stop:
                raise
