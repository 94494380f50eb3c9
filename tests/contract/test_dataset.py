"""ExperienceDataset: a DataLoader's batches, taken ahead by a thread, ended one by one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from redrb import BatchTimeout, ConfigError, ExperienceStream, LeaseLost
from redrb.connection import Client
from redrb.stream.feeding import ExperienceDataset, LeasedExperience
from tests.audit import audit
from tests.samples import assert_same, numbered

pytestmark = pytest.mark.long  # the same requests as test_stream*.py


@pytest.fixture
def stream(client: Client, namespace: str) -> Generator[ExperienceStream]:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        yield stream


def filled(stream: ExperienceStream, count: int) -> ExperienceStream:
    stream.put_many([[numbered(n)] for n in range(count)])
    return stream


def rewards(batch: LeasedExperience) -> list[int]:
    assert batch.reward is not None
    return batch.reward.int().tolist()


def ledger(stream: ExperienceStream) -> tuple[int, int, int, int]:
    counts = stream.stats().ledger
    return counts.acked, counts.leased, counts.waiting, counts.dead


def loader(dataset: ExperienceDataset, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, **options)


def test_batches_come_in_order_and_are_ended_one_by_one(stream: ExperienceStream) -> None:
    filled(stream, 8)
    seen = []
    with ExperienceDataset(stream, 2, steps=4) as dataset:
        ends: list[Callable[[LeasedExperience], object]] = [
            dataset.ack,
            lambda batch: dataset.reject(batch, "nan loss"),
            lambda batch: batch.lease.ack(),  # type: ignore[union-attr]
            dataset.release,
        ]
        for end, batch in zip(ends, loader(dataset), strict=True):
            seen += rewards(batch)
            end(batch)
            assert not batch.lease
    assert seen == list(range(8))
    assert ledger(stream) == (4, 0, 2, 2)
    assert stream.dead_letters()[0].reason == "nan loss"
    audit(stream)


def test_asking_for_the_next_batch_acknowledges_nothing(stream: ExperienceStream) -> None:
    filled(stream, 6)
    with ExperienceDataset(stream, 2, steps=3) as dataset:
        batches = list(loader(dataset))
        assert ledger(stream) == (0, 6, 0, 0)
        for batch in batches:
            dataset.ack(batch)
    assert ledger(stream) == (6, 0, 0, 0)


def test_a_batch_is_ended_once(stream: ExperienceStream) -> None:
    filled(stream, 4)
    with ExperienceDataset(stream, 2) as dataset:
        batches = iter(dataset)
        batch = next(batches)
        dataset.ack(batch)
        with pytest.raises(LeaseLost, match="ended already"):
            dataset.ack(batch)
        with pytest.raises(ConfigError, match="no batch"):
            dataset.ack("batch")  # type: ignore[arg-type]
        last = next(batches)
    assert ledger(stream) == (2, 0, 2, 0)
    with pytest.raises(LeaseLost, match="ended already"):
        dataset.ack(last)
    dataset.close()


def test_batches_that_are_never_acknowledged_are_an_error(stream: ExperienceStream) -> None:
    filled(stream, 20)
    dataset = ExperienceDataset(stream, 1, max_unacknowledged=3)
    seen = []
    with pytest.raises(ConfigError, match=r"3 batches .* not acknowledged.*dataset.ack"), dataset:
        for batch in loader(dataset):
            seen.append(batch)
    assert len(seen) == 3
    assert ledger(stream) == (0, 0, 20, 0)
    with ExperienceDataset(stream, 1, max_unacknowledged=3, steps=3) as dataset:
        assert len(list(loader(dataset))) == 3


def test_a_batch_is_that_of_lease_batch(stream: ExperienceStream) -> None:
    items = [
        numbered(0, tags={"a": 1}, extras={"text": ["x"]}, policy_version=3),
        numbered(1, sequences=torch.tensor([1, 2, 3, 4]), tensors={"image": torch.ones(2, 2)}),
    ]
    items[0].tensors = {"image": torch.zeros(2, 2)}
    stream.put(items)
    lease = stream.take(1, timeout=0)
    expected = lease.batch(side="right")
    lease.release()
    with ExperienceDataset(stream, 1, side="right", steps=1) as dataset:
        for batch in loader(dataset, pin_memory=torch.accelerator.is_available()):
            assert isinstance(batch, LeasedExperience)
            assert_same(batch, expected)
            dataset.ack(batch)
    assert stream.stats().ledger.acked == 1


def test_batches_that_were_not_ended_go_back_unharmed_at_the_close(
    stream: ExperienceStream,
) -> None:
    filled(stream, 30)
    with ExperienceDataset(stream, 2) as dataset:
        for number, batch in enumerate(loader(dataset)):
            if number == 2:
                break
            if number == 0:
                dataset.ack(batch)
        assert stream.stats().ledger.leased >= 4
    assert ledger(stream) == (2, 0, 28, 0)
    deliveries = f"{stream._task.store.keys.prefix}deliveries:default"
    assert stream._task.store.client.execute("HLEN", deliveries) == 0
    audit(stream)


def test_groups_that_fit_into_no_batch_are_passed_over(
    client: Client, namespace: str, stream: ExperienceStream
) -> None:
    # put without the check of fields, so that takes find it
    with ExperienceStream(client, "math", namespace=namespace, checks=["values"]) as unchecked:
        unchecked.put(numbered(0, sequences=torch.tensor([1, 2, 3], dtype=torch.int32)))
    filled(stream, 5)
    with ExperienceDataset(stream, 3, steps=1) as dataset:
        for batch in loader(dataset):
            assert len(rewards(batch)) == 3
            dataset.ack(batch)
    assert ledger(stream) == (3, 0, 2, 1)


def test_the_end_of_data_is_a_timeout(stream: ExperienceStream) -> None:
    filled(stream, 2)
    with (
        ExperienceDataset(stream, 2, timeout=0.1) as dataset,
        pytest.raises(BatchTimeout, match="0 of 2 groups"),
    ):
        for batch in loader(dataset):
            dataset.ack(batch)
    assert ledger(stream) == (2, 0, 0, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_worker_processes_are_refused(stream: ExperienceStream) -> None:
    filled(stream, 2)
    with ExperienceDataset(stream, 2) as dataset:
        with pytest.raises(ConfigError, match="num_workers=0"):
            pickle.dumps(dataset)
        batches: Any = iter(loader(dataset, num_workers=1, multiprocessing_context="fork"))
        try:
            with pytest.raises(ConfigError, match="num_workers=0"):
                next(batches)
        finally:
            batches._shutdown_workers()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_of_it_ends_no_batch_of_its_parent(stream: ExperienceStream) -> None:
    filled(stream, 2)
    with ExperienceDataset(stream, 2) as dataset:
        batch = next(iter(dataset))
        pid = os.fork()
        if pid == 0:
            dataset.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        dataset.ack(batch)
    assert ledger(stream) == (2, 0, 0, 0)


def test_arguments_are_checked_before_anything_is_taken(stream: ExperienceStream) -> None:
    with pytest.raises(ConfigError, match="max_unacknowledged"):
        ExperienceDataset(stream, 1, max_unacknowledged=0)
    with pytest.raises(ConfigError, match="ExperienceStream"):
        ExperienceDataset("redis://", 1)  # type: ignore[arg-type]
