"""ExperienceDataset: worker processes take and pad, the main process acknowledges."""

from __future__ import annotations

import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import redrb
from redrb import BatchTimeout, ConfigError, ExperienceStream, LeaseLost, TaskMismatch
from redrb.connection import Client
from redrb.stream.feeding import ExperienceDataset, LeasedExperience
from tests.audit import audit
from tests.conftest import REAL
from tests.samples import assert_same, numbered


@pytest.fixture(autouse=True)
def forks_of_threads() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@pytest.fixture
def real(server_urls: Callable[[str], str]) -> str:
    """URL of one real server: processes are the same with all."""
    return server_urls(list(REAL)[-1])


@pytest.fixture
def there(real: str, namespace: str) -> Generator[ExperienceStream]:
    with (
        redrb.connect(real) as client,
        ExperienceStream(client, "math", namespace=namespace) as stream,
    ):
        yield stream


def filled(stream: ExperienceStream, count: int) -> ExperienceStream:
    stream.put_many([[numbered(n)] for n in range(count)])
    return stream


def rewards(batch: LeasedExperience) -> list[int]:
    assert batch.reward is not None
    return batch.reward.int().tolist()


def ledger(stream: ExperienceStream) -> tuple[int, int, int, int]:
    told = stream.stats().ledger
    return told.acked, told.leased, told.waiting, told.dead


def loader(dataset: ExperienceDataset, workers: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def shut_down(dataset: ExperienceDataset) -> None:
    """Read all batches, and end the workers also when that raises, and a traceback holds them."""
    batches: Any = iter(loader(dataset, 1))
    try:
        list(batches)
    finally:
        batches._shutdown_workers()


def soon(holds: Callable[[], bool], timeout: float = 10) -> None:
    end = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_in_one_process_it_works_on_every_server(client: Client, namespace: str) -> None:
    stream = filled(ExperienceStream(client, "math", namespace=namespace), 8)
    with ExperienceDataset(client, "math", 2, namespace=namespace, steps=4) as dataset:
        outcomes = [
            dataset.ack,
            dataset.release,
            lambda batch: dataset.reject(batch, "nan loss"),
            lambda batch: dataset.ack(batch.ticket),
        ]
        for end, batch in zip(outcomes, loader(dataset, 0), strict=True):
            assert stream.stats().ledger.leased == 2
            end(batch)
    assert ledger(stream) == (4, 0, 2, 2)
    assert stream.dead_letters()[0].reason == "nan loss"
    audit(stream)
    stream.close()


def test_a_batch_is_ended_once(client: Client, namespace: str) -> None:
    stream = filled(ExperienceStream(client, "math", namespace=namespace), 4)
    with ExperienceDataset(client, "math", 2, namespace=namespace) as dataset:
        batches = iter(dataset)
        batch = next(batches)
        ticket = batch.ticket
        dataset.ack(batch)
        assert batch.ticket is None
        with pytest.raises(LeaseLost, match="ended already"):
            dataset.ack(batch)
        assert ticket is not None
        dataset.ack(ticket)  # as after a broken connection: nothing more happens
        assert ledger(stream) == (2, 0, 2, 0)
        with pytest.raises(ConfigError, match="no batch"):
            dataset.ack("batch")  # type: ignore[arg-type]
        last = next(batches)
    assert ledger(stream) == (2, 0, 2, 0)
    with pytest.raises(ConfigError, match="closed"):
        dataset.ack(last)
    stream.close()


def test_slots_are_used_again(client: Client, namespace: str) -> None:
    stream = filled(ExperienceStream(client, "math", namespace=namespace), 40)
    with ExperienceDataset(client, "math", 1, namespace=namespace, steps=40) as dataset:
        for batch in dataset:
            dataset.ack(batch)
        assert dataset._feed is not None
        dataset._feed._look()
        assert not dataset._feed._stream._consumer._slots
    assert client.execute("HLEN", f"{stream._task.store.keys.prefix}leases:default") <= 2
    stream.close()


def test_who_forgets_to_acknowledge_is_told(client: Client, namespace: str) -> None:
    stream = filled(ExperienceStream(client, "math", namespace=namespace), 20)
    dataset = ExperienceDataset(client, "math", 1, namespace=namespace, max_unacknowledged=3)
    seen = []
    with pytest.raises(ConfigError, match=r"3 batches .* not acknowledged.*dataset.ack"), dataset:
        for batch in loader(dataset, 0):
            seen.append(batch)
    assert len(seen) == 3
    assert ledger(stream) == (0, 0, 20, 0)
    stream.close()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_take_and_the_main_process_acknowledges(
    there: ExperienceStream, namespace: str, context: str
) -> None:
    filled(there, 40)
    there.put([numbered(40), numbered(41)])
    client, seen = there._task.store.client, []
    with ExperienceDataset(client, "math", 2, namespace=namespace, steps=20) as dataset:
        for batch in loader(dataset, multiprocessing_context=context):
            seen += rewards(batch)
            assert batch.sequences.shape == (2, 3)
            dataset.ack(batch)
    assert sorted(seen) == list(range(40))
    assert ledger(there) == (40, 0, 1, 0)
    audit(there)


def test_a_batch_is_what_lease_batch_makes(there: ExperienceStream, namespace: str) -> None:
    items = [
        numbered(0, tags={"a": 1}, extras={"text": ["x"]}, policy_version=3),
        numbered(1, sequences=torch.tensor([1, 2, 3, 4]), tensors={"image": torch.ones(2, 2)}),
    ]
    items[0].tensors = {"image": torch.zeros(2, 2)}
    there.put(items)
    lease = there.take(1, timeout=0)
    expected = lease.batch(side="right")
    lease.release()
    with ExperienceDataset(
        there._task.store.client, "math", 1, namespace=namespace, side="right", steps=1
    ) as dataset:
        for batch in loader(dataset, 1):
            assert isinstance(batch, LeasedExperience)
            assert_same(batch, expected)
            dataset.ack(batch)
    assert there.stats().ledger.acked == 1


def test_batches_in_flight_go_back_unharmed_when_it_is_closed(
    there: ExperienceStream, namespace: str
) -> None:
    filled(there, 30)
    with ExperienceDataset(there._task.store.client, "math", 2, namespace=namespace) as dataset:
        for batch in loader(dataset):
            dataset.ack(batch)
            soon(lambda: there.stats().ledger.leased >= 6)
            break
        assert there.stats().ledger.leased >= 6
    assert ledger(there) == (2, 0, 28, 0)
    deliveries = f"{there._task.store.keys.prefix}deliveries:default"
    assert there._task.store.client.execute("HLEN", deliveries) == 0
    audit(there)


def test_the_bound_holds_a_worker_back_until_acknowledgements_come(
    there: ExperienceStream, namespace: str
) -> None:
    filled(there, 12)
    with ExperienceDataset(
        there._task.store.client, "math", 1, namespace=namespace, steps=12, max_unacknowledged=4
    ) as dataset:
        held = []
        for number, batch in enumerate(loader(dataset, 1, prefetch_factor=1)):
            held.append(batch)
            assert there.stats().ledger.leased <= 4
            if len(held) == 3 or number == 11:
                for one in held:
                    dataset.ack(one)
                held.clear()
    assert ledger(there) == (12, 0, 0, 0)


def test_errors_of_workers_keep_their_class(there: ExperienceStream, namespace: str) -> None:
    client = there._task.store.client
    options: dict[str, Any] = {"namespace": namespace, "timeout": 0.1}
    with (
        ExperienceDataset(client, "math", 1, **options) as dataset,
        pytest.raises(BatchTimeout, match="0 of 1 groups"),
    ):
        shut_down(dataset)
    filled(there, 5)
    with (
        ExperienceDataset(client, "math", 1, **options, order="stalest") as dataset,
        pytest.raises(TaskMismatch, match="order"),
    ):
        shut_down(dataset)
    with (
        ExperienceDataset(client, "math", 1, max_unacknowledged=2, **options) as dataset,
        pytest.raises(ConfigError, match="not acknowledged"),
    ):
        shut_down(dataset)


def test_the_end_of_data_loses_nothing_that_is_still_trained_on(
    there: ExperienceStream, namespace: str
) -> None:
    filled(there, 4)
    options: dict[str, Any] = {"namespace": namespace, "lease_ms": 1000}
    with ExperienceDataset(there._task.store.client, "math", 1, steps=4, **options) as dataset:
        for batch in loader(dataset, 1):
            time.sleep(0.6)  # three batches are here when the worker is done
            dataset.ack(batch)
    assert ledger(there) == (4, 0, 0, 0)
    assert there.stats().taken_over == 0


def test_what_a_killed_worker_held_is_lost_and_comes_back(
    there: ExperienceStream, namespace: str
) -> None:
    filled(there, 4)
    options: dict[str, Any] = {"namespace": namespace, "lease_ms": 500}
    with ExperienceDataset(there._task.store.client, "math", 4, **options) as dataset:
        batches = iter(loader(dataset, 1))
        batch = next(batches)
        (worker,) = batches._workers  # type: ignore[attr-defined]
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            next(batches)
        lease = there.take(4, timeout=10)
        assert there.stats().taken_over == 4
        with pytest.raises(LeaseLost, match="its worker process ended"):
            dataset.ack(batch)
        lease.ack()
    assert ledger(there) == (4, 0, 0, 0)


def test_what_fits_into_no_batch_is_passed_over(there: ExperienceStream, namespace: str) -> None:
    there.put(numbered(0, sequences=torch.tensor([1, 2, 3], dtype=torch.int32)))
    filled(there, 5)
    with ExperienceDataset(
        there._task.store.client, "math", 3, namespace=namespace, steps=1
    ) as dataset:
        for batch in loader(dataset, 1):
            assert len(rewards(batch)) == 3
            dataset.ack(batch)
    assert ledger(there) == (3, 0, 2, 1)


def test_a_server_of_one_process_is_no_server_for_workers(namespace: str) -> None:
    with pytest.raises(ConfigError, match="give the dataset the client"):
        ExperienceDataset("embedded:///tmp/x", "math", 1)
    with pytest.raises(ConfigError, match="no URL"):
        ExperienceDataset(7, "math", 1)  # type: ignore[arg-type]
    with (
        ExperienceDataset(f"fake://{namespace}", "math", 1) as dataset,
        pytest.raises(ConfigError, match="num_workers=0"),
    ):
        shut_down(dataset)


def test_an_embedded_server_serves_workers() -> None:
    with redrb.connect("embedded://") as client, ExperienceStream(client, "math") as stream:
        filled(stream, 2)
        with ExperienceDataset(client, "math", 2, steps=1) as dataset:
            for batch in loader(dataset, 1):
                dataset.ack(batch)
        assert ledger(stream) == (2, 0, 0, 0)


def test_a_pickle_holds_no_connection_and_its_words_no_password(client: Client) -> None:
    dataset = ExperienceDataset(client, "math", 1)
    again = pickle.loads(pickle.dumps(dataset))
    assert again._client is None
    assert again._url == client.url
    secret = ExperienceDataset("redis://user:hunter2@host:1/0", "math", 1)
    assert "hunter2" not in repr(secret)
