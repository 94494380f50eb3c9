"""NeMo RL's data plane on tables. Its own contract test runs with `make test-peers`."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import redrb
from redrb.errors import (
    BatchTimeout,
    ConfigError,
    EncodeError,
    StaleRun,
    StoreClosed,
    StoreUnavailable,
)
from redrb.table import Claim
from tests.contract.test_table import WAIT_S

METHODS = (
    "register_partition claim_meta get_data check_consumption_status put_samples get_samples "
    "clear_samples close"
).split()


@dataclass
class KVBatchMeta:
    """NeMo RL's class, as far as the client uses it."""

    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None


@pytest.fixture(scope="module")
def kind() -> Iterator[Any]:
    """The client's class, on a stand-in for NeMo RL's interface."""
    names = ["nemo_rl", "nemo_rl.data_plane", "nemo_rl.data_plane.interfaces"]
    modules = [ModuleType(name) for name in names]
    abstract = {name: abstractmethod(lambda _: None) for name in METHODS}
    modules[-1].DataPlaneClient = type("DataPlaneClient", (ABC,), abstract)  # type: ignore[attr-defined]
    modules[-1].KVBatchMeta = KVBatchMeta  # type: ignore[attr-defined]
    sys.modules.update(zip(names, modules, strict=True))
    from redrb.compat.nemo_rl import RedrbDataPlaneClient

    yield RedrbDataPlaneClient
    for name in [*names, "redrb.compat.nemo_rl"]:
        del sys.modules[name]


def test_a_client_without_a_run_leaves_no_connection(
    kind: Any, url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = redrb.connect(url)
    monkeypatch.setattr(sys.modules[kind.__module__], "connect", lambda _: client)
    with pytest.raises(ConfigError, match="no run has begun"):
        kind(url=url, namespace=namespace, bootstrap=False)
    with pytest.raises(StoreClosed):
        client.execute("PING")


@pytest.fixture
def make(
    kind: Any, url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Make clients of the same namespace, as in several processes."""
    monkeypatch.delenv("REDRB_SECRET", raising=False)
    made: list[Any] = []

    def client(**options: Any) -> Any:
        made.append(kind({"enabled": True}, url=url, namespace=namespace, **options))
        return made[-1]

    yield client
    for each in made:
        each.close()


@pytest.fixture
def driver(make: Callable[..., Any]) -> Any:
    client = make()
    tasks = ["read", "other", "train"]
    client.register_partition("train", ["x"], num_samples=4, consumer_tasks=tasks)
    return client


def rows(**columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[len(next(iter(columns.values())))])


def put(client: Any, *sample_ids: str, **columns: Any) -> Any:
    tags = [{"input_lengths": place + 1} for place in range(len(sample_ids))]
    fields = rows(x=torch.arange(len(sample_ids)), **columns)
    return client.put_samples(list(sample_ids), "train", fields, tags)


def test_samples_come_dense_or_ragged_in_the_order_of_their_ids(driver: Any) -> None:
    ragged = torch.nested.as_nested_tensor([torch.ones(2), torch.zeros(1)], layout=torch.jagged)
    meta = put(driver, "a", "b", ragged=ragged, name=NonTensorStack("A", "B"))
    assert (meta.sample_ids, set(meta.fields)) == (["a", "b"], {"x", "ragged", "name"})
    assert meta.tags == [{"input_lengths": 1}, {"input_lengths": 2}]
    found = driver.get_samples(["b", "a"], "train", ["x", "ragged", "name"])
    assert found["x"].tolist() == [1, 0]
    assert [part.tolist() for part in found["ragged"].unbind()] == [[0.0], [1.0, 1.0]]
    assert found.pop("name").tolist() == ["B", "A"]
    assert driver.get_data(meta, ["x"])["x"].tolist() == [0, 1]
    assert driver.get_samples([], "train", ["x"]).batch_size == (0,)
    assert driver.put_samples([], "train").sample_ids == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_rows_come_dense_where_their_shapes_coincide_and_else_nested(driver: Any) -> None:
    """What NeMo RL's reader pads: its own clients make tensors of one shape dense, too."""
    for shapes, layout, padded in (
        ([(2,), (3,)], torch.jagged, (2, 3)),
        ([(3,), (3,)], torch.strided, (2, 3)),
        ([(3,)], torch.strided, (1, 3)),
        ([(4, 5), (4, 7)], torch.jagged, (2, 4, 7)),
        ([(4, 5), (4, 5)], torch.strided, (2, 4, 5)),
        ([(3, 4, 5), (3, 6, 2)], torch.strided, (2, 3, 6, 5)),
    ):
        tensors = [torch.ones(shape) for shape in shapes]
        ragged = len(set(shapes)) > 1
        nested = torch.nested.as_nested_tensor(tensors, layout=layout)
        ids = ["a", "b"][: len(shapes)]
        driver.put_samples(ids, "train", TensorDict({"y": nested}, batch_size=[len(ids)]))
        found = driver.get_samples(ids, "train", ["y"])["y"]
        assert (found.is_nested, found.layout) == (ragged, layout)
        whole = torch.nested.to_padded_tensor(found, 0.0) if ragged else found
        assert (tuple(whole.shape), whole.sum()) == (padded, sum(map(torch.sum, tensors)))


def test_arrays_of_objects_have_a_value_for_each_sample(driver: Any) -> None:
    """Rollouts hold such fields: texts, dicts and lists beside the tensors."""
    for values in (["a", "b", "c"], [{"n": 1}, None, {}], [["x"], ["y", "z"], []]):
        array = np.empty(3, object)
        for place, value in enumerate(values):
            array[place] = value
        for count in (3, 1):
            ids = ["a", "b", "c"][:count]
            fields = TensorDict({"c": array[:count]}, batch_size=[count])
            assert driver.put_samples(ids, "train", fields).fields == ["c"]
            found = driver.get_samples(ids, "train", ["c"]).get("c")
            assert isinstance(found, NonTensorStack)
            assert found.tolist() == values[:count]
    listed = NonTensorData(["d", "e"], batch_size=[2])
    driver.put_samples(["a", "b"], "train", TensorDict({"c": listed}, batch_size=[2]))
    assert driver.get_samples(["a", "b"], "train", ["c"]).get("c").tolist() == ["d", "e"]
    stops = np.asarray([["a", "b"], ["c", "d"]], dtype=object)
    driver.put_samples(["a", "b"], "train", TensorDict({"c": stops}, batch_size=[2]))
    assert driver.get_samples(["b"], "train", ["c"]).get("c").tolist() == [["c", "d"]]


def test_what_is_missing_or_wrong(driver: Any) -> None:
    put(driver, "a")
    for ids, partition, fields, text in (
        (["a", "b"], "train", ["x"], "no row 'b'"),
        (["a"], "train", ["y"], "no column 'y'"),
        (["a"], "other", ["x"], "no row 'a'"),
    ):
        with pytest.raises(KeyError, match=text) as caught:
            driver.get_samples(ids, partition, fields)
        assert isinstance(caught.value, redrb.RedrbError)
    with pytest.raises(ValueError, match=r"meta\.fields"):
        driver.get_data(KVBatchMeta("train", None, ["a"]))
    with pytest.raises(TypeError, match="non-tensor leaf"):
        driver.put_samples(["a"], "train", rows(x=torch.ones(1), y=NonTensorData("all")))
    with pytest.raises(EncodeError, match="column 'x', row 'a'"):
        driver.put_samples(["a"], "train", rows(x=NonTensorStack(object())))


def test_a_task_claims_each_sample_once(driver: Any, make: Callable[..., Any]) -> None:
    worker = make(bootstrap=False)
    assert driver.check_consumption_status("train", ["read"])  # there are no samples
    put(driver, "a", "b", "c")
    assert not driver.check_consumption_status("train", ["read"])
    first = worker.claim_meta("train", "read", ["x"], 2)
    assert (first.sample_ids, first.fields, first.task_name) == (["a", "b"], ["x"], "read")
    assert first.sequence_lengths == [1, 2]
    assert first.tags == [{"input_lengths": 1}, {"input_lengths": 2}]
    second = driver.claim_meta("train", "read", ["x"], 2, blocking=False)
    assert second.sample_ids == ["c"]
    assert driver.claim_meta("train", "read", ["x"], 2, blocking=False).sample_ids == []
    assert driver.check_consumption_status("train", ["read"]), "worker's claim counts, too"
    assert not driver.check_consumption_status("train", ["read", "other"])
    assert driver.claim_meta("train", "other", ["x"], 3).sample_ids == ["a", "b", "c"]
    with pytest.raises(BatchTimeout):
        driver.claim_meta("train", "read", ["x"], 1, timeout_s=0.01)
    assert not driver.check_consumption_status("nowhere", ["read"])


def test_a_claim_needs_all_its_fields(driver: Any) -> None:
    put(driver, "a", "b")
    driver.put_samples(["b"], "train", rows(y=torch.ones(1)))
    meta = driver.claim_meta("train", "train", ["x", "y"], 5, blocking=False)
    assert meta.sample_ids == ["b"]


def test_the_next_claim_and_close_acknowledge(driver: Any, make: Callable[..., Any]) -> None:
    def acknowledged() -> int:
        return int(driver._queue.partition("train").table.consumed("read"))

    put(driver, "a", "b", "c")
    worker = make(bootstrap=False)
    worker.claim_meta("train", "read", ["x"], 1)
    assert acknowledged() == 0, "another process claims it, if this one dies"
    worker.claim_meta("train", "read", ["x"], 1)
    assert acknowledged() == 1
    worker.close()
    worker.close()
    assert acknowledged() == 2


def test_claims_of_several_threads_are_all_acknowledged(driver: Any) -> None:
    put(driver, *map(str, range(48)))
    start, found = threading.Barrier(4), list[str]()

    def claim() -> None:
        start.wait(WAIT_S)
        while ids := driver.claim_meta("train", "read", ["x"], 2, blocking=False).sample_ids:
            found.extend(ids)

    with ThreadPoolExecutor(4) as pool:
        for thread in [pool.submit(claim) for _ in range(4)]:
            thread.result()
    assert sorted(found) == sorted(map(str, range(48)))
    driver.claim_meta("train", "read", ["x"], 1, blocking=False)
    stats = driver._queue.partition("train").table.stats()
    assert (stats.counts.claims["read"].consumed, stats.tasks["read"].ledger.leased) == (48, 0)


def test_what_could_not_be_acknowledged_or_handed_over_is_not_lost(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = driver._queue.partition("train")
    put(driver, "a", "b")

    def away(*_: object) -> None:
        raise StoreUnavailable("away", where="there")

    with monkeypatch.context() as patch, pytest.raises(StoreUnavailable):
        patch.setattr(partition, "tags_and_columns", away)
        driver.claim_meta("train", "read", ["x"], 1)
    assert driver.claim_meta("train", "read", ["x"], 1).sample_ids == ["a"], "nobody has seen it"
    assert partition.table.consumed("read") == 0
    with monkeypatch.context() as patch, pytest.raises(StoreUnavailable):
        patch.setattr(Claim, "ack", away)
        driver.claim_meta("train", "read", ["x"], 1)
    assert driver.claim_meta("train", "read", ["x"], 1).sample_ids == ["b"]
    assert partition.table.consumed("read") == 1


def test_cleared_samples_end_their_claims(driver: Any) -> None:
    put(driver, "a", "b", "c")
    meta = driver.claim_meta("train", "read", ["x"], 2)
    driver.clear_samples(meta.sample_ids, "train")
    assert driver.claim_meta("train", "read", ["x"], 1).sample_ids == ["c"]
    driver.clear_samples(None, "train")
    driver.clear_samples(None, "nowhere")
    with pytest.raises(KeyError):
        driver.get_samples(["c"], "train", ["x"])


def test_a_new_driver_returns_to_a_checkpoint(
    driver: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    put(driver, "a", "b")
    driver.save_checkpoint(tmp_path)
    driver.claim_meta("train", "read", ["x"], 2)
    driver.clear_samples(["a", "b"], "train")
    put(driver, "c")
    again = make()
    with pytest.raises(StaleRun):
        put(driver, "d")
    with pytest.raises(KeyError):
        again.get_samples(["c"], "train", ["x"])
    again.load_checkpoint(tmp_path)
    assert again.get_samples(["a", "b", "c"], "train", ["x"])["x"].tolist() == [0, 1, 0]
    meta = again.claim_meta("train", "read", ["x"], 3)
    assert set(meta.sample_ids) == {"a", "b", "c"}


def test_a_task_that_was_not_registered_is_an_error_at_once(
    driver: Any, make: Callable[..., Any]
) -> None:
    worker = make(bootstrap=False)
    put(driver, "a")
    worker.put_samples(["a"], "unregistered", rows(x=torch.ones(1)))
    for partition, task in (("train", "nobody"), ("nowhere", "read"), ("unregistered", "read")):
        for client in (driver, worker):
            with pytest.raises(
                KeyError, match=f"'{task}' is not registered as a consumer"
            ) as caught:
                client.claim_meta(partition, task, ["x"], 1)
            assert isinstance(caught.value, ConfigError)
    with pytest.raises(KeyError, match="its tasks are 'read', 'other', 'train'"):
        worker.claim_meta("train", "nobody", ["x"], 1)
    driver.register_partition("train", ["x"], num_samples=4, consumer_tasks=["late"])
    assert worker.claim_meta("train", "late", ["x"], 1).sample_ids == ["a"]


@pytest.mark.parametrize("partition", ["train", "val"])
def test_a_checkpoint_keeps_later_samples_of_every_partition(
    driver: Any, make: Callable[..., Any], tmp_path: Path, partition: str
) -> None:
    """`val` is a partition as any other: only verl drops its later rows."""
    driver.register_partition(partition, ["x"], num_samples=4, consumer_tasks=["read"])
    for sample, at in (("a", None), ("b", tmp_path)):
        driver.put_samples([sample], partition, rows(x=torch.ones(1)))
        if at is None:
            driver.save_checkpoint(tmp_path)
    again = make()
    again.load_checkpoint(tmp_path)
    assert set(again.claim_meta(partition, "read", ["x"], 2).sample_ids) == {"a", "b"}


def test_what_was_trained_before_a_checkpoint_is_not_claimed_after_it(
    driver: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    put(driver, "a", "b", "c")
    assert driver.claim_meta("train", "read", ["x"], 1).sample_ids == ["a"]
    assert driver.claim_meta("train", "other", ["x"], 2).sample_ids == ["a", "b"]
    driver.save_checkpoint(tmp_path)
    assert driver.claim_meta("train", "read", ["x"], 1).sample_ids == ["b"]  # in a lost step
    again = make()
    again.load_checkpoint(tmp_path)
    assert again.claim_meta("train", "read", ["x"], 3, blocking=False).sample_ids == ["b", "c"]
    assert again.claim_meta("train", "other", ["x"], 3, blocking=False).sample_ids == ["c"]


def test_a_worker_without_a_driver_does_not_go_on(make: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="no run has begun at"):
        make(bootstrap=False)
