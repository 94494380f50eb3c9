"""Users of Redis with the permissions of each role for a table, on real servers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import redrb
from redrb import Table
from redrb.cli.__main__ import main
from redrb.connection import Client
from redrb.errors import StoreDenied
from redrb.registry import Registry
from redrb.watch.state.reader import StateReader

Act = Callable[[Table], object]


def content(store: Client, namespace: str) -> dict[bytes, object]:
    """Return all keys of a namespace with their values; a server may order a hash anew."""
    keys: list[bytes] = store.execute("KEYS", f"redrb:{{{namespace}:*")
    hashes = {key for key in keys if store.execute("TYPE", key) == b"hash"}
    return {
        key: set(store.execute("HGETALL", key)) if key in hashes else store.execute("DUMP", key)
        for key in keys
    }


@pytest.fixture
def owner(store: Client, namespace: str, no_heartbeats: None) -> Table:
    """The table, opened by a user who may do everything; a task has claimed one row."""
    table = Table(store, "train", namespace=namespace, limit=3, retain="checkpoint")
    table.put(["a", "b"], {"x": torch.arange(2)}, [{"s": 1}, {"s": 2}])
    table.register("actor", ["x"])
    table.mark("m")
    table.claim("actor", ["x"], 1).ack()
    return table


@pytest.fixture
def open_as(log_in, namespace):
    """Open the table as a user with a role."""

    def open_table(role: str) -> Table:
        client = log_in(role, "--table", "train", tasks=())
        return Table(client, "train", namespace=namespace, create=False)

    return open_table


def refused(
    store: Client, namespace: str, table: Table, acts: dict[str, Act], role: str = "trainer"
) -> None:
    """Each of these is refused, names the role that may do it, and changes nothing."""
    advice = f"`redrb acl --role {role} --table train --namespace {namespace}`"
    for name, act in acts.items():
        before = content(store, namespace)
        with pytest.raises(StoreDenied, match=f"needs the role {role}") as error:
            act(table)
        assert advice in str(error.value)
        assert content(store, namespace) == before, name


CHANGES: dict[str, Act] = {
    "clear": lambda table: table.clear(["a"]),
    "clear all": lambda table: table.clear(),
    "mark": lambda table: table.mark("n"),
    "restore": lambda table: table.restore("m"),
    "begin_run": lambda table: table.begin_run(),
}


def test_a_maker_puts_tags_and_watches_and_clears_nothing(store, namespace, owner, open_as):
    maker = open_as("maker")
    seen = maker.put(["b"], {"y": [1]}, [{"s": 3}])
    assert maker.tags().rows["b"] == {"s": 3}
    assert maker.get(["b"])["x"][0] == 1
    maker.put(["c"], {"x": torch.arange(1)})
    later = threading.Timer(0.3, lambda: owner.clear(["a"]))
    later.start()
    maker.put(["d"], {"x": torch.arange(1)}, timeout=20)  # waits for room
    later.join()
    assert maker.watch(seen, timeout=5) > seen
    assert maker.stats().tasks["actor"].ledger.waiting == 3
    refused(store, namespace, maker, CHANGES)
    refused(store, namespace, maker, {"claim": lambda table: table.claim("actor", ["x"], 1)})
    prefix = f"redrb:{{{namespace}:table:train}}:"
    for command in (("HSET", f"{prefix}marks", "m", "0 0"), ("DEL", f"{prefix}consumed:actor")):
        with pytest.raises(StoreDenied):
            maker._client.execute(*command)
    with pytest.raises(StoreDenied):
        Table(maker._client, "train2", namespace=namespace)


def test_a_trainer_claims_clears_marks_and_restores(namespace, owner, open_as):
    trainer = open_as("trainer")
    trainer.begin_run()
    with trainer.claim("actor", ["x"], 1) as claim:
        assert claim.get()["x"][0] == 1
    trainer.claim("critic", ["x"], 2).release()
    trainer.mark("n")
    assert trainer.clear(["a"]) == 1
    assert trainer.restore("n").back == 1
    assert trainer.claim("critic", timeout=0).keys
    trainer.put(["a"], {"x": torch.arange(1)})
    with pytest.raises(StoreDenied):
        Table(trainer._client, "train2", namespace=namespace)


@pytest.mark.parametrize("whole", [False, True], ids=["table", "namespace"])
def test_an_observer_reads_and_writes_nothing(
    store, namespace, owner, log_in, whole, monkeypatch, capsys, caplog
):
    client = log_in("observer", *([] if whole else ["--table", "train"]), tasks=())
    monkeypatch.setenv("REDRB_URL", client.url)
    before = content(store, namespace)
    table = Table(client, "train", namespace=namespace, create=False)
    assert table.tags().rows == {"a": {"s": 1}, "b": {"s": 2}}
    assert table.get(["a"])["x"][0] == 0
    assert table.produced(["x"]) == 2
    assert (table.stats().counts.rows, table.consumed("actor")) == (2, 1)
    with pytest.raises(StoreDenied, match="'multi'"):  # the put, not its end
        table.put(["a"], {"x": [1]})
    assert table.numbers(["a"]) == [1]
    for words in (["stats", "train"], ["inspect", "train"], ["inspect", "train", "a"], ["ls"]):
        assert main([*words, "--namespace", namespace]) == 0, words
        assert "not readable" not in capsys.readouterr().out
    [shown] = StateReader(client, namespace).look().tables
    assert (shown.rows, shown.claims[0].waiting, shown.claims[0].consumed) == (2, 1, 1)
    assert content(store, namespace) == before
    assert not caplog.messages
    refused(store, namespace, table, CHANGES)
    acts: dict[str, Act] = {
        "put": lambda table: table.put(["a"], {"x": [1]}),
        "watch": lambda table: table.watch(0, timeout=0),
    }
    refused(store, namespace, table, acts, "maker")
    with pytest.raises(StoreDenied, match=r"may not open it.* --table train2"):
        Table(log_in("observer", "--table", "train", tasks=()), "train2", namespace=namespace)


def test_an_admin_does_all_of_it(store, namespace, owner, open_as):
    admin = open_as("admin")
    admin.clear(["a"])
    admin.claim("actor", ["x"], 1).ack()
    admin.configure(limit=9)
    assert admin.delete() == 1
    assert not list(Registry(store, namespace).names("table"))


def test_roles_of_a_task_see_no_table_and_the_reverse(store, namespace, owner, log_in):
    with redrb.ExperienceStream(store, "math", namespace=namespace):
        of_task = log_in("observer")
        assert [each.readable for each in StateReader(of_task, namespace).look().tables] == [False]
        alone = StateReader(of_task, namespace, tasks=["math"]).look()
        assert ([each.name for each in alone.tasks], alone.tables) == (["math"], ())
        of_table = log_in("observer", "--table", "train", tasks=())
        state = StateReader(of_table, namespace, tasks=["train"]).look()
        assert [each.name for each in (*state.tables, *state.tasks)] == ["train", "train:actor"]
        with pytest.raises(StoreDenied):
            redrb.ExperienceStream(of_table, "math", namespace=namespace)
