"""Marks: what was consumed after a mark is there again after `restore`, to be claimed again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as Broken

import redrb
from redrb.errors import ConfigError, StoreUnavailable
from redrb.lua.records import read_record
from tests.contract.test_table import names
from tests.contract.test_table_claims import bury, drain, put, stream_of
from tests.table_audit import audit_table, values_of

TableOpener = Callable[..., redrb.Table]


@pytest.fixture
def table(open_table: TableOpener) -> redrb.Table:
    return open_table(retain="checkpoint", secret="s")


def content(table: redrb.Table) -> dict[str, dict[str, Any]]:
    """Return all rows with their columns."""
    return {
        key: {name: values[0] for name, values in table.get([key]).items()}
        for key in table.tags().rows
    }


@pytest.mark.parametrize("later", ["keep", "drop"])
@pytest.mark.parametrize("page", [3, 1000])
def test_restore(table, pages, later, page):
    pages(table_rows=page)
    put(table, 6)
    table.register("actor", ["x"])
    table.claim("actor", count=2, timeout=0).ack()  # row0, row1: before the mark
    table.clear(["row0"])
    table.put(["row2", "row3"], {"y": ["early"] * 2}, [{"s": 1}] * 2)
    table.mark("m")
    before, change = content(table), table.tags().change
    table.claim("actor", count=3, timeout=0).ack()  # row2, row3, row4
    table.clear(["row2", "row1"])
    put(table, 2, 10)
    table.put(["row3", "row4"], {"y": ["late"] * 2}, [{"s": 2}] * 2)
    table.put(["row2"], {"x": ["anew"]})  # the key of a row that is retained
    table.clear(["row3"])
    back = {"row1", "row3"} if later == "keep" else {"row1", "row2", "row3"}
    done = table.restore("m", later)
    assert done.back == len(back)
    found = content(table)
    look = table.tags(change)
    assert not look.whole
    if later == "drop":
        before["row3"].pop("y")  # what it has replaced is gone
        assert found == before
        assert set(look.gone) == {"row10", "row11"}
        assert sorted(drain(table, "actor")) == names(4, 2)
    else:
        assert found.keys() == {*names(5, 1), "row10", "row11"}
        assert found["row2"] == {"x": "anew"}
        assert found["row3"]["y"] == found["row4"]["y"] == "late"
        assert sorted(drain(table, "actor")) == sorted([*names(4, 2), "row10", "row11"])
    assert set(found) - {"row5"} <= look.rows.keys()
    assert table.consumed("actor") == len(found)
    assert table.stats().counts.retained == 0  # row0 was cleared before the first mark
    audit_table(table._client, table)


@pytest.mark.parametrize("count", [1, 100, 101])
def test_no_mark_divides_the_rows_of_a_put(table, pages, client, namespace, count):
    """The heads of records have the change of the put's first row, which stands for all of them."""
    pages(table_rows=100)
    batches = [[f"{batch}-{number}" for number in range(count)] for batch in range(3)]
    for batch, keys in enumerate(batches):
        table.mark(f"before{batch}")
        table.put(keys, {"x": [batch] * count})
    table.mark("end")
    rows = client.execute("HVALS", f"redrb:{{{namespace}:table:{table.name}}}:rows")
    heads = {read_record(record)[0] for record in rows}
    assert len(heads) == len(batches)
    table.clear(batches[2] + batches[1][::2])
    before = set(table.tags().rows)
    table.restore("end", "drop")
    assert set(table.tags().rows) == before | set(batches[2]) | set(batches[1])
    table.clear(batches[2])
    table.restore("before2", "drop")
    assert set(table.tags().rows) == set(batches[0] + batches[1])
    audit_table(client, table)


def test_of_two_cleared_rows_of_a_key_the_one_of_the_mark_comes_back(table):
    table.put(["a"], {"x": ["old"]})
    table.mark("m")
    for value in ("new", "newer"):
        table.clear(["a"])
        table.put(["a"], {"x": [value]})
    table.clear(["a"])
    done = table.restore("m")
    assert (done.back, done.dropped) == (1, 2)
    assert content(table) == {"a": {"x": "old"}}
    assert table.numbers(["a"]) == [1]
    table.clear(["a"])
    assert table.tags().rows == {}
    assert table.restore("m", "drop").back == 1
    assert content(table) == {"a": {"x": "old"}}


def test_two_marks_stay_and_what_they_need(table, client):
    for number in range(4):
        put(table, 1, number)
        table.mark(f"m{number}")
        table.clear([f"row{number}"])
        # row n was cleared after the mark n, and is needed until two newer ones have come
        assert table.stats().counts.retained == min(number + 1, 2)
    assert table.marks().keys() == {"m2", "m3"}
    with pytest.raises(ConfigError, match=r"no mark 'm1'.*m2"):
        table.restore("m1")
    stored, _ = values_of(client, table)
    assert len(stored) == 2
    assert table.restore("m3").back == 1
    assert table.restore("m2").back == 1
    assert content(table).keys() == {"row2", "row3"}
    assert table.restore("m2").back == 0
    assert table.mark("m3") == table.marks()["m3"]  # the same name again
    assert table.marks().keys() == {"m2", "m3"}
    table.clear()
    table.mark("m2")
    table.mark("m3")
    assert table.stats().counts.retained == 0


def test_a_mark_that_is_set_again_needs_nothing_of_before(table):
    table.mark("last")
    for number in range(3):
        put(table, 1, number)
        table.clear([f"row{number}"])
        assert table.stats().counts.retained == 1
        table.mark("last")
        assert table.stats().counts.retained == 0
    put(table, 1, 3)
    table.clear()
    assert table.restore("last", "drop").back == 0
    put(table, 1, 4)
    table.mark("last")
    table.clear()
    assert table.restore("last").back == 1


def test_marks_that_are_newer_than_a_restored_one_are_gone(table):
    put(table, 2)
    table.mark("m1")
    table.clear(["row0"])
    table.mark("m2")
    assert table.restore("m1").back == 1
    with pytest.raises(ConfigError, match="no mark 'm2'"):  # row0 would be there, and again trained
        table.restore("m2")
    table.clear(["row1"])
    table.mark("m3")
    table.clear(["row0"])
    assert table.restore("m1").back == 2


def test_restore_to_an_earlier_mark_after_a_later_one(table):
    table.register("pairs", ["x"], 2)
    put(table, 4)
    table.mark("m1")
    assert drain(table, "pairs", 2) == names(4)
    table.mark("m2")
    table.clear()
    assert table.restore("m2").back == 4
    assert drain(table, "pairs", 2) == []
    assert table.consumed("pairs") == 4
    table.restore("m1")
    assert table.consumed("pairs") == 0
    assert sorted(drain(table, "pairs", 2)) == names(4)
    table.restore("m1")
    table.clear(["row1"])
    assert drain(table, "pairs", 2) == ["row2", "row3"]


@pytest.mark.parametrize("later", ["keep", "drop"])
@pytest.mark.parametrize("seed", range(4))
def test_a_restore_that_breaks_off_can_be_repeated(table, pages, monkeypatch, later, seed):
    pages(table_rows=2)
    rng = random.Random(seed)
    size = rng.choice([1, 2])
    table.register("actor", ["x"], size)
    put(table, 8)
    table.claim("actor", count=2, timeout=0).ack()
    table.mark("m")
    before = content(table)
    table.claim("actor", count=4, timeout=0).ack()
    table.put(rng.sample(names(8), 3), {"late": [1] * 3})
    table.clear(rng.sample(names(8), 5))
    put(table, 4, 8)
    run = redrb.table.calls.Restore.read
    calls = 0

    def breaking(*arguments):
        nonlocal calls
        calls += 1
        reply = run(*arguments)
        if rng.random() < 0.3:
            raise StoreUnavailable("broken", where="here")
        return reply

    monkeypatch.setattr(redrb.table.calls.Restore, "read", breaking)
    while True:
        try:
            table.restore("m", later)
        except StoreUnavailable:
            assert calls < 1000
        else:
            break
    assert calls > 4
    found = content(table)
    if later == "drop":
        assert found == before
    assert found.keys() == before.keys() | set(names(4, 8) if later == "keep" else ())
    rest = sorted(drain(table, "actor", size))
    assert rest == sorted(found.keys() - {"row0", "row1"})


@pytest.mark.parametrize("later", ["keep", "drop"])
@pytest.mark.parametrize("lost", range(1, 5))
def test_a_restore_counts_each_row_once_where_replies_are_lost(
    table, pages, monkeypatch, later, lost
):
    """Each `lost`-th reply gets lost, after the script has run, and its request is repeated."""
    pages(table_rows=2)
    put(table, 9)
    table.mark("m")
    put(table, 5, 20)
    table.clear(names(7) + names(3, 20))
    client, exchange, sent = table._index.client, table._index.client.exchange, 0

    def losing(pipeline):
        nonlocal sent
        replies, sent = exchange(pipeline), sent + len(pipeline.scripts)
        if pipeline.scripts and sent % (lost + 1) == 0:
            raise Broken("Connection closed by server.")
        return replies

    with monkeypatch.context() as patch:
        patch.setattr(client, "exchange", losing)
        done = table.restore("m", later)
    assert sent > 5
    rows = {*names(9), *(names(5, 20) if later == "keep" else ())}
    assert content(table).keys() == rows
    # those that were cleared, and then those that were put later
    expected = (10, 0) if later == "keep" else (7, 5)
    assert (done.back, done.dropped, done.newest) == (*expected, 9)
    done = table.restore("m", later)
    assert (done.back, done.dropped) == (0, 0)


def test_restore_after_all_was_lost_says_that_there_is_no_mark(table, client, namespace):
    put(table, 1)
    table.mark("m")
    for key in client.execute("KEYS", f"redrb:{{{namespace}:*"):
        client.execute("UNLINK", key)
    with pytest.raises(ConfigError, match="no mark 'm'"):
        table.restore("m")


def test_rows_that_lost_a_column_are_not_claimed(table):
    table.register("actor", ["x", "y"])
    put(table, 3, 0, "x")
    put(table, 1, 0, "y")
    table.mark("m")
    put(table, 2, 1, "y")
    leased = table.claim("actor", count=2, timeout=0)
    assert leased.keys == ("row0", "row1")
    table.restore("m", "drop")
    leased.release()
    assert drain(table, "actor") == ["row0"]
    put(table, 2, 1, "y")
    assert drain(table, "actor") == ["row1", "row2"]


def test_without_retention_consumption_alone_is_restored(open_table):
    table = open_table()
    put(table, 3)
    table.register("actor", ["x"])
    table.mark("m")
    assert drain(table, "actor") == names(3)
    table.clear(["row0"])
    assert table.restore("m").back == 0
    assert drain(table, "actor") == ["row1", "row2"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_row_that_comes_back_is_claimed_once_beside_its_dead_letter(table, size):
    table.register("actor", ["x"], size)
    put(table, 3 * size)
    table.mark("m")
    early = bury(table, names(size))
    table.clear(["row0"])
    both = bury(table, names(size, size))  # of rows that stay
    table.restore("m")
    assert len(stream_of(table).requeue(early)) == 0  # before `register` lets row0 arrive again
    late = [letter for letter in both if letter not in early]
    bury(table, names(size, 2 * size))
    table.clear([f"row{size}"])
    table.restore("m")
    table.register("actor", ["x"], size)
    assert len(stream_of(table).requeue(late)) == 0  # after it
    rest = sorted(drain(table, "actor", size))
    assert rest == names(2 * size)
    assert len(stream_of(table).requeue([x.id for x in stream_of(table).dead_letters()])) == 1
    assert drain(table, "actor", size) == names(size, 2 * size)
    assert table.consumed("actor") == 3 * size


@pytest.mark.parametrize("size", [1, 2])
def test_a_task_whose_groups_were_deleted_claims_rows_that_come_back(table, size):
    """What it had acknowledged of them is forgotten, as of the rows that stayed."""
    table.register("actor", ["x"], size)
    put(table, 4)
    assert drain(table, "actor", size) == names(4)
    table.mark("m")
    table.clear(names(2))
    table._claims.delete("actor")  # a process that deletes the table dies here
    table.register("actor", ["x"], size)
    assert table.restore("m").back == 2
    table.register("actor", ["x"], size)
    assert sorted(drain(table, "actor", size)) == names(4)
    assert table.consumed("actor") == 4
