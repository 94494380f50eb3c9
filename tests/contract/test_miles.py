"""miles' data buffer on streams: filters, capacity, staleness, and acknowledgement at a save."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from redrb.compat.miles import RedrbDataBuffer, RedrbDataSource, put_groups
from redrb.compat.sample_groups import job
from redrb.errors import ConfigError
from tests.framework_stand_ins import DataBufferInput, Sample, arguments, stand_ins


@pytest.fixture(autouse=True)
def miles(monkeypatch):
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def args(url, namespace, tmp_path):
    return arguments(
        url,
        namespace,
        tmp_path,
        async_data_buffer_capacity_factor=2.0,
        dynamic_sampling_filter_path=None,
        max_weight_staleness=None,
    )


class Trainer:
    """A data source and a buffer, as miles makes them; unused groups are recycled."""

    def __init__(self, args, rollout_id=-1):
        job._jobs.clear()
        self.source = RedrbDataSource(args)
        self.source.load(rollout_id)
        self.job = self.source.groups
        self.buffer = RedrbDataBuffer(SimpleNamespace(args=args, unused_handler_fn=self.recycle))

    def recycle(self, prompts):
        for sample in prompts:
            sample.tokens, sample.status = [], Sample.Status.ABORTED
        self.source.add_samples([prompts])

    async def make(self, count, status=Sample.Status.COMPLETED, version=None):
        """Put groups of the data set; miles fills the samples of the prompts themselves."""
        for _ in range(count):
            (group,) = self.source.get_samples(1)
            for sample in group:
                sample.tokens, sample.status = [group[0].group_index], status
                sample.weight_versions = [] if version is None else [str(version)]
            await self.buffer.put(DataBufferInput(group, group))

    async def rollout(self, **context):
        groups = [(await self.buffer.get(**context)).group for _ in range(2)]
        self.metrics = self.buffer.get_metrics()
        return [group[0].tokens[0] for group in groups]

    def ledgers(self):
        for stream in (
            self.job.finished,
            self.job.generation.prompts,
            self.job.generation.returned,
        ):
            stats = stream.stats().ledger
            assert stats.balanced
            yield stats.waiting, stats.leased, stats.acked


@pytest.fixture
def start(args):
    trainers = []

    def start_one(*arguments, **changes):
        vars(args).update(changes)
        trainers.append(Trainer(args, *arguments))
        return trainers[-1]

    yield start_one
    list(trainers[-1].ledgers())
    for trainer in trainers:
        trainer.source.close()


def test_a_put_goes_on_when_another_process_takes(start):
    trainer = start(async_data_buffer_capacity_factor=1.0)

    async def run():
        await trainer.make(2)  # full
        waiting = [asyncio.create_task(trainer.make(1)) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, timeout=0.2)
        assert not done
        trainer.job.finished.take(2, timeout=2).ack()  # no `get` of this process
        await asyncio.wait_for(asyncio.gather(*waiting), 20)
        assert await trainer.rollout()

    asyncio.run(run())


@pytest.mark.parametrize("resumed", [-1, 0, 1])
def test_groups_are_acknowledged_by_the_save_of_their_rollout(start, resumed):
    trainer = start()

    async def run():
        await trainer.make(4)
        assert await trainer.rollout() == [0, 1]
        if resumed >= 0:
            assert await trainer.rollout() == [2, 3]
        else:  # this rollout is not complete
            await trainer.buffer.get()

    asyncio.run(run())
    if resumed == 0:
        trainer.source.save(0)
        assert next(trainer.ledgers()) == (0, 2, 2)
    successor = start(resumed)
    done = 2 * resumed + 2
    assert next(successor.ledgers()) == (4 - done, 0, done)
    if done < 4:
        assert asyncio.run(successor.rollout()) == [done, done + 1]
        successor.source.save(resumed + 1)
        assert next(successor.ledgers()) == (2 - done, 0, done + 2)


def test_a_put_waits_while_the_buffer_is_full(start):
    trainer = start()

    async def run():
        await trainer.make(4)
        more = asyncio.create_task(trainer.make(1))
        assert (await asyncio.wait({more}, timeout=0.2))[1] == {more}
        assert trainer.job.finished.count() == 4
        await trainer.rollout()
        await asyncio.wait_for(more, 20)
        assert trainer.job.finished.count() == 3

    asyncio.run(run())


@pytest.mark.parametrize("puts", [1, 5, 12])
def test_puts_at_once_do_not_exceed_the_capacity(start, puts):
    trainer = start()
    finish = trainer.job.generation.finish

    def slowly(groups):
        time.sleep(0.02)
        finish(groups)

    trainer.job.generation.finish = slowly

    async def run():
        waiting = {asyncio.create_task(trainer.make(1)) for _ in range(puts)}
        got = []
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=0.15)
            there = trainer.job.finished.count()
            assert there <= 4
            got += [(await trainer.buffer.get()).group[0].tokens[0] for _ in range(there)]
        return got

    got = asyncio.run(run())
    assert sorted(got) == list(range(puts))


def test_a_put_that_was_cancelled_while_it_stores_counts(start):
    trainer = start(async_data_buffer_capacity_factor=0.5)
    storing, go = threading.Event(), threading.Event()
    finish = trainer.job.generation.finish

    def slowly(groups):
        storing.set()
        assert go.wait(20)
        finish(groups)

    trainer.job.generation.finish = slowly

    async def run():
        first = asyncio.create_task(trainer.make(1))
        assert await asyncio.to_thread(storing.wait, 20)
        first.cancel()
        second = asyncio.create_task(trainer.make(1))
        assert not (await asyncio.wait({first, second}, timeout=0.1))[0]
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not (await asyncio.wait({second}, timeout=0.2))[0]
        assert trainer.job.finished.count() == 1
        await trainer.buffer.get()
        await asyncio.wait_for(second, 20)

    asyncio.run(run())


@pytest.mark.parametrize("recycled", [True, False])
def test_aborted_and_stale_groups_are_not_trained(start, recycled):
    trainer = start(max_weight_staleness=2)
    if not recycled:
        trainer.buffer._unused = lambda _: None

    async def run():
        await trainer.make(1, version=1)
        await trainer.make(1, Sample.Status.ABORTED)
        if recycled:
            assert list(trainer.ledgers()) == [(1, 0, 0), (1, 0, 1), (1, 0, 0)]
        await trainer.make(2, version=5)
        return await trainer.rollout(current_version=6)

    assert asyncio.run(run()) == ([1, 2] if recycled else [2, 3])
    name = "rollout/fully_async/"
    assert trainer.metrics[f"{name}aborted_groups_filtered"] == 1
    assert trainer.metrics[f"{name}stale_groups_filtered"] == 1
    assert trainer.metrics[f"{name}max_staleness"] == 5
    stats = trainer.job.finished.stats().ledger
    assert (stats.expired, stats.filtered) == ((0, 0) if recycled else (1, 1))
    again = trainer.source.get_samples(1)[0][0]
    assert (again.group_index, again.tokens) == ((0, []) if recycled else (4, []))


def keep_odd(args, group):
    return SimpleNamespace(keep=group[0].tokens[0] % 2, reason="even")


def test_groups_that_a_filter_drops_are_done(start):
    trainer = start(dynamic_sampling_filter_path=f"{__name__}.keep_odd")

    async def run():
        await trainer.make(4)
        assert await trainer.rollout() == [1, 3]

    asyncio.run(run())
    assert trainer.metrics["drop_even"] == 2
    assert list(trainer.ledgers())[1] == (0, 0, 4)


def test_trajectories_of_several_samples_keep_their_prompts(start):
    trainer = start()

    async def run():
        (prompts,) = trainer.source.get_samples(1)
        split = [[Sample(0, each.index, rollout_id=each.index)] * 2 for each in prompts]
        await trainer.buffer.put(DataBufferInput(prompts, split))
        return await trainer.buffer.get(), prompts, split

    got, prompts, split = asyncio.run(run())
    assert (got.prompt_group, got.group) == (prompts, split)
    assert list(trainer.ledgers())[1] == (0, 0, 1)


def test_a_cancelled_get_takes_no_group(start):
    trainer = start()

    async def run():
        waiting = asyncio.create_task(trainer.buffer.get())
        await asyncio.wait({waiting}, timeout=0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await trainer.make(1)
        assert (await trainer.buffer.get()).group[0].tokens == [0]

    asyncio.run(run())
    assert next(trainer.ledgers()) == (0, 1, 0)


def test_makers_on_other_machines_put_groups_too(args, start):
    trainer = start()
    put_groups([[Sample(tokens=[9]), Sample(tokens=[9])]] * 2, args=args)
    assert asyncio.run(trainer.rollout(current_version=3)) == [9, 9]


def test_the_buffer_needs_the_data_source(args):
    job._jobs.clear()
    with pytest.raises(ConfigError, match="--data-source-path"):
        RedrbDataBuffer(SimpleNamespace(args=args, unused_handler_fn=None))
    job.job_groups(args, "miles").close()


def test_a_capacity_of_less_than_one_group_is_refused(start):
    with pytest.raises(ConfigError, match="--async-data-buffer-capacity-factor"):
        start(async_data_buffer_capacity_factor=0.4)
    start(async_data_buffer_capacity_factor=0.5)
