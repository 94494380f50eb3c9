"""Claims of rows: each task gets each complete row until it has acknowledged it, and no other."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

import redrb
from redrb.connection import Client
from redrb.errors import BatchTimeout, ConfigError, LeaseLost, UnknownTask
from redrb.table import claims as claims_module
from redrb.watch.state.reader import StateReader
from tests import warm
from tests.contract.test_table import names

TableOpener = Callable[..., redrb.Table]


def put(table: redrb.Table, count: int, first: int = 0, *columns: str) -> None:
    table.put(names(count, first), {name: list(range(count)) for name in columns or ("x",)})


def drain(table: redrb.Table, task: str, size: int = 1) -> list[str]:
    """Claim and acknowledge all rows that a task can have now."""
    found: list[str] = []
    while True:
        try:
            with table.claim(task, count=500 * size, at_least=size, timeout=0) as claim:
                found += claim.keys
        except BatchTimeout:
            return found


def test_rows_that_are_complete_are_claimed_by_each_task(open_table):
    table = open_table()
    put(table, 2, 0, "x", "y")
    put(table, 1, 2, "x")
    with pytest.raises(ConfigError, match="not registered"):
        table.claim("actor", timeout=0)
    with table.claim("actor", ["x", "y"], 2, timeout=1) as claim:
        assert claim.keys == ("row0", "row1")
        assert claim.get()["y"] == [0, 1]
        assert table.consumed("actor") == 0
    table.register("critic", ["x"])
    assert drain(table, "critic") == names(3)
    put(table, 2, 2, "y")  # row2 is complete only now, row3 is not
    table.put(["row3"], tags=[{"s": 1}])
    put(open_table(), 1, 3, "x")
    assert drain(table, "actor") == ["row2", "row3"]
    put(table, 4, 0, "x", "y")  # new values of rows that were consumed
    assert drain(table, "actor") == []
    assert drain(table, "critic") == ["row3"]
    assert (table.consumed("actor"), table.consumed("critic")) == (4, 4)
    assert table.produced(["x", "y"]) == 4
    with pytest.raises(ConfigError, match="needs the columns"):
        open_table().claim("actor", ["x"], timeout=0)
    with pytest.raises(ConfigError, match="no task"):
        table.consumed("other")


def test_groups_are_claimed_whole(open_table):
    table, other = open_table(), open_table()
    put(table, 5, 0, "x")
    table.register("pairs", ["x", "y"], 2)
    put(table, 2, 1, "y")
    assert drain(table, "pairs", 2) == []
    for count in ({"count": 3}, {"count": 2, "at_least": 1}):
        with pytest.raises(ConfigError, match="groups of 2"):
            table.claim("pairs", **count, timeout=0)
    other.put(["row0"], {"y": [1]})
    assert drain(table, "pairs", 2) == ["row0", "row1"]
    assert table.clear(["row2"]) == 1  # while its group lacks row3
    put(table, 2, 3, "y")
    table.put(["row5"], {"x": [1], "y": [1]})
    assert drain(table, "pairs", 2) == ["row4", "row5"]
    put(table, 2, 6, "x", "y")
    claim = table.claim("pairs", count=2, timeout=0)
    assert table.clear(["row7"]) == 1  # while it is leased
    claim.ack()
    assert drain(table, "pairs", 2) == []
    assert table.clear() == 6
    keys, client = table._index.keys, table._index.client
    for kind in ("claimed", "parts", "consumed"):
        assert client.execute("EXISTS", f"{keys.prefix}{kind}:pairs") == 0
    with pytest.raises(ConfigError):
        other.claim("pairs", ["x", "y"], 3, group_size=3, timeout=0)


def test_count_and_timeout(open_table):
    table = open_table()
    table.register("actor", ["x"])
    put(table, 3)
    with pytest.raises(BatchTimeout):
        table.claim("actor", count=4, timeout=0.05)
    assert table.claim("actor", count=4, at_least=2, timeout=0.05).keys == tuple(names(3))
    for count in (0, -1, 1.5):
        with pytest.raises(ConfigError):
            table.claim("actor", count=count, timeout=0)


@pytest.mark.usefixtures("only_wakes")
def test_a_claim_is_woken(open_table, monkeypatch):
    table = open_table()
    table.register("actor", ["x", "y"])
    put(table, 1, 0, "x")
    got: list[tuple[str, ...]] = []
    waiter = threading.Thread(
        target=lambda: got.append(open_table().claim("actor", ["x", "y"], timeout=30).keys)
    )
    waiter.start()
    wait_for_queue_of_task(table, "actor")
    put(table, 1, 0, "y")
    waiter.join(12)  # without a wake-up it looks again later
    assert got == [("row0",)]


def wait_for_queue_of_task(table: redrb.Table, task: str) -> None:
    keys = table._index.keys
    queue = f"{keys.prefix}claims:{task}:queue:default"
    while not table._index.client.execute("EXISTS", queue):
        pass


def test_a_process_that_claims_is_seen_at_once(open_table, client, namespace):
    table = open_table()
    put(table, 2)
    task = f"{table.name}:actor"
    with pytest.raises(BatchTimeout):
        table.claim("actor", ["x", "y"], timeout=0)
    [worker] = StateReader(client, namespace, tasks=[task]).look().tasks[0].workers
    assert (worker.role, worker.life) == ("trainer", "live")


def test_release_fail_and_dead_letters(open_table):
    table = open_table()
    table.register("actor", ["x"])
    put(table, 2)
    table.claim("actor", count=2, timeout=0).release()
    claim = table.claim("actor", count=1, timeout=0)
    claim.fail("nan loss")
    with pytest.raises(ZeroDivisionError), table.claim("actor", count=2, timeout=0):
        raise ZeroDivisionError
    stream = table._claims._open["actor"].stream
    deliveries = 0
    while not stream.stats().ledger.dead:
        table.claim("actor", count=1, timeout=0).fail("nan loss")
        deliveries += 1
        assert deliveries < 20
    [letter] = stream.dead_letters()
    look = f"redrb dead ls {stream.task} --namespace {stream.namespace}"
    with pytest.raises(BatchTimeout, match=f"1 is in the dead letters .`{look}` has the reasons"):
        table.claim("actor", count=2, timeout=0)
    assert drain(table, "actor") != []
    stream.requeue([letter.id])
    with table.claim("actor", timeout=0) as again:
        assert again.keys == tuple(letter.items[0].extras["rows"])
    assert table.consumed("actor") == 2
    table.clear()


@pytest.mark.parametrize("size", [1, 2])
def test_a_claim_that_waits_for_cleared_rows_says_so(open_table, size):
    table = open_table()
    table.register("actor", ["x"], size)
    put(table, 6)
    with table.claim("actor", count=2, timeout=0):
        pass
    table.clear(["row2", "row5"])
    lost = 2 * size
    with pytest.raises(BatchTimeout, match=f"Of 6 .* 2 are acknowledged, {lost} were cleared"):
        table.claim("actor", count=6, timeout=0)
    table.clear(["row3", "row4"])
    with pytest.raises(BatchTimeout, match="clear rows when every task has acknowledged them"):
        table.claim("actor", count=size, timeout=0)
    table.clear()
    with pytest.raises(BatchTimeout) as error:  # of a task that has never seen these rows
        table.claim("critic", ["x"], timeout=0)
    assert error.value.__notes__ == [f"Table {table.name!r} has 0 rows; 6 more were cleared."]


def test_cleared_rows_are_not_claimed(open_table):
    table = open_table()
    table.register("actor", ["x"])
    put(table, 4)
    claim = table.claim("actor", count=2, timeout=0)
    table.clear(["row0", "row2"])  # one is leased, one waits
    with pytest.raises(redrb.errors.MissingRows):
        claim.get()
    claim.ack()
    assert table.consumed("actor") == 1
    assert drain(table, "actor") == ["row3"]
    put(table, 1)  # the key again
    assert drain(table, "actor") == ["row0"]
    ledger = table.stats().tasks["actor"].ledger
    assert (ledger.acked, ledger.evicted) == (3, 2)


def bury(table: redrb.Table, rows: list[str]) -> list[int]:
    """Claim a group of rows and reject it; returns the ids of all dead letters."""
    claim = table.claim("actor", count=len(rows), timeout=0)
    assert claim.keys == tuple(rows)
    claim.lease.reject("bad")
    return [letter.id for letter in stream_of(table).dead_letters()]


def stream_of(table: redrb.Table) -> redrb.ExperienceStream:
    return table._claims._open["actor"].stream


@pytest.mark.parametrize("size", [1, 2])
def test_a_dead_letter_of_a_cleared_row_is_not_claimed_again(open_table, size):
    table = open_table()
    table.register("actor", ["x"], size)
    put(table, 2 * size)
    ids = bury(table, names(size))
    table.clear(["row0"])
    put(table, size)  # the key again, in a group of other rows
    if size > 1:
        table.put(["row9"], {"x": [0]})
    assert len(stream_of(table).requeue(ids)) == 0
    ledger = table.stats().tasks["actor"].ledger
    assert (ledger.dead, ledger.evicted, ledger.waiting) == (0, 1, 2)
    assert list(stream_of(table).dead_letters()) == []
    assert drain(table, "actor", size) == [*names(size, size), "row0", *["row9"][: size - 1]]
    assert table.consumed("actor") == 2 * size
    table.clear()
    assert table.consumed("actor") == 0


@pytest.mark.parametrize("size", [1, 2])
def test_a_requeued_group_ends_with_its_rows(open_table, size):
    table = open_table()
    table.register("actor", ["x"], size)
    put(table, 2 * size)
    for first in (0, size):
        bury(table, names(size, first))
    for again in range(2):
        ids = [letter.id for letter in stream_of(table).dead_letters()]
        assert len(stream_of(table).requeue(ids)) == 2
        if not again:
            bury(table, names(size))
            bury(table, names(size, size))
    put(table, size, 2 * size)
    table.clear(["row0"])  # while it waits
    claim = table.claim("actor", count=size, timeout=0)
    table.clear([f"row{size}"])  # while it is leased
    claim.ack()
    assert drain(table, "actor", size) == names(size, 2 * size)
    assert table.consumed("actor") == size
    assert table.stats().tasks["actor"].ledger.evicted == 2


def test_no_cleared_row_is_consumed_that_another_consumer_group_needs(open_table, namespace):
    table = open_table()
    table.register("actor", ["x"])
    put(table, 2)
    name = f"{table.name}:actor"
    with redrb.ExperienceStream(table._client, name, namespace=namespace, group="other") as other:
        other.join_group()
        claim = table.claim("actor", count=2, timeout=0)
        table.clear(["row0"])
        claim.ack()
        assert table.consumed("actor") == 1
        other.take(2, timeout=0).ack()
        assert table.consumed("actor") == 1


CLAIMER = """
import sys, redrb
table = redrb.Table(redrb.connect(sys.argv[1]), "train", namespace=sys.argv[2])
print(table.claim("actor", ["x"], 2, timeout=30).keys, flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_the_rows_of_a_killed_process_are_claimed_by_another(real_url, namespace, monkeypatch):
    with redrb.connect(real_url) as client:
        table = redrb.Table(client, "train", namespace=namespace)
        stream = redrb.ExperienceStream(client, "train:actor", namespace=namespace, lease_ms=500)
        stream.join_group()
        put(table, 3)
        table.register("actor", ["x"])
        command = [sys.executable, "-c", CLAIMER, real_url, namespace]
        with warm.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "('row0', 'row1')\n"
            process.send_signal(signal.SIGKILL)
        with table.claim("actor", count=3, timeout=90) as claim:
            assert set(claim.keys) == set(names(3))
        stream.close()
        assert table.stats().tasks["actor"].ledger.balanced
        table.delete()


def test_registration_goes_in_pages_while_rows_change(open_table, pages, monkeypatch):
    pages(table_rows=3)
    table, other = open_table(), open_table()
    put(table, 10)
    run = redrb.table.calls.Register.read
    looks = [
        lambda: other.put(["row1", "row8"], tags=[{"s": 1}] * 2),
        lambda: other.clear(["row7", "row0"]),
        lambda: put(other, 2, 9),
    ]

    def meanwhile(*arguments):
        reply = run(*arguments)
        if looks:
            looks.pop(0)()
        return reply

    monkeypatch.setattr(redrb.table.calls.Register, "read", meanwhile)
    table.register("actor", ["x"])
    found = drain(table, "actor")
    assert sorted(found) == sorted(["row10", *(f"row{n}" for n in (1, 2, 3, 4, 5, 6, 8, 9))])


@pytest.mark.long
def test_registration_costs_what_is_stored(open_table, monkeypatch):
    table = open_table()
    for first in range(0, 12_000, 2000):
        put(table, 2000, first)
        table.clear()
    put(table, 3, 20_000)
    calls: list[object] = []
    run = redrb.table.calls.Register.read
    monkeypatch.setattr(
        redrb.table.calls.Register, "read", lambda *given: calls.append(0) or run(*given)
    )
    table.register("actor", ["x"])
    assert len(calls) == 1
    assert drain(table, "actor") == names(3, 20_000)


def test_a_claim_that_waits_outlives_the_loss_of_all_data(
    client: Client, namespace: str, open_table: TableOpener, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(claims_module, "REGISTER_AGAIN_S", 0.5)
    table, other = open_table(), open_table()
    put(table, 1)
    assert drain_of(table) == ["row0"]
    got: list[tuple[str, ...]] = []
    waiter = threading.Thread(
        target=lambda: got.append(table.claim("actor", count=2, timeout=30).keys)
    )
    waiter.start()
    wait_for_queue_of_task(table, "actor")
    for key in client.execute("KEYS", f"redrb:{{{namespace}:*"):
        client.execute("UNLINK", key)
    put(other, 2, 5)
    waiter.join(30)
    assert got == [("row5", "row6")]


def test_registering_again_brings_back_what_redis_lost(
    client: Client, namespace: str, open_table: TableOpener
):
    table = open_table()
    put(table, 1)
    table.register("actor", ["x"])
    for key in client.execute("KEYS", f"redrb:{{{namespace}:*"):
        client.execute("UNLINK", key)
    put(table, 2, 5)
    table.register("actor", ["x"])
    assert table.consumed("actor") == 0
    assert drain(table, "actor") == ["row5", "row6"]


def drain_of(table: redrb.Table) -> list[str]:
    table.register("actor", ["x"])
    return drain(table, "actor")


@pytest.mark.parametrize("size", [1, 2])
def test_a_task_whose_groups_were_deleted_claims_all_rows_anew(open_table, size):
    table = open_table()
    table.register("actor", ["x"], size)
    put(table, 4)
    table.claim("actor", count=2, timeout=0).ack()
    table._claims.delete("actor")  # a process that deletes the table dies here
    put(table, 2, 4)
    again = open_table()
    again.register("actor", ["x"], size)
    assert drain(again, "actor", size) == names(6)
    assert again.consumed("actor") == 6


@pytest.mark.parametrize("size", [1, 2])
def test_a_task_is_unregistered_and_begins_anew(open_table, size):
    table, other = open_table(), open_table()
    put(table, 4)
    for task in ("actor", "critic"):
        table.register(task, ["x"], size)
    table.claim("actor", count=2, timeout=1).ack()
    held = other.claim("actor", ["x"], 2, group_size=size, timeout=1)
    put(table, 2, 4)
    assert table.unregister("actor") == (2 + 2) // size
    put(table, 2, 6)
    assert list(table.stats().tasks) == ["critic"]
    with pytest.raises(LeaseLost):
        held.ack()
    with pytest.raises(UnknownTask, match="actor"):
        table.unregister("actor")
    with pytest.raises(ConfigError, match="no task"):
        table.consumed("actor")
    assert drain(table, "critic", size) == names(8)
    table.register("actor", ["x"], 1)
    assert drain(table, "actor") == names(8)
    assert table.stats().tasks["actor"].ledger.balanced


def test_many_tasks(open_table, pages):
    pages(claims=3)
    table = open_table()
    for number in range(3):
        table.register(f"task{number}", ["x"])
    with pytest.raises(ConfigError, match="3 tasks"):
        table.register("task3", ["x"])
    table.put(names(50), {"x": torch.ones(50, 2)})
    assert [drain(table, f"task{number}") for number in range(3)] == [names(50)] * 3
    assert table.delete() == 50
    assert not [
        key
        for key in table._index.client.execute("KEYS", f"{table._index.keys.prefix}*")
        if not key.endswith(b":removed")
    ]


def test_a_timeout_has_the_whole_wait_and_names_columns_that_no_row_has(open_table, monkeypatch):
    monkeypatch.setattr(claims_module, "REGISTER_AGAIN_S", 0.1)
    table = open_table()
    table.put(["a"], {"x": torch.ones(1)})
    with pytest.raises(BatchTimeout) as error:
        table.claim("train", ["x", "typo"], timeout=0.4)
    assert error.value.waited_s > 0.2  # more than one look
    assert "typo" in error.value.__notes__[-1]
    table.put(["b", "c", "d"], {"x": torch.ones(3), "typo": torch.ones(3)})
    table.register("pairs", ["x"], 2)
    held = table.claim("pairs", count=2, timeout=1)
    with pytest.raises(BatchTimeout) as error:
        table.claim("pairs", count=4, timeout=0)
    assert (error.value.wanted, error.value.available) == (4, 2)
    text = str(error.value)
    assert "table 'train'" in text
    assert "2 of 4 rows that task 'pairs' can claim were there" in text
    assert "release the claims of this process" in text
    held.ack()
    with pytest.raises(BatchTimeout, match=r"Of 4 rows .* 2 are acknowledged") as error:
        table.claim("pairs", count=4, timeout=0)
    assert "group" not in str(error.value)
