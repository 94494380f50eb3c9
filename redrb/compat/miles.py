"""miles on streams: a data source, and a data buffer of the fully asynchronous rollout.

    --data-source-path redrb.compat.miles.RedrbDataSource
    --custom-async-data-buffer-path redrb.compat.miles.RedrbDataBuffer

Settings as for slime: docs/how-to/slime.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, ClassVar

from redrb.compat.sample_groups import GroupDataSource, TakenGroup, job
from redrb.compat.sample_groups.packing import pack_group, samples_in
from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.errors import ConfigError

__all__ = ["RedrbDataBuffer", "RedrbDataSource", "put_groups"]

_log = logging.getLogger("redrb")

_LOOK_AGAIN_S = 1.0
"""A put that waits for room looks again: groups also leave by other processes."""


class RedrbDataSource(GroupDataSource):
    """miles' data source in Redis: returned groups, and the place in the data set."""

    framework: ClassVar[str] = "miles"


class RedrbDataBuffer:
    """miles' buffer of finished groups, in Redis; it filters as `DefaultDataBuffer` does.

    Groups are acknowledged when miles calls `save` of the `RedrbDataSource`, which it needs. Makers
    on other machines may put groups too, with `put_groups`.

    Args:
        input: A `DataBufferConstructorInput`.
    """

    def __init__(self, input: Any) -> None:  # noqa: A002 (miles' name)
        self._args, self._unused = input.args, input.unused_handler_fn
        self._job = job.job_groups(input.args, "miles")
        if not self._job.has_source:
            raise ConfigError(
                "groups would never be acknowledged: give miles --data-source-path "
                "redrb.compat.miles.RedrbDataSource as well."
            )
        self._miles = import_module("miles.rollout.fully_async_data_buffer")
        self._capacity = int(
            self._args.async_data_buffer_capacity_factor * self._args.rollout_batch_size
        )
        if self._capacity < 1:
            raise ConfigError(
                f"--async-data-buffer-capacity-factor leaves room for {self._capacity} groups: "
                "make it larger."
            )
        self._filter = self._miles.load_function(self._args.dynamic_sampling_filter_path)
        self._taken = asyncio.Condition()
        self._putting = asyncio.Lock()
        self._drops = self._miles.MetricGatherer()
        self._aborted = self._stale = 0
        self._staleness: list[int] = []
        self._version: int | None = None

    async def put(self, input: Any) -> None:  # noqa: A002 (miles' name)
        """Store a finished group, or end it if it was aborted or a filter drops it.

        Waits while as many groups wait as the capacity allows.
        """
        group, prompts = input.group, input.prompt_group
        if any(sample.status.value == "aborted" for sample in samples_in(group)):
            self._aborted += 1
            await asyncio.to_thread(self._unused, prompts)  # recycles it, or does nothing
            await asyncio.to_thread(self._job.generation.drop, prompts)
            return
        kept = self._miles.call_dynamic_filter(self._filter, self._args, group)
        if not kept.keep:
            self._drops.on_dynamic_filter_drop(reason=kept.reason)
            await asyncio.to_thread(self._job.generation.drop, prompts)
            return
        ours = list(map(id, samples_in(group)))
        others = [sample for sample in prompts if id(sample) not in ours]
        packed = pack_group(group, others)
        async with self._putting:  # the next put counts this one, also if nobody waits for it
            async with self._taken:
                while await asyncio.to_thread(self._job.finished.count) >= self._capacity:
                    with suppress(TimeoutError):  # another process may take, or clear the task
                        async with asyncio.timeout(_LOOK_AGAIN_S):
                            await self._taken.wait()
            finish = asyncio.to_thread(self._job.generation.finish, [(prompts, packed)])
            await _to_its_end(finish)

    async def get(self, current_version: int | None = None, **_: Any) -> Any:
        """Return the oldest group that is not too stale, as a `DataBufferInput`.

        A group is trained by the rollout during which it was got. A cancelled call takes none.
        """
        self._version = self._version if current_version is None else current_version
        while True:
            taken = await self._take()
            prompts = taken.prompts or list(samples_in(taken.group))
            oldest = self._miles.group_oldest_weight_version(taken.group)
            async with self._taken:
                self._taken.notify_all()
            if oldest is not None and current_version is not None:
                staleness, most = current_version - oldest, self._args.max_weight_staleness
                self._staleness.append(staleness)
                if most is not None and staleness > most:
                    _log.info("a group of staleness %d is not trained", staleness)
                    self._stale += 1
                    self._job.generation.recycling(prompts, taken.lease, taken.id)
                    await asyncio.to_thread(self._unused, prompts)
                    if not self._job.generation.recycled(prompts):
                        await asyncio.to_thread(taken.lease.expire, [taken.id])
                    continue
            return self._miles.DataBufferInput(prompt_group=prompts, group=taken.group)

    def get_metrics(self) -> dict[str, float]:
        """Return miles' metrics since the last call, with which a rollout has all of its groups."""
        self._job.note(self._job.rollout)
        self._job.rollout += 1
        prefix = "rollout/fully_async/"
        metrics = {
            f"{prefix}queue_size": self._job.finished.count(),
            f"{prefix}aborted_groups_filtered": self._aborted,
            f"{prefix}stale_groups_filtered": self._stale,
            **self._drops.collect(),
        }
        if self._staleness:
            metrics[f"{prefix}avg_staleness"] = sum(self._staleness) / len(self._staleness)
            metrics[f"{prefix}max_staleness"] = max(self._staleness)
        if self._version is not None:
            waiting = self._job.finished.staleness(self._version).waiting
            if waiting.groups:
                metrics[f"{prefix}buffer_avg_staleness"] = waiting.mean
                metrics[f"{prefix}buffer_max_staleness"] = waiting.max
        self._drops = self._miles.MetricGatherer()
        self._aborted, self._stale, self._staleness = 0, 0, []
        return metrics

    async def _take(self) -> TakenGroup:
        stop = Stop()

        def take() -> TakenGroup:
            with Deadline(stop=stop):
                (taken,) = self._job.take(self._job.rollout, 1, self._args.n_samples_per_prompt)
            return taken

        taking = asyncio.ensure_future(asyncio.to_thread(take))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            stop.ask("the trainer does not wait for it any more")
            taking.add_done_callback(_release)
            raise


def put_groups(
    groups: Sequence[Sequence[Any]], *, args: Any = None, timeout: float | None = None
) -> None:
    """Store finished groups for a trainer, from any machine: `redrb.compat.slime.put_groups`."""
    job.put_groups("miles", groups, args, timeout)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work in a thread; if the caller is cancelled, that is raised when the work is done."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise


def _release(taking: asyncio.Future[TakenGroup]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taken = taking.result()
        taken.lease.release([taken.id])
