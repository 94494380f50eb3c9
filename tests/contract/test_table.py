"""Rows of a table: puts appear whole, looks show changes, limits block, values are deleted."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

import redrb
from redrb.connection import Client
from redrb.errors import (
    ConfigError,
    DecodeError,
    EncodeError,
    MissingRows,
    RecordError,
    RedrbError,
    StaleRun,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnknownTask,
)
from redrb.lua.pages import PAGES
from tests.conftest import LOOK_AGAIN_S
from tests.contract.test_damage import damage
from tests.table_audit import keys_of, values_of

TableOpener = Callable[..., redrb.Table]
WAIT_S = 10.0


def names(count: int, first: int = 0) -> list[str]:
    return [f"row{number}" for number in range(first, first + count)]


def ones(count: int, value: int = 1) -> dict[str, torch.Tensor]:
    return {"x": torch.full((count, 2), value)}


def test_columns_come_at_different_times(open_table):
    table, other = open_table(secret="s"), open_table()
    table.put(["b", "a"], {"x": [torch.arange(2), torch.arange(3)]}, [{"s": 1}, {"s": 2, "t": "u"}])
    other.put(["a"], {"y": torch.ones(1, 4, dtype=torch.bfloat16), "z": ["text"]}, [{"s": 3}])
    found = other.get(["a", "b"], ["x"])
    assert found.row_keys == ("a", "b")
    assert [each.tolist() for each in found["x"]] == [[0, 1, 2], [0, 1]]
    assert set(table.get(["a"])) == {"x", "y", "z"}
    assert set(table.get(["a", "b"])) == {"x"}
    assert table.batch(["a", "b"])["x"].tolist() == [[0, 1, 2], [0, 0, 1]]
    assert table.tags().rows == {"a": {"s": 3, "t": "u"}, "b": {"s": 1}}
    other.put(["a"], {"x": [torch.zeros(1)]})
    assert table.get(["a"])["x"][0].tolist() == [0.0]
    assert table.columns(["b", "no"]) == [{"x": 7 + 16}, None]
    assert table.numbers(["a", "b", "no"]) == [2, 1, None]
    assert table.keys_of([2, 1, 9]) == ["a", "b", None]
    assert table.produced(["x", "y"]) == 1
    table.put(["a"], {"o": [(1, 2)]})
    with pytest.raises(DecodeError, match="'o'"):
        other.get(["a"])["o"]
    for keys, columns, missing in [
        (["a", "no"], None, (("no",), ())),
        (["a", "b"], ["x", "y"], (("b",), ("y",))),
    ]:
        with pytest.raises(MissingRows, match="table") as error:
            table.get(keys, columns)
        assert (error.value.keys, error.value.columns) == missing


def test_arguments_that_cannot_be_stored_change_nothing(open_table):
    table = open_table()
    table.put(["a"], ones(1), [{}])
    before = table.stats().counts
    for keys in ("ab", {"a": 1}, ["a", "a"], ["\ud800"], [""], ["x" * 513], [1], ["é" * 300]):
        for call in (table.put, table.get, table.clear, table.columns):
            with pytest.raises(ConfigError):
                call(keys)
    for columns, tags in [
        ({"x": [object()]}, None),
        ({"y": ones(2)["x"]}, None),
        (None, [{1: 2}]),
        (None, ["s"]),
        (None, [{}, {}]),
        (ones(1), [{"a": {1: 2}}]),
    ]:
        with pytest.raises(EncodeError):
            table.put(["b"], columns, tags)
    with pytest.raises(ConfigError):
        table.put(["b"], {"a:b": [1]})
    with pytest.raises(ConfigError, match="2049"):
        table.put(names(2049))
    with pytest.raises(ConfigError, match="65536"):
        table.put(names(65), dict.fromkeys(map("c{}".format, range(1009)), [0] * 65))
    for bad in ([5], ["a b"], [None]):
        with pytest.raises(ConfigError, match="column"):
            table.register("actor", bad)
    assert table.stats().counts == before
    assert dict(table.get([], ["x"])) == {"x": []}


@pytest.mark.parametrize(
    ("method", "arguments", "options", "text"),
    [
        ("put", (["a"], ["x"]), {}, "give a mapping"),
        ("put", (["a"], "x"), {}, "give a mapping"),
        ("put", (["a"], 5), {}, "give a mapping"),
        ("put", (["a"], None, 5), {}, "tags=5: give a list"),
        ("put", (["a"], None, ({} for _ in "a")), {}, "tags=.* give a list"),
        ("get", (["a"], 5), {}, "columns=5"),
        ("get", (["a"], "x"), {}, "columns='x'"),
        ("get", (["a"], [["x"]]), {}, "column"),
        ("batch", (["a"], 5), {}, "columns=5"),
        ("produced", (None,), {}, "columns=None"),
        ("produced", ("abc",), {}, "columns='abc'"),
        ("register", ("actor", "abc"), {}, "columns='abc'"),
        ("register", ([], ["x"]), {}, "task"),
        ("claim", ("actor", 5), {"timeout": 0}, "columns=5"),
        ("claim", (5, ["x"]), {"timeout": 0}, "task 5"),
        ("claim", ("actor", ["x"], 1), {"at_least": 3, "timeout": 0}, r"claim\(1, at_least=3\)"),
        ("unregister", (None,), {}, "task None"),
        ("consumed", ([],), {}, "task"),
        ("mark", (None,), {}, "mark None"),
        ("restore", (None,), {}, "mark None"),
    ],
)
def test_arguments_of_other_types_say_what_to_give(open_table, method, arguments, options, text):
    table = open_table()
    table.put(["a"], ones(1))
    before = table.tags()
    with pytest.raises(ConfigError, match=text):
        getattr(table, method)(*arguments, **options)
    assert table.tags() == before
    assert "5" not in table.stats().tasks


def test_a_secret_of_another_type_is_refused_and_not_shown(client, namespace):
    with pytest.raises(ConfigError, match="secret is of type int") as error:
        redrb.Table(client, "train", namespace=namespace, secret=12345)  # type: ignore[arg-type]
    assert "12345" not in str(error.value)
    with pytest.raises(ConfigError, match="secret is empty"):
        redrb.Table(client, "train", namespace=namespace, secret="")
    with pytest.raises(UnknownTask):
        redrb.Table(client, "train", namespace=namespace, create=False)


def test_a_batch_has_no_other_side(open_table):
    table = open_table()
    table.put(["a"], ones(1))
    with pytest.raises(RecordError, match="'up'"):
        table.batch(["a"], side="up")


def test_keys_and_names_may_be_texts_of_numpy(client, namespace):
    name, key, column, task = np.array(["train", "a", "x", "actor"])
    table = redrb.Table(client, name, namespace=np.str_(namespace), retain="checkpoint")
    table.put([key, "é"], {column: [1, 2]}, [{column: key}] * 2)
    assert table.get([key], [column]) == {"x": [1]}
    assert table.tags().rows["a"] == {"x": "a"}
    assert table.columns([key]) == [{"x": 2}]
    assert table.produced([column]) == 2
    table.mark(column)
    table.register(task, [column])
    with table.claim(task, [column], timeout=0) as claim:
        assert claim.keys == ("a",)
    assert table.consumed(task) == 1
    assert table.clear([key]) == 1
    assert table.restore(column).back == 1
    table.unregister(task)
    for text in (table.name, table.namespace, *table.get([key, "é"]).row_keys):
        assert type(text) is str


def test_settings(open_table, client, namespace):
    with pytest.raises(UnknownTask):
        open_table(create=False)
    table = open_table(limit=2, retain="checkpoint")
    open_table(limit=2)
    with pytest.raises(ConfigError, match="limit is 2, not 3"):
        open_table(limit=3)
    open_table(create=False).configure(limit=3, max_bytes=1000)
    open_table(limit=3, max_bytes=1000)
    table.put(names(3), ones(3))
    with pytest.raises(ConfigError, match="limit"):
        table.put(names(4, 3))
    assert open_table().delete() == 3
    with pytest.raises(ConfigError):
        table.stats()
    table.put(["a"])  # whoever comes first creates it anew
    assert table.tags().rows == {"a": {}}
    assert table.stats().counts.made == 1


@pytest.mark.long
def test_half_a_put_is_never_seen(open_table):
    count = PAGES["table_rows"] + 500
    keys, ended = names(count), threading.Event()
    writer, reader = open_table(), open_table()

    def write(value: int) -> None:
        writer.put(keys, {"x": [value] * count}, [{"v": value}] * count)

    def write_on() -> None:
        for value in range(1, 13):
            write(value)
        ended.set()

    write(0)
    seen = set()
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write_on)
        while not ended.is_set() and not writing.done():
            values = set(reader.get(keys)["x"])
            rows = reader.tags().rows
            assert len(values) == 1
            assert len(rows) == count
            assert len({row["v"] for row in rows.values()}) == 1
            seen |= values
        writing.result()
    assert len(seen) > 1


@pytest.mark.parametrize("count", [1, 1000, 1001, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_look_shows_what_changed(open_table, count):
    table = open_table()
    for first in range(0, count, 2048):
        some = names(count)[first : first + 2048]
        table.put(some, tags=[{"n": 1}] * len(some))
    look = table.tags()
    assert look.whole
    assert look.rows.keys() == set(names(count))
    empty = table.tags(look.change)
    assert (empty.rows, empty.gone, empty.whole, empty.change) == ({}, (), False, look.change)
    table.put(["row0", "new"], tags=[{"n": 2}, {}])
    table.put(["gone", "back"])
    table.clear(["gone", "back"])
    table.put(["back"])
    changed = table.tags(look.change)
    assert changed.rows == {"row0": {"n": 2}, "new": {}, "back": {}}
    assert set(changed.gone) == {"gone"}
    assert not changed.whole
    cleared = table.clear()
    assert cleared == count + 2
    after = table.tags(changed.change)
    assert (after.whole, after.rows) == (cleared > PAGES["gone_kept"], {})
    assert after.whole or len(after.gone) == cleared


def test_a_look_in_pages_misses_no_row_that_changes_meanwhile(open_table, pages, monkeypatch):
    pages(table_rows=3)
    table = open_table()
    table.put(names(9), tags=[{"n": 0}] * 9)
    before = table.tags()
    looks = [
        lambda: table.put(["row5", "row0"], tags=[{"n": 1}] * 2),
        lambda: table.clear(["row1", "row7"]),
        lambda: table.put(["row7", "new"], tags=[{"n": 2}] * 2),
    ]
    run = redrb.table.calls.Tags.run_with_bytes

    def meanwhile(*arguments):
        if looks:
            looks.pop(0)()
        return run(*arguments)

    monkeypatch.setattr(redrb.table.calls.Tags, "run_with_bytes", meanwhile)
    rows = table.tags().rows
    assert rows == {
        **{f"row{number}": {"n": 0} for number in (2, 3, 4, 6, 8)},
        "row0": {"n": 1},
        "row5": {"n": 1},
        "row7": {"n": 2},
        "new": {"n": 2},
    }
    looks += [lambda: table.put(names(9)), lambda: table.clear(["row2", "new"])]
    changed = table.tags(before.change)
    assert set(changed.gone) == {"row2", "new"}
    assert rows.keys() - {"row2", "new"} | {"row1"} == changed.rows.keys()


def test_a_look_from_before_all_was_lost_is_whole(open_table, client, namespace):
    table = open_table()
    for value in range(5):
        table.put(["a", "old"], tags=[{"v": value}] * 2)
    look = table.tags()
    for key in client.execute("KEYS", f"redrb:{{{namespace}:*"):
        client.execute("UNLINK", key)
    assert table.watch(look.change, timeout=5) != look.change
    for value in range(9):
        table.put(["a", f"new{value}"], tags=[{"v": value}] * 2)
    after = table.tags(look.change)
    assert after.whole
    assert "old" not in after.rows
    assert after.rows.keys() >= {"a", "new0"}


def test_what_was_removed_long_ago_makes_a_look_whole(open_table, pages):
    pages(gone_kept=3)
    table = open_table()
    table.put(names(10))
    look = table.tags()
    table.clear(names(3))
    assert set(table.tags(look.change).gone) == set(names(3))
    table.clear(names(1, 3))
    assert table.tags(look.change).whole


@pytest.mark.usefixtures("only_wakes")
def test_a_watch_is_woken_and_ends(open_table):
    table, other = open_table(), open_table()
    since = table.put(["a"])
    assert table.watch(since, timeout=0.05) == since
    for change in (lambda: other.put(["a"], tags=[{"s": 1}]), lambda: other.clear(["a"])):
        with ThreadPoolExecutor() as pool:
            began = time.monotonic()
            watching = pool.submit(table.watch, since, LOOK_AGAIN_S * 2)
            wait_for_queue(table, "#watch")
            change()
            newest = watching.result(LOOK_AGAIN_S)
            assert time.monotonic() - began < LOOK_AGAIN_S * 0.8
        assert newest > since
        since = newest
    assert table.watch(0, timeout=0) == since


def wait_for_queue(table: redrb.Table, queue: str, count: int = 1) -> None:
    deadline = time.monotonic() + WAIT_S
    client, key = table._index.client, f"{table._index.keys.prefix}queue:{queue}"
    while client.execute("ZCARD", key) < count:
        assert time.monotonic() < deadline, f"nobody waits in {queue}"


@pytest.mark.usefixtures("only_wakes")
@pytest.mark.parametrize("limits", [{"limit": 4}, {"max_bytes": 4 * (7 + 16)}])
def test_puts_wait_for_room_in_their_order(open_table, limits):
    table = open_table(**limits)
    table.put(names(4), ones(4))
    done: list[int] = []

    def put(number: int) -> None:
        table.put(names(2, 10 * number), ones(2), timeout=LOOK_AGAIN_S * 2)
        done.append(number)

    with ThreadPoolExecutor() as pool:
        waiting = []
        for number in (1, 2):
            waiting.append(pool.submit(put, number))
            wait_for_queue(table, "#room", number)
        table.put(names(1), {"y": [1]})  # others may wait for these columns
        table.put(names(1), tags=[{"s": 1}])
        for number in (1, 2):
            assert table.clear(names(2, 2 * number - 2)) == 2
            wait(waiting, LOOK_AGAIN_S * 0.8, FIRST_COMPLETED if number == 1 else ALL_COMPLETED)
            assert len(done) == number
    if "limit" in limits:
        assert done == [1, 2]
    assert table.stats().counts.rows == 4


@pytest.mark.parametrize("limits", [{"limit": 2}, {"max_bytes": 2 * (7 + 16)}])
def test_a_refused_put_leaves_nothing(open_table, client, namespace, limits):
    table = open_table(**limits)
    table.put(names(2), ones(2), [{"s": 1}] * 2)
    before, look = keys_of(client, table), table.tags()
    for count, wanted in [(1, StoreFull), (3, ConfigError)]:
        with pytest.raises(wanted):
            table.put([*names(count, 5)], ones(count), [{}] * count, timeout=0.05)
        stored, named = values_of(client, table)
        assert stored == named
        assert keys_of(client, table) == before
        assert table.tags(look.change).rows == {}
    table.configure(limit=0, max_bytes=0)
    table.put(names(3, 5), ones(3))


def test_put_waits_until_a_limit_is_raised(open_table):
    table = open_table(limit=1)
    table.put(["a"])
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(table.put, ["b"], timeout=WAIT_S)
        wait_for_queue(table, "#room")
        open_table().configure(limit=2)
        waiting.result(WAIT_S)


@pytest.mark.long
@pytest.mark.parametrize("retain", [None, "checkpoint"])
def test_clear(open_table, client, retain):
    table = open_table(retain=retain)
    table.put(["early"], ones(1))
    assert table.clear() == 1  # no mark will ever need it
    assert values_of(client, table) == (set(), set())
    table.mark("m")
    table.put(names(5), ones(5))
    assert table.clear(["row1", "no", "row3"]) == 2
    assert table.clear(["row1", "no"]) == 0
    assert table.clear([]) == 0
    assert table.tags().rows.keys() == {"row0", "row2", "row4"}
    with pytest.raises(MissingRows, match="row1"):
        table.get(["row1"])
    table.put(["row1"], ones(1, 7))
    assert table.get(["row1"])["x"][0].tolist() == [7, 7]
    assert table.numbers(["row1"]) == [7]
    for first in range(0, 10_000, 2000):
        table.put(names(2000, first + 10), {"y": [first] * 2000})
    assert table.clear() == 10_004
    assert table.clear() == 0
    counts = table.stats().counts
    assert (counts.rows, counts.bytes, counts.cleared) == (0, 0, 10_007)
    stored, named = values_of(client, table)
    assert stored == named
    assert bool(stored) is bool(retain)


def test_replaced_columns_leave_no_values(open_table, client):
    table = open_table()
    for value in range(4):
        table.put(["a", "b"], ones(2, value))
        table.put(["a"], {"x": [value], "y": [value]})
    assert table.get(["a"])["y"] == [3]
    assert table.get(["b"])["x"][0].tolist() == [3, 3]
    stored, named = values_of(client, table)
    assert stored == named
    assert len(stored) == 2
    for value in range(3):  # more than one call deletes
        table.put(names(2048), {"x": [value] * 2048})
    assert table.stats().counts.trash == 0


@pytest.mark.parametrize("retain", [None, "checkpoint"])
@pytest.mark.parametrize("seed", range(5))
def test_a_row_has_the_columns_of_all_its_puts(open_table, seed, retain):
    """New columns are added to a record as it is; those that are there are looked for in it."""
    table, rng = open_table(retain=retain), random.Random(seed)
    known: dict[str, dict[str, int]] = {}
    every = [f"c{number}" for number in range(rng.choice([3, 7, 40]))]
    table.register("some", every[:2])
    table.mark("m")
    for value in range(60):
        keys = rng.sample(names(6), rng.randint(1, 6))
        columns = rng.sample(every, rng.choice([0, 1, 1, 1, 2, len(every)]))
        table.put(keys, {name: [value] * len(keys) for name in columns}, [{"s": value}] * len(keys))
        for key in keys:
            known.setdefault(key, {}).update(dict.fromkeys(columns, value))
        if value % 20 == 10:
            table.clear(keys[:1])
            known.pop(keys[0])
    for key, columns in known.items():
        assert {name: values[0] for name, values in table.get([key]).items()} == columns
    complete = [key for key, columns in known.items() if set(every[:2]) <= columns.keys()]
    assert table.produced(every[:2]) == len(complete)
    if complete:
        assert set(table.claim("some", count=len(complete), timeout=0).keys) == set(complete)
    if retain:
        table.restore("m", "drop")
        assert table.tags().rows == {}


@pytest.mark.long
def test_the_time_of_a_put_hardly_grows_with_the_puts_before_it(real_url, namespace):
    """In microseconds of the script: records of 150 puts were unpacked, and packed anew.

    The two tables take turns, so that a busy machine slows both down.
    """
    keys = names(300)
    with redrb.connect(real_url) as client:
        new, old = (redrb.Table(client, name, namespace=namespace) for name in ("new", "old"))

        def spent_us(table: redrb.Table, **put: Any) -> int:
            client.execute("CONFIG", "RESETSTAT")
            table.put(keys, **put)
            info = client.execute("INFO", "commandstats").decode()
            return int(info.partition("cmdstat_evalsha:")[2].partition("usec=")[2].split(",")[0])

        def columns(first: int, count: int) -> list[dict[str, Any]]:
            return [{"columns": {f"c{n}": [1] * len(keys)}} for n in range(first, first + count)]

        for put in columns(0, 150):
            old.put(keys, **put)
        new.put(keys)
        tags = [{"tags": [{"s": 1}] * len(keys)}] * 9
        for puts, most in ((tags, 3), (columns(150, 9), 10)):  # the bytes of 150 puts are copied
            spent = [(spent_us(new, **put), spent_us(old, **put)) for put in puts]
            least_new, least_old = map(min, zip(*spent, strict=True))
            assert least_old < most * least_new, spent
        new.delete()
        old.delete()


def test_a_get_names_columns_once_and_rows_in_pages(open_table, monkeypatch):
    table = open_table()
    table.put(names(9), {"x": torch.arange(9), "y": torch.arange(9) + 10})
    table.put(names(4, 5), {"y": torch.arange(4)})  # these have two strings
    assert {k: [e.item() for e in v] for k, v in table.get(["row6"], ["y", "x", "y"]).items()} == {
        "y": [1],
        "x": [6],
    }
    assert dict(table.get(["row1"], [])) == dict(table.get([])) == {}
    assert table.get([], ["x"])["x"] == []
    monkeypatch.setattr("redrb.table.index.MOST_ROWS", 3)
    for count in (1, 2, 3, 4, 9):
        found = table.get(names(count), ["y", "x"])
        assert found.stacked("x").tolist() == list(range(count))
        assert found.stacked("y").tolist() == [10, 11, 12, 13, 14, 0, 1, 2, 3][:count]


def test_a_row_that_is_cleared_while_it_is_looked_for_is_missing(open_table, monkeypatch):
    table = open_table()
    table.put(["a", "b"], ones(2))
    execute = Client.execute

    def meanwhile(client, *words, **options):
        if words[0] == "HMGET":
            monkeypatch.setattr(Client, "execute", execute)
            table.clear(["b"])
        return execute(client, *words, **options)

    monkeypatch.setattr(Client, "execute", meanwhile)
    with pytest.raises(MissingRows, match="'b'"):
        table.get(["a", "b"])
    assert table.get(["a"])["x"][0].tolist() == [1, 1]


def test_a_record_with_impossible_numbers_is_an_error_of_redrb(open_table, client):
    table = open_table()
    table.put(["a"], ones(1))
    keys = table._index.keys
    [record] = client.execute("HVALS", keys.rows)
    change, segment = msgpack.unpackb(record)
    for length in (-1, 1 << 60, "x", None, 1.5):
        changed = [change, [*segment[:-1], length]]
        client.execute("HSET", keys.rows, 1, msgpack.packb(changed))
        with pytest.raises(StoreError, match="cannot be read"):
            table.get(["a"])
    client.execute("HSET", keys.rows, 1, record)


def test_a_run_refuses_those_before_it(open_table, client, namespace):
    before = open_table(retain="checkpoint")
    before.put(["a"], ones(1))
    before.mark("m")
    before.register("actor", ["x"])
    driver = open_table()
    number = driver.begin_run()
    assert driver.run == number
    worker = open_table()
    calls = [
        lambda table: table.put(["b"], ones(1)),
        lambda table: table.put(["a"], tags=[{"s": 1}]),
        lambda table: table.clear(["a"]),
        lambda table: table.clear(),
        lambda table: table.mark("n"),
        lambda table: table.restore("m"),
        lambda table: table.register("other", ["x"]),
        lambda table: table.claim("actor", ["x"], timeout=0),
        lambda table: table.unregister("actor"),
        lambda table: table.configure(limit=1),
        lambda table: table.delete(),
    ]

    def refused(table: redrb.Table) -> None:
        for call in calls:
            with pytest.raises(StaleRun):
                call(table)
        assert driver.tags().rows == {"a": {}}
        stored, named = values_of(client, driver)
        assert stored == named

    refused(before)
    worker.put(["a"], ones(1, 2))
    second = open_table()
    assert second.begin_run() > number
    for each in (before, driver, worker):
        refused(each)
    for key in client.execute("KEYS", f"redrb:{{{namespace}:*"):  # Redis loses all data
        client.execute("UNLINK", key)
    third = open_table(retain="checkpoint")
    assert third.begin_run() > second.run
    third.put(["a"], ones(1))
    third.mark("m")
    third.register("actor", ["x"])
    for each in (before, worker, second):
        refused(each)


def test_what_an_earlier_run_has_claimed_waits_for_the_newest(open_table):
    before = open_table()
    before.put(names(3), ones(3))
    claims = [before.claim("actor", ["x"], timeout=0) for _ in range(2)]
    driver = open_table()
    driver.begin_run()
    with pytest.raises(StaleRun):
        claims[0].ack()
    with pytest.raises(StaleRun), claims[1]:
        pass
    with driver.claim("actor", ["x"], 3, timeout=5) as claim:
        assert sorted(claim.keys) == names(3)
    assert driver.consumed("actor") == 3


@pytest.mark.parametrize("error", [StoreUnavailable("away", where="here"), KeyboardInterrupt()])
def test_a_claim_that_fails_before_it_is_handed_over_keeps_no_rows(open_table, monkeypatch, error):
    table, other = open_table(), open_table()
    table.put(names(2), ones(2))
    table.register("actor", ["x"])

    def failing() -> None:
        raise error

    with monkeypatch.context() as patched, pytest.raises(type(error)) as kept:
        patched.setattr(table._index, "refuse_stale", failing)
        table.claim("actor", count=2, timeout=0)
    with other.claim("actor", ["x"], 2, timeout=WAIT_S) as claim:  # while the error is kept
        assert sorted(claim.keys) == names(2), kept
    assert table.consumed("actor") == 2


def test_a_claim_that_waits_when_a_run_begins_has_nothing(open_table):
    before, driver = open_table(), open_table()
    before.register("actor", ["x"])
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(before.claim, "actor", timeout=20)
        while before.stats().tasks["actor"].consumers_waiting == 0:
            time.sleep(0.01)
        driver.begin_run()
        driver.put(names(1), ones(1))
        with pytest.raises(StaleRun):
            waiting.result(20)
    assert driver.claim("actor", ["x"], timeout=5).keys == ("row0",)


def test_a_watcher_of_a_table_that_was_deleted_sees_the_next_one(open_table):
    watcher, table = open_table(limit=100), open_table()
    since = table.put(["a"], ones(1))
    table.delete()
    anew = watcher.watch(since, timeout=10)  # with the settings of here
    assert anew > since
    assert watcher.watch(anew, timeout=0.05) == anew
    with ThreadPoolExecutor() as pool:
        seen = pool.submit(watcher.watch, anew, timeout=20)
        assert open_table(limit=100).put(["b"], ones(1)) == seen.result(20)


def test_a_watcher_that_must_not_create_a_table_says_that_it_is_gone(open_table):
    table = open_table()
    watcher = open_table(create=False)
    since = table.put(["a"], ones(1))
    table.delete()
    with pytest.raises(UnknownTask):
        watcher.watch(since, timeout=1)
    assert open_table(limit=7).tags().rows == {}


def test_a_run_begins_after_redis_has_lost_the_table(open_table, client, namespace):
    table = open_table(retain="checkpoint")
    table.put(["a"], ones(1))
    for key in client.execute("KEYS", f"redrb:{{{namespace}:*"):
        client.execute("UNLINK", key)
    assert table.begin_run() == table.run > 0
    table.put(["b"], ones(1))
    assert open_table(retain="checkpoint").tags().rows == {"b": {}}


def test_two_drivers_that_begin_at_once_are_two_runs(open_table, monkeypatch):
    first, second = open_table(), open_table()
    opened = first._index.open

    def late() -> None:
        second.begin_run()
        opened()

    monkeypatch.setattr(first._index, "open", late)
    first.begin_run()
    with pytest.raises(StaleRun):
        first.put(["a"])
    second.put(["a"])


@pytest.mark.parametrize("seed", range(30))
def test_damage_ends_in_errors_of_redrb(real_url, namespace, seed):
    """On real servers: fakeredis itself fails with errors of its own on some of it."""
    with redrb.connect(real_url) as client:
        damage_a_table(client, namespace, random.Random(seed))


def damage_a_table(client: Client, namespace: str, rng: random.Random) -> None:
    table = redrb.Table(client, "train", namespace=namespace, retain="checkpoint", secret="s")
    table.put(names(6), {"x": torch.ones(6, 2), "o": [(1,)] * 6}, [{"s": 1}] * 6)
    table.put(names(2), {"x": [5, {"a": 1}]})
    table.claim("train", ["x"], 2, timeout=1).ack()
    table.claim("train", count=1, timeout=1)
    table.register("pairs", ["x"], 2)
    table.mark("m")
    table.clear(["row0", "row5"])
    prefix = table._index.keys.prefix.removesuffix("}:")
    for _ in range(3):
        key = rng.choice(sorted(client.execute("KEYS", f"{prefix}*")))
        if client.execute("TYPE", key) == b"string":
            client.execute("SETRANGE", key, rng.randrange(6), bytes([rng.randrange(256)]))
        else:
            damage(rng, client, key)
    look = table.tags
    for call in [
        lambda: table.get(names(4, 1), ["x"])["x"],
        lambda: table.get(names(4, 1)).batch(),
        lambda: table.get(["row2"], ["o"])["o"] == [(1,)] or 1 / 0,
        lambda: [look(since) for since in (None, 0, look().change - 3)],
        lambda: table.put(names(3), {"x": [1] * 3}, [{"s": 2}] * 3, timeout=0),
        lambda: table.put(["new"], {"z": [1]}, timeout=0),
        lambda: table.claim("train", count=1, timeout=0).get(),
        lambda: table.claim("pairs", count=2, timeout=0).ack(),
        lambda: [table.columns(names(6)), table.numbers(names(6)), table.keys_of([1, 2, 3])],
        lambda: [table.stats(), table.marks(), table.produced(["x"]), table.consumed("train")],
        lambda: redrb.Table(client, "train", namespace=namespace, create=False),
        lambda: table.register("late", ["x"]),
        lambda: table.clear(["row1"]),
        lambda: [table.mark("n"), table.restore("m", "keep"), table.restore("m", "drop")],
        table.clear,
        table.delete,
    ]:
        try:
            call()
        except RedrbError:
            continue


def test_a_damaged_incarnation_hangs_nobody(client, namespace):
    table = redrb.Table(client, "train", namespace=namespace)
    client.execute("HSET", table._index.keys.task, "incarnation", b"\xff")
    for call in (table.put, table.clear, lambda _: table.register("a", ["x"]), table.mark):
        with pytest.raises(RedrbError):
            call("m" if call == table.mark else ["a"])
    with pytest.raises(RedrbError):
        table.restore("m")
    client.execute("HDEL", table._index.keys.task, "incarnation")
    for repeated in (lambda: table.register("a", ["x"]), lambda: table.restore("m")):
        with pytest.raises(StoreError):
            repeated()


def test_values_that_are_gone_are_an_error(open_table, client):
    table = open_table()
    table.put(["a"], ones(1))
    stored, _ = values_of(client, table)
    client.execute("UNLINK", *stored)
    with pytest.raises(StoreError, match="gone"):
        table.get(["a"])
    table.clear()
