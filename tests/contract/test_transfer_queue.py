"""transfer_queue's functions on tables: values, errors, runs, checkpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import MetaData, NonTensorData, NonTensorStack, TensorDict

import redrb
from redrb.compat import transfer_queue
from redrb.compat.transfer_queue.queue import Queue, durability
from redrb.errors import ConfigError, EncodeError, StaleRun, StoreError
from redrb.table import Table, TagChanges


@pytest.fixture
def tq(url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The functions, in a run of a new namespace."""
    monkeypatch.setenv("REDRB_URL", url)
    monkeypatch.setenv("REDRB_NAMESPACE", namespace)
    monkeypatch.delenv("REDRB_SECRET", raising=False)
    transfer_queue.init({"enable": True})
    yield transfer_queue
    transfer_queue.close()


@pytest.fixture
def queue(tq: ModuleType, client: redrb.Client, namespace: str) -> Queue:
    """The same partitions, as another process sees them."""
    return Queue(client, namespace, None)


@pytest.fixture
def restart(tq: ModuleType) -> Callable[[], None]:
    """End this driver, and start the next one."""

    def again() -> None:
        tq.close()
        tq.init({"enable": True})

    return again


def rows(**columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[len(next(iter(columns.values())))])


def jagged(*parts: list[int]) -> torch.Tensor:
    tensors = [torch.tensor(part) for part in parts]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def lists(column: torch.Tensor) -> list[Any]:
    return [part.tolist() for part in column.unbind()]


# Values


def packed(tensors: list[torch.Tensor]) -> Any:
    """Return tensors of rows as TransferQueue 0.1.11 returns a column of them."""
    if not tensors[0].dim():
        return torch.stack(tensors)
    for layout in (torch.jagged, torch.strided):
        with suppress(RuntimeError):
            return torch.nested.as_nested_tensor(tensors, layout=layout)
    return NonTensorStack(*tensors)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if not isinstance(found, torch.Tensor):
        for one, other in zip(found.tolist(), expected.tolist(), strict=True):
            assert torch.equal(one, other)
        return
    assert (found.layout, found.dtype) == (expected.layout, expected.dtype)
    if found.layout is torch.jagged:
        assert found._ragged_idx == expected._ragged_idx
        assert found.values().tolist() == expected.values().tolist()
        assert found.offsets().tolist() == expected.offsets().tolist()
    assert lists(found) == lists(expected)


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one row": [(4, 5)],
    "numbers": [(), (), ()],
    "vectors": [(3,), (0,), (5,)],
    "first dimension": [(2, 3), (5, 3)],
    "mRoPE": [(4, 5), (4, 7), (4, 1)],
    "mRoPE of one length": [(4, 5), (4, 5)],
    "last of three": [(2, 3, 1), (2, 3, 4)],
    "middle": [(2, 1, 3), (2, 4, 3)],
    "without elements": [(4, 0), (4, 2), (4, 0)],
    "images": [(3, 4, 5), (3, 6, 2)],
    "all dimensions": [(1, 2), (2, 1)],
    "several ranks": [(2,), (2, 1)],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_rows_of_each_shape_come_as_from_transfer_queue(tq: ModuleType) -> None:
    for (name, shapes), dtype in product(SHAPES.items(), (torch.int64, torch.uint16)):
        keys = [f"{name} {number}" for number in range(len(shapes))]
        rows = [torch.arange(prod(shape)).to(dtype).reshape(shape) for shape in shapes]
        expected = packed(rows)
        for values in (expected, NonTensorStack(*rows)):
            fields = TensorDict({"x": values}, batch_size=[len(rows)])
            tq.kv_batch_put(keys, "train", fields)
            found = tq.kv_batch_get(keys, "train")
            assert found.batch_size == (len(rows),)
            assert_same(found.get("x"), expected)
            assert_same(tq.kv_batch_get(keys[::-1], "train").get("x"), packed(rows[::-1]))


def objects(*values: Any) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), object)
    for place, value in enumerate(values):
        array[place] = value
    return array


COLUMNS: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "array of dicts": (lambda: objects({"a": 1}, {"b": [2]}), [{"a": 1}, {"b": [2]}]),
    "array of lists": (lambda: objects([1], [2, 3]), [[1], [2, 3]]),
    "array of Nones": (lambda: objects(None, None), [None, None]),
    "array of all kinds": (lambda: objects("a", 2), ["a", 2]),
    "array of arrays": (lambda: objects(np.arange(2), np.arange(3)), [[0, 1], [0, 1, 2]]),
    "array of tensors": (lambda: objects(torch.ones(2), torch.zeros(1)), [[1.0, 1.0], [0.0]]),
    "array of two dimensions": (
        lambda: np.array([["a", None], [1, {"b": 2}]], object), [["a", None], [1, {"b": 2}]]
    ),
    "texts": (lambda: np.array(["a", "bc"]), ["a", "bc"]),
    "bytes": (lambda: np.array([b"a", b"bc"]), [b"a", b"bc"]),
    "texts of two dimensions": (lambda: np.array([["a"], ["b"]]), [["a"], ["b"]]),
    "tuple of texts": (lambda: ("a", "b"), ["a", "b"]),
    "list of texts": (lambda: ["a", "b"], ["a", "b"]),
    "numbers": (lambda: np.arange(2), [0, 1]),
    "stack": (lambda: NonTensorStack("a", {"b": 1}), ["a", {"b": 1}]),
    "stack of stacks": (
        lambda: NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")),
        [["a", "b"], ["c", "d"]],
    ),
    "one list": (lambda: NonTensorData(["a", "b"], batch_size=[2]), ["a", "b"]),
    "one tensor": (lambda: NonTensorData(torch.arange(2), batch_size=[2]), [0, 1]),
    "one array of numbers": (lambda: NonTensorData(np.eye(2), batch_size=[2]), [[1, 0], [0, 1]]),
    "meta data": (lambda: MetaData(objects("a", 2), batch_size=[2]), ["a", 2]),
    "of both": (lambda: NonTensorData({"a": 1}, batch_size=[2]), [{"a": 1}, {"a": 1}]),
}  # fmt: skip


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value


@pytest.mark.parametrize("secret", [None, "of this job"])
@pytest.mark.parametrize("most", [1, 2048])
def test_each_row_has_its_value_of_each_kind_of_column(
    tq: ModuleType,
    restart: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    secret: str | None,
    most: int,
) -> None:
    if secret:
        monkeypatch.setenv("REDRB_SECRET", secret)
        restart()
    monkeypatch.setattr("redrb.compat.transfer_queue.queue.MOST_ROWS", most)
    for name, (make, values) in COLUMNS.items():
        keys = [f"{name} {number}" for number in range(2)]
        tq.kv_batch_put(keys, "train", TensorDict({"c": make()}, batch_size=[2]))
        columns = [tq.kv_batch_get(each, "train").get("c") for each in (keys, *keys)]
        tensors = [isinstance(column, torch.Tensor) for column in columns]
        found = [
            list(map(plain, column.unbind() if nested else column.tolist()))
            for column, nested in zip(columns, tensors, strict=True)
        ]
        assert found == [values, *([value] for value in values)], name


def test_one_row_has_its_value_of_each_kind_of_column(tq: ModuleType) -> None:
    for column in (objects("a"), np.array(["a"]), ["a"], NonTensorData(["a"]), NonTensorData("a")):
        tq.kv_batch_put(["a"], "train", TensorDict({"c": column}, batch_size=[1]))
        assert tq.kv_batch_get("a", "train").get("c").tolist() == ["a"]


def test_a_column_with_another_number_of_values_is_refused(tq: ModuleType) -> None:
    for value in (objects(1, 2, 3), ["a"], np.array("a", object), np.eye(3)):
        column = NonTensorData(value, batch_size=[2])
        with pytest.raises(EncodeError, match=r"'c'.*one value for each"):
            tq.kv_batch_put(["a", "b"], "train", TensorDict({"c": column}, batch_size=[2]))
    column = NonTensorData((1, 2), batch_size=[2])  # the values of the rows, or that of each?
    with pytest.raises(ConfigError, match="'c' is a tuple: give"):
        tq.kv_batch_put(["a", "b"], "train", TensorDict({"c": column}, batch_size=[2]))
    assert tq.kv_list("train") == {"train": {}}


def test_one_row_is_put_without_the_dimension_of_rows(tq: ModuleType) -> None:
    meta = tq.kv_put("a", "train", {"x": torch.tensor([1, 2]), "info": {"acc": 1.0}}, {"n": 1})
    assert (meta.keys, meta.tags, meta.fields) == (["a"], [{"n": 1}], ["info", "x"])
    found = tq.kv_batch_get("a", "train")
    assert lists(found["x"]) == [[1, 2]]
    assert found.pop("info").tolist() == [{"acc": 1.0}]
    tq.kv_put("a", "train", {"x": NonTensorData("b"), "info": objects("c", None)})
    found = tq.kv_batch_get("a", "train")
    assert (found.pop("x").tolist(), found.pop("info").tolist()) == (["b"], [["c", None]])
    with pytest.raises(ConfigError, match="'x' is a nested tensor"):
        tq.kv_put("a", "train", {"x": jagged([1], [2])})
    with pytest.raises(ConfigError, match="'x' is a TensorDict"):
        tq.kv_put("a", "train", {"x": rows(y=torch.ones(1))})


def test_numpy_inside_of_lists_and_dicts_becomes_plain(tq: ModuleType) -> None:
    info = {
        "acc": np.float64(0.5),
        "shape": (1, np.int64(2)),
        "ids": np.arange(2),
        "s": np.str_("t"),
    }
    tq.kv_batch_put(["a"], "train", rows(info=NonTensorStack(info)))
    found = tq.kv_batch_get(["a"], "train").pop("info").tolist()
    assert found == [{"acc": 0.5, "shape": [1, 2], "ids": [0, 1], "s": "t"}]


def test_other_objects_are_refused_with_column_row_and_type(tq: ModuleType) -> None:
    with pytest.raises(EncodeError, match=r"'chat', row 'b'.*threading\.Event"):
        tq.kv_batch_put(["a", "b"], "train", rows(chat=NonTensorStack({}, threading.Event())))
    assert tq.kv_list("train") == {"train": {}}
    with pytest.raises(ConfigError, match="'deep' is a TensorDict"):
        tq.kv_batch_put(["a"], "train", rows(deep=rows(x=torch.zeros(1))))


def test_other_objects_are_signed_where_there_is_a_secret(
    tq: ModuleType, restart: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRB_SECRET", "of this job")
    restart()
    value = {"pixels": torch.ones(2), "size": (1, 2)}
    tq.kv_batch_put(["a"], "train", rows(image=NonTensorStack(value)))
    [found] = tq.kv_batch_get(["a"], "train").pop("image").tolist()
    assert found["size"] == (1, 2)
    assert torch.equal(found["pixels"], value["pixels"])


def test_a_parser_changes_columns_before_they_are_stored(tq: ModuleType) -> None:
    def parse(columns: dict[str, Any]) -> None:
        assert isinstance(columns["tokens"], list)
        for part in columns["tokens"]:
            part += 1
        columns["dense"] *= 2
        columns["name"][0] = "A"
        columns["address"][:] = [f"http://{each}" for each in columns["address"]]

    fields = rows(
        dense=torch.ones(2), tokens=jagged([1], [2, 3]), name=NonTensorStack("a", "b"),
        address=np.array(["one", "two"], object),
    )  # fmt: skip
    tq.kv_batch_put(["a", "b"], "train", fields, data_parser=parse)
    found = tq.kv_batch_get(["a", "b"], "train")
    assert lists(found["tokens"]) == [[2], [3, 4]]
    assert found["dense"].tolist() == [2, 2]
    assert found.pop("name").tolist() == ["A", "b"]
    assert found.pop("address").tolist() == ["http://one", "http://two"]
    assert lists(fields["tokens"]) == [[1], [2, 3]], "what the caller has is as it was"
    assert fields["dense"].tolist() == [1, 1]
    assert list(fields["address"]) == ["one", "two"]


def test_more_rows_than_a_table_takes_at_once(
    tq: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrb.compat.transfer_queue.queue.MOST_ROWS", 2)
    keys = [f"k{number}" for number in range(5)]
    fields = rows(
        tokens=jagged([0], [1, 1], [2], [3], [4]),
        x=torch.arange(5),
        name=NonTensorStack(*keys),
    )
    tags = [{"n": number} for number in range(5)]
    assert tq.kv_batch_put(keys, "train", fields, tags).tags == tags
    found = tq.kv_batch_get(keys, "train")
    assert lists(found["tokens"]) == [[0], [1, 1], [2], [3], [4]]
    assert found["x"].tolist() == [0, 1, 2, 3, 4]
    assert found.pop("name").tolist() == keys


# Rows, columns, tags


def test_columns_and_tags_arrive_later(tq: ModuleType) -> None:
    tags = [{"status": "running", "step": 1}, {"status": "running"}]
    first = tq.kv_batch_put(["a", "b"], "train", tags=tags)
    assert (first.tags, first.fields) == (tags, [])
    tq.kv_batch_put(["a", "b"], "train", rows(x=torch.zeros(2)))
    second = tq.kv_batch_put(["a"], "train", rows(y=torch.zeros(1)), [{"status": "finished"}])
    assert (second.tags, second.fields) == ([{"status": "finished", "step": 1}], ["x", "y"])
    assert second.partition_id == "train"
    assert set(tq.kv_batch_get(["a", "b"], "train").keys()) == {"x"}  # what both have


def test_rows_without_tags_are_listed(tq: ModuleType) -> None:
    tq.kv_batch_put(["a"], "train", rows(x=torch.zeros(1)))
    assert tq.kv_list() == {"train": {"a": {}}}
    tq.kv_batch_put(["a"], "train", rows(y=torch.zeros(1)))
    tq.kv_put("a", "train", tag={"n": 1})
    tq.kv_batch_put(["a", "b"], "train", rows(y=torch.zeros(2)))
    assert tq.kv_list() == {"train": {"a": {"n": 1}, "b": {}}}


def test_columns_that_are_missing_are_left_out_and_missing_rows_an_error(tq: ModuleType) -> None:
    tq.kv_batch_put(["a", "b"], "train", rows(x=torch.zeros(2)), [{}, {}])
    found = tq.kv_batch_get(["a", "b"], "train", ["x", "values"])
    assert list(found.keys()) == ["x"]  # verl asks for columns that only some jobs have
    tq.kv_put("b", "train", {"y": torch.ones(1)})
    for names in ("values", ["values", "others"], [], ["y"]):
        nothing = tq.kv_batch_get(["a", "b"], "train", names)
        assert (list(nothing.keys()), nothing.batch_size) == ([], (0,))
    for keys, names, text in (
        (["a", "c"], None, "no row 'c'"),
        (["a", "c"], ["values"], "no row 'c'"),
        ([], None, "list of rows is empty"),
    ):
        with pytest.raises(ConfigError, match=text):
            tq.kv_batch_get(keys, "train", names)
    with pytest.raises(ConfigError, match="partition 'other' was not found"):
        tq.kv_batch_get(["a"], "other")
    tq.kv_put("tagged", "train", tag={"n": 1})
    for names in (None, "x", []):
        with pytest.raises(ConfigError, match="no column in common"):
            tq.kv_batch_get("tagged", "train", names)
        with pytest.raises(ConfigError, match="no column in common"):
            tq.kv_batch_get(["tagged", "a"], "train", names)


def test_batches_name_their_columns(tq: ModuleType) -> None:
    meta = tq.kv_batch_put(["a"], "train", rows(x=torch.zeros(1), y=torch.ones(1)), [{}])
    assert set(tq.kv_batch_get_by_meta(meta).keys()) == {"x", "y"}
    assert set(tq.kv_batch_get_by_meta(meta, "y").keys()) == {"y"}
    with pytest.raises(ConfigError, match=r"select_fields.*not found"):
        tq.kv_batch_get_by_meta(meta, ["x", "z"])
    with pytest.raises(ConfigError, match="partition_id"):
        tq.kv_batch_get_by_meta(tq.KVBatchMeta(keys=["a"], tags=[{}]))


def test_what_was_written_travels_between_processes(tq: ModuleType) -> None:
    meta = tq.kv_batch_put(["a"], "train", rows(x=torch.zeros(1)), [{"n": 1}])
    found = pickle.loads(pickle.dumps(meta))
    assert type(found) is tq.KVBatchMeta
    assert (found.keys, found.tags, found.fields) == (["a"], [{"n": 1}], ["x"])
    assert found.partition_id == "train"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "`fields` or `tags`"),
        ({"fields": {"x": 1}}, "fields is a dict"),
        ({"fields": rows(x=torch.zeros(2))}, "batch size"),
        ({"tags": [{}, {}]}, "tags"),
    ],
)
def test_wrong_puts(tq: ModuleType, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tq.kv_batch_put(["a"], "train", **arguments)


def test_a_look_at_the_tags_reads_what_has_changed(
    tq: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[TagChanges] = []
    tags = Table.tags

    def look(self: Table, since: int | None = None) -> TagChanges:
        looks.append(tags(self, since))
        return looks[-1]

    assert tq.kv_list("train") == {}
    assert tq.kv_list() == {}
    tq.kv_batch_put(["a", "b", "c"], "train", tags=[{"n": 0}, {"n": 1}, {"n": 2}])
    tq.kv_put("p", "val", tag={"n": 3})
    before = tq.kv_list()
    assert before == {
        "train": {"a": {"n": 0}, "b": {"n": 1}, "c": {"n": 2}},
        "val": {"p": {"n": 3}},
    }
    monkeypatch.setattr(Table, "tags", look)
    tq.kv_put("b", "train", tag={"m": 4})
    tq.kv_clear(["a", "nobody"], "train")
    tq.kv_clear("p", "val")
    assert tq.kv_list("train") == {"train": {"b": {"n": 1, "m": 4}, "c": {"n": 2}}}
    assert list(looks[-1].rows) == ["b"]
    assert looks[-1].gone == ("a",)
    assert tq.kv_list() == {"train": {"b": {"n": 1, "m": 4}, "c": {"n": 2}}}
    assert tq.kv_list("val") == {"val": {}}
    assert list(before["train"]) == ["a", "b", "c"], "an earlier answer has changed"
    tq.kv_clear(["b"], "nowhere")


def test_async_forms_do_the_same_beside_the_loop(tq: ModuleType) -> None:
    async def all_forms() -> list[Any]:
        meta = await tq.async_kv_batch_put(["a"], "train", rows(x=torch.zeros(1)), [{"n": 1}])
        await tq.async_kv_put("b", "train", tag={"n": 2})
        found = [
            await tq.async_kv_list("train"),
            (await tq.async_kv_batch_get_by_meta(meta))["x"].tolist(),
            (await tq.async_kv_batch_get("a", "train", "x"))["x"].tolist(),
        ]
        await tq.async_kv_clear("a", "train")
        return [*found, await tq.async_kv_list()]

    both = {"a": {"n": 1}, "b": {"n": 2}}
    expected = [{"train": both}, [0.0], [0.0], {"train": {"b": {"n": 2}}}]
    assert asyncio.run(all_forms()) == expected


# The client that verl calls


def test_ranks_add_columns_to_their_parts_of_a_batch(tq: ModuleType) -> None:
    keys = ["a", "b", "c"]
    tq.kv_batch_put(keys, "train", rows(tokens=jagged([1], [2, 2], [3])), [{}, {}, {}])
    client = tq.get_client()

    async def of_rank(part: Any) -> Any:
        data = await client.async_get_data(part)
        sums = [sum(part) for part in lists(data["tokens"])]
        return await client.async_put(data=rows(total=torch.tensor(sums)), metadata=part)

    async def step() -> tuple[Any, list[str]]:
        whole = await client.async_kv_retrieve_meta(keys=keys, partition_id="train", create=False)
        assert whole.field_names == ["tokens"]
        parts = [pickle.loads(pickle.dumps(part)) for part in whole.chunk(chunks=2)]
        assert [part.size for part in parts] == [2, 1]
        joined = tq.BatchMeta.concat([await of_rank(part) for part in parts])
        numbers = joined.global_indexes
        return joined, await client.async_kv_retrieve_keys(
            global_indexes=numbers, partition_id="train"
        )

    joined, found = asyncio.run(step())
    assert found == keys
    assert joined.field_names == ["tokens", "total"]
    assert tq.kv_batch_get(keys, "train", "total")["total"].tolist() == [1, 4, 3]
    empty = asyncio.run(client.async_get_data(tq.BatchMeta()))
    assert empty.batch_size == (0,)


def test_what_the_client_refuses(tq: ModuleType) -> None:
    tq.kv_put("a", "train", tag={})
    client = tq.get_client()
    several = tq.BatchMeta([1, 2], ["a", "b"], ["x"], keys=["k", "l"])
    for call, text in (
        (client.async_kv_retrieve_meta(["a", "b"], "train"), r"keys \['b'\] were not found"),
        (client.async_kv_retrieve_meta(["b"], "train", create=True), "kv_batch_put makes"),
        (client.async_kv_retrieve_keys([99], "train"), r"global_indexes \[99\] were not found"),
        (client.async_put(rows(x=torch.zeros(1))), "async_put needs the rows"),
        (client.async_get_data(several), "several partitions"),
        (client.async_kv_retrieve_keys([1], "nowhere"), "partition 'nowhere' was not found"),
    ):
        with pytest.raises(ConfigError, match=text):
            asyncio.run(call)
    with pytest.raises(ConfigError, match=r"no transfer_queue\.TransferQueueClient\.get_meta"):
        client.get_meta(data_fields=["x"], batch_size=1, partition_id="train")


# Runs


def test_a_new_run_begins_empty_and_refuses_writers_of_the_one_before(
    tq: ModuleType, queue: Queue, restart: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    tq.kv_batch_put(["a", "b"], "train", tags=[{}, {}])
    left_over = queue.partition("train")
    with caplog.at_level(logging.WARNING, "redrb"):
        restart()
    assert "Cleared 2 rows of an earlier run" in caplog.text
    assert tq.kv_list() == {}
    tq.kv_put("c", "train", tag={})
    for write in (
        lambda: left_over.put(["d"], {}, [{}]),
        lambda: left_over.table.clear(["c"]),
        lambda: queue.partition("new"),  # it opens this table only now
        lambda: left_over.table.mark("late"),
    ):
        with pytest.raises(StaleRun):
            write()
    assert tq.kv_list() == {"train": {"c": {}}}


def test_a_process_of_an_earlier_run_is_told_so_when_it_looks(
    tq: ModuleType, queue: Queue, restart: Callable[[], None]
) -> None:
    assert queue.join()
    assert queue.names() == []
    restart()
    with pytest.raises(StaleRun):
        queue.names()


def test_a_run_that_redis_has_lost_is_an_error(
    tq: ModuleType, client: redrb.Client, namespace: str, tmp_path: Path
) -> None:
    """Otherwise the sampler would wait for ever for rows that nobody makes again."""
    tq.kv_put("a", "train", tag={})
    for key in client.execute("KEYS", f"*{namespace}*"):
        client.execute("DEL", key)
    for call in (tq.kv_list, lambda: tq.save_checkpoint(tmp_path)):
        with pytest.raises(StoreError, match=r"gone from .* from its checkpoint"):
            call()


def test_other_processes_join_the_run(tq: ModuleType) -> None:
    tq.kv_put("a", "train", tag={"n": 1})
    for begin in (tq.init, tq.get_metrics_endpoint):  # a worker may call no init at all
        tq.close()
        begin()
        assert tq.kv_list() == {"train": {"a": {"n": 1}}}
        tq.kv_put("a", "train", tag={"n": 1})


def test_a_process_that_sees_no_run_does_not_go_on(
    tq: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tq.close()
    monkeypatch.setenv("REDRB_NAMESPACE", "elsewhere")
    with pytest.raises(ConfigError, match=r"no run has begun at .*'elsewhere'.*REDRB_NAMESPACE"):
        tq.kv_list()
    monkeypatch.setenv("REDRB_URL", "")
    with pytest.raises(ConfigError, match="no Redis URL"):
        tq.kv_list()


@pytest.mark.parametrize(
    "conf",
    [
        {"backend": {"storage_backend": "MooncakeStore"}},
        {"controller": {"sampler": "GRPOGroupNSampler"}},
    ],
)
def test_settings_without_meaning_are_refused(tq: ModuleType, conf: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"transfer_queue\..*Remove this setting"):
        tq.init(conf)
    assert tq.init({"backend": {"storage_backend": "SimpleStorage"}, "controller": None})
    assert tq.get_metrics_endpoint() is None


def test_the_name_of_the_table_of_runs_is_no_partition(tq: ModuleType) -> None:
    with pytest.raises(ConfigError, match="redrb uses this name itself"):
        tq.kv_put("a", "partitions", tag={})


# Checkpoints


def prompt(status: str) -> dict[str, Any]:
    return {"is_prompt": True, "status": status}


def test_a_checkpoint_brings_back_what_lost_steps_have_consumed(
    tq: ModuleType, restart: Callable[[], None], tmp_path: Path
) -> None:
    folder = tmp_path / "global_step_3" / "transfer_queue"
    tq.kv_batch_put(["p", "q"], "train", tags=[prompt("finished"), prompt("running")])
    tq.kv_batch_put(["p_0_0", "old_0_0"], "train", rows(x=torch.arange(2)), [{}, {}])
    tq.kv_put("v", "val", tag=prompt("finished"))
    tq.save_checkpoint(folder, metadata={"global_steps": 3})
    assert json.loads((folder / "redrb.json").read_text())["user_metadata"] == {"global_steps": 3}
    tq.kv_clear(["p", "p_0_0", "old_0_0"], "train")
    tq.kv_clear("v", "val")
    tq.kv_batch_put(["r", "r_0_0"], "train", tags=[prompt("finished"), {}])
    tq.kv_put("w", "val", tag=prompt("finished"))
    tq.kv_clear("w", "val")

    restart()
    tq.load_checkpoint(folder)
    found = tq.kv_list()
    assert set(found["train"]) == {"p", "p_0_0", "q", "r", "r_0_0"}, "old_0_0 has no prompt"
    assert set(found["val"]) == {"v"}, "rows of a later validation are of other weights"
    assert tq.kv_batch_get(["p_0_0"], "train")["x"].tolist() == [0]

    restart()
    tq.load_checkpoint(folder, later="drop")
    assert set(tq.kv_list()["train"]) == {"p", "p_0_0", "q"}


def trajectory() -> dict[str, Any]:
    return {"status": "success", "seq_len": 8, "global_steps": 1}


@pytest.mark.parametrize("others", [0, 1])
def test_trajectories_of_the_step_of_a_checkpoint_are_cleared(
    tq: ModuleType, restart: Callable[[], None], tmp_path: Path, others: int
) -> None:
    """Their prompts were cleared before it, perhaps all of them. Other rows have no prompts."""
    keys = ["p_0_0", "p_0_1", "q-1_11_0"]
    tq.kv_batch_put(keys, "train", tags=[trajectory()] * 3)
    tq.kv_batch_put(["a_b", "7_0_0"], "mine", tags=[trajectory(), {"status": "success"}])
    left = [f"r{number}" for number in range(others)]
    if left:
        tq.kv_batch_put(left, "train", tags=[prompt("running")] * others)
    tq.save_checkpoint(tmp_path)
    restart()
    tq.load_checkpoint(tmp_path)
    assert set(tq.kv_list().get("train", {})) == set(left)
    assert set(tq.kv_list()["mine"]) == {"a_b", "7_0_0"}


@pytest.mark.parametrize("chosen", [None, "keep", "drop"])
def test_a_setting_says_what_becomes_of_later_rows(
    tq: ModuleType,
    restart: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    chosen: str | None,
) -> None:
    """The data loader of verl gives the prompts of a lost step again, under other keys."""
    tq.kv_batch_put(["p", "p_0_0"], "train", tags=[prompt("running"), trajectory()])
    tq.save_checkpoint(tmp_path)
    tq.kv_put("p", "train", tag=prompt("finished"))
    later = ["q", "q_0_0", "q_1_0", "r"]
    tq.kv_batch_put(later, "train", tags=[prompt("finished"), {}, {}, prompt("running")])
    tq.kv_put("s", "train", tag=prompt("finished"))
    tq.kv_clear(["s", "q_0_0"], "train")
    restart()
    if chosen is not None:
        monkeypatch.setenv("REDRB_TRANSFER_QUEUE_LATER", chosen)
    tq.load_checkpoint(tmp_path)
    kept = {"p", "p_0_0"} | (set() if chosen == "drop" else {*later, "s"})
    assert set(tq.kv_list()["train"]) == kept
    said = "put after the checkpoint stays (prompts: 3, trajectories: 2)"
    assert (said in caplog.text) == (chosen != "drop")
    generated = "running" if chosen == "drop" else "finished"
    assert tq.kv_list()["train"]["p"] == prompt(generated)
    restart()
    tq.load_checkpoint(tmp_path, later="drop")
    assert set(tq.kv_list()["train"]) == {"p", "p_0_0"}
    monkeypatch.setenv("REDRB_TRANSFER_QUEUE_LATER", "both")
    with pytest.raises(ConfigError, match=r"REDRB_TRANSFER_QUEUE_LATER='both': use"):
        tq.load_checkpoint(tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_whose_rows_are_dropped_is_generated_again(
    tq: ModuleType, restart: Callable[[], None], tmp_path: Path, seed: int
) -> None:
    """After `drop` a prompt is as it was: in flight, or with all trajectories of its end."""
    dice, at, steps = random.Random(seed), -1, []
    for number in range(dice.choice([1, 2, 60])):
        steps += [(number, "begun"), (number, "half"), (number, "rest"), (number, "ended")]
        steps += [(number, "trained")] if dice.random() < 0.4 else []
    of = dice.sample(steps, len(steps))
    todo = {number: [each for each in steps if each[0] == number] for number, _ in steps}
    at = dice.randrange(len(of))
    before: dict[str, Any] = {}
    for place, (number, _) in enumerate(of):
        if place == at:
            tq.save_checkpoint(tmp_path)
            before = tq.kv_list().get("train", {})
        key, parts = f"p{number}", [f"p{number}_{session}_0" for session in range(4)]
        match todo[number].pop(0)[1]:
            case "begun":
                tq.kv_put(key, "train", tag=prompt(dice.choice(["pending", "running"])))
            case "half":
                tq.kv_batch_put(parts[:2], "train", tags=[trajectory()] * 2)
            case "rest":
                tq.kv_batch_put(parts[2:], "train", tags=[trajectory()] * 2)
            case "ended":
                tq.kv_put(key, "train", tag=prompt(dice.choice(["finished", "failure"])))
            case "trained":
                tq.kv_clear([key, *parts], "train")
    for _ in range(2):
        restart()
        tq.load_checkpoint(tmp_path, later="drop")
        found = tq.kv_list().get("train", {})
        for key, tags in before.items():
            if tags.get("is_prompt"):
                in_flight = tags["status"] in ("pending", "running")
                assert (found[key]["status"] in ("pending", "running")) == in_flight
        assert set(found) == set(before)


def test_partitions_that_are_younger_than_the_checkpoint(
    tq: ModuleType, restart: Callable[[], None], tmp_path: Path
) -> None:
    tq.kv_put("a", "old", tag={})
    tq.save_checkpoint(tmp_path / "1")
    tq.kv_batch_put(["b", "c"], "train", tags=[{}, {}])
    tq.kv_clear("b", "train")
    restart()
    tq.kv_put("d", "early", tag={})  # by a worker, before the driver has loaded
    restart()
    tq.load_checkpoint(tmp_path / "1")
    both = {"b": {}, "c": {}}
    assert tq.kv_list() == {"old": {"a": {}}, "train": both, "early": {"d": {}}}
    restart()
    tq.load_checkpoint(tmp_path / "1", later="drop")
    assert tq.kv_list() == {"old": {"a": {}}}


def test_a_checkpoint_outlives_those_that_verl_did_not_complete(
    tq: ModuleType, restart: Callable[[], None], tmp_path: Path
) -> None:
    """After the queue's checkpoint verl notes the newest one; crashes in between can be several."""
    tq.kv_put("a", "train", tag={})
    tq.save_checkpoint(tmp_path / "1")
    for number in range(2, 5):
        tq.kv_clear("a", "train")
        tq.kv_put(f"row{number}", f"partition{number}", tag={})
        tq.save_checkpoint(tmp_path / str(number))
        restart()
        tq.load_checkpoint(tmp_path / "1")
    made = {f"partition{number}": {f"row{number}": {}} for number in range(2, 5)}
    assert tq.kv_list() == {"train": {"a": {}}} | made


def test_a_partition_of_a_run_without_checkpoints_does_not_come_back(
    tq: ModuleType, restart: Callable[[], None], tmp_path: Path
) -> None:
    tq.kv_put("a", "old", tag={})
    restart()
    tq.save_checkpoint(tmp_path / "1")
    content = json.loads((tmp_path / "1" / "redrb.json").read_text())
    (tmp_path / "1" / "redrb.json").write_text(json.dumps(content | {"partitions": []}))
    restart()
    tq.load_checkpoint(tmp_path / "1")
    assert tq.kv_list() == {}


def test_a_run_without_checkpoints_keeps_no_cleared_rows(tq: ModuleType, queue: Queue) -> None:
    tq.kv_put("a", "train", {"x": torch.zeros(9)}, {})
    tq.kv_clear("a", "train")
    counts = queue.partition("train").table.stats().counts
    assert (counts.rows, counts.retained, counts.retained_bytes) == (0, 0, 0)


def test_checkpoints_that_cannot_be_loaded(tq: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint of redrb"):
        tq.load_checkpoint(tmp_path / "none")
    (tmp_path / "controller_state.pkl").touch()
    with pytest.raises(ConfigError, match="written by TransferQueue"):
        tq.load_checkpoint(tmp_path)
    tq.kv_put("a", "train", tag={})
    for number in range(3):
        tq.save_checkpoint(tmp_path / str(number))
    tq.kv_clear("a", "train")
    with pytest.raises(ConfigError, match="no longer has this checkpoint"):
        tq.load_checkpoint(tmp_path / "0")
    assert tq.kv_list() == {}
    tq.load_checkpoint(tmp_path / "1")
    assert tq.kv_list() == {"train": {"a": {}}}


# Durability


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--appendonly", "no", "--save", ""), "NOTHING"),
        (("--appendonly", "no", "--save", "3600 1"), "snapshots only"),
        (("--appendonly", "yes", "--appendfsync", "everysec"), "last second"),
        (("--appendonly", "yes", "--appendfsync", "always"), "survives a power failure"),
        (("--appendonly", "yes", "--appendfsync", "no"), "when the system does"),
    ],
)
def test_init_says_what_a_crash_loses(
    own_server: Callable[..., Any], arguments: tuple[str, ...], text: str
) -> None:
    with redrb.connect(own_server(*arguments).url) as client:
        assert text in durability(client)
