"""Operations of several requests end after each of these: the same one goes on, and loses nothing.

Each operation runs again and again, and ends after one request, two, and so on: by a SIGKILL, after
which nothing is sent any more, or by an interrupt, after which the process tidies up.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import redrb
from redrb import BufferItem, ExperienceStream, Table, WeightPublisher, WeightSubscriber
from redrb.connection import Client
from redrb.connection.transport import Pipeline
from redrb.errors import ConfigError, UnknownTask
from redrb.keys import TableKeys
from redrb.registry import Kind, Registry
from redrb.stream.saving.resuming import resume
from redrb.stream.saving.saving import save
from redrb.stream.task.lookup import existing_task
from redrb.stream.task.removal import remove_task
from redrb.stream.task.store import TaskStore
from redrb.table import removal, saving
from redrb.watch.doctor import tables
from redrb.watch.doctor.registry_names import LeftName, remove_name
from redrb.watch.values import remove_claims, remove_table
from redrb.weights.inspection.listing import remove_weights
from redrb.weights.wire import chunks
from tests.audit import audit
from tests.contract.test_table_restore import content
from tests.published import CHUNK_BYTES
from tests.table_audit import audit_table, values_of

ROWS = 7


class Killed(BaseException):
    """The process is dead."""


@contextmanager
def ending_after(requests: int, how: str) -> Iterator[None]:
    """End this thread after so many requests; a process that was killed sends no more of them."""
    send, send_chunk, me, sent = Pipeline.send, chunks._send, threading.get_ident(), 0

    def count() -> None:
        nonlocal sent
        if threading.get_ident() == me:
            sent += 1
            if sent == requests + 1 or (how == "kill" and sent > requests):
                raise Killed if how == "kill" else KeyboardInterrupt

    def counted(pipeline: Pipeline, connection: Any) -> None:
        count()
        send(pipeline, connection)

    def counted_chunk(*arguments: Any) -> None:
        count()
        send_chunk(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "send", counted)
        patch.setattr(chunks, "_send", counted_chunk)
        yield


@dataclass
class Place:
    """A namespace of its own, and what was opened there."""

    client: Client
    namespace: str
    folder: Path
    scope: ExitStack = field(default_factory=ExitStack)

    def table(self, name: str = "train") -> Table:
        return Table(self.client, name, namespace=self.namespace, retain="checkpoint")

    def stream(self, task: str = "math", **options: Any) -> ExperienceStream:
        opened = ExperienceStream(self.client, task, namespace=self.namespace, **options)
        return self.scope.enter_context(opened)

    def kept(self) -> list[bytes]:
        """Return the keys that do not go by themselves, after a repair of the registry."""
        registry = Registry(self.client, self.namespace)
        kinds: list[Kind] = ["task", "table", "weights"]
        for kind in kinds:
            for name in list(registry.names(kind)):
                remove_name(self.client, self.namespace, LeftName(kind, name))
        return [
            key
            for node in self.client.primaries()
            for key in node.execute("KEYS", f"redrb:{{{self.namespace}*")
            if node.execute("PTTL", key) < 0
        ]


def filled_table(place: Place) -> Table:
    """A table with rows that were put, replaced, claimed, cleared and retained, and an orphan."""
    table = place.table()
    keys = [f"row{number}" for number in range(ROWS)]
    table.put(keys, {"x": list(range(ROWS))}, [{"s": number} for number in range(ROWS)])
    table.register("actor", ["x"])
    table.claim("actor", count=2, timeout=5).ack()
    table.mark("m")
    table.claim("actor", count=3, timeout=5).ack()
    table.put(keys[2:5], {"x": ["late"] * 3, "y": [1] * 3})
    table.put(["new"], {"x": ["new"]})
    table.clear(keys[4:])
    return table


def rm_table(place: Place) -> Callable[[], object]:
    filled_table(place)
    orphan = TableKeys.of(place.namespace, "train").value(3, "dead", 0)
    place.client.at(orphan).execute("SET", orphan, b"x")

    def act() -> None:
        remove_table(place.client, "train", namespace=place.namespace)

    return act


def nothing_is_left(place: Place) -> None:
    assert place.kept() == []


def rm_claims(place: Place) -> Callable[[], object]:
    filled_table(place)
    return lambda: remove_claims(place.client, "train:actor", namespace=place.namespace)


def claims_are_gone(place: Place) -> None:
    assert place.table().stats().tasks == {}
    audit_table(place.client, place.table())
    assert not [key for key in place.kept() if b"actor" in key]
    remove_table(place.client, "train", namespace=place.namespace)
    nothing_is_left(place)


def clear_table(place: Place) -> Callable[[], object]:
    filled_table(place)
    return lambda: place.table().clear()


def table_is_empty(place: Place) -> None:
    table = place.table()
    assert (table.tags().rows, table.stats().counts.trash) == ({}, 0)
    audit_table(place.client, table)
    table.restore("m")
    assert len(content(table)) == ROWS + 1
    audit_table(place.client, table)


def restore_table(place: Place) -> Callable[[], object]:
    table = filled_table(place)
    return lambda: table.restore("m", "drop")


def table_is_as_marked(place: Place) -> None:
    table = place.table()
    found = content(table)
    assert {key: row["x"] for key, row in found.items() if "x" in row} == {
        f"row{number}": number for number in (0, 1, 5, 6)
    }  # what was replaced since is gone
    assert len(found) == ROWS
    assert (table.consumed("actor"), table.stats().counts.trash) == (2, 0)
    audit_table(place.client, table)


def save_table(place: Place) -> Callable[[], object]:
    filled_table(place)
    file = place.folder / "train.redrb"
    return lambda: saving.save_table(place.client, "train", file, namespace=place.namespace)


def table_is_saved(place: Place) -> None:
    assert [path.name for path in place.folder.iterdir()] == ["train.redrb"]
    file = place.folder / "train.redrb"
    saving.resume_table(place.client, "again", file, namespace=place.namespace)
    assert content(place.table("again")) == content(place.table())


def resume_table(place: Place) -> Callable[[], object]:
    file = place.folder / "train.redrb"
    filled_table(place)
    saving.save_table(place.client, "train", file, namespace=place.namespace)
    return lambda: saving.resume_table(place.client, "again", file, namespace=place.namespace)


def table_is_resumed(place: Place) -> None:
    again, before = place.table("again"), place.table()
    assert content(again) == content(before)
    assert (again.numbers(["new"]), again.marks()) == (before.numbers(["new"]), before.marks())
    assert again.consumed("actor") == before.consumed("actor")
    audit_table(place.client, again)
    for name in ("again", "train"):
        remove_table(place.client, name, namespace=place.namespace)
    nothing_is_left(place)


def register(place: Place) -> Callable[[], object]:
    filled_table(place)
    return lambda: place.table().register("critic", ["x"])


def rows_have_arrived(place: Place) -> None:
    table = place.table()
    claimed = table.claim("critic", ["x"], len(table.tags().rows), timeout=5)
    assert set(claimed.keys) == set(table.tags().rows)
    claimed.ack()
    audit_table(place.client, table)


def configure_table(place: Place) -> Callable[[], object]:
    table = filled_table(place)
    return lambda: table.configure(limit=50, max_bytes=1 << 20)


def table_is_configured(place: Place) -> None:
    counts = place.table().stats().counts
    assert (counts.limit, counts.max_bytes) == (50, 1 << 20)


def item(number: int) -> BufferItem:
    return BufferItem(torch.tensor([number]), torch.ones(1), extras={"n": number})


def filled_stream(place: Place, **options: Any) -> ExperienceStream:
    """A task with groups that were put, taken, failed and acknowledged."""
    stream = place.stream(max_deliveries=1, **options)
    other = place.stream(group="other", max_deliveries=1, **options)
    other.join_group()
    stream.put_many([[item(number)] for number in range(ROWS)])
    stream.take(2, timeout=5).ack()
    stream.take(1, timeout=5).fail("bad")
    assert len(other) == ROWS
    return stream


def rm_task(place: Place) -> Callable[[], object]:
    filled_stream(place)
    place.scope.close()
    return lambda: remove_task(place.client, "math", namespace=place.namespace)


def drop_group(place: Place) -> Callable[[], object]:
    filled_stream(place)
    place.scope.close()

    def act() -> None:
        stream = ExperienceStream(
            place.client, "math", namespace=place.namespace, group="other", create=False
        )
        stream.drop_group()

    return act


def one_group_is_left(place: Place) -> None:
    stream = place.stream()
    assert len(stream) == ROWS - 3
    audit(stream)
    store = stream._store
    assert list(store.client.execute("SMEMBERS", store.keys.groups)) == [b"default"]


def configure_stream(place: Place) -> Callable[[], object]:
    filled_stream(place)
    place.scope.close()

    def act() -> None:
        stream = ExperienceStream(place.client, "math", namespace=place.namespace)
        try:
            stream.configure(limit=50, max_staleness=9)
        finally:
            stream.close()

    return act


def stream_is_configured(place: Place) -> None:
    stream = place.stream()
    store = existing_task(place.client, "math", namespace=place.namespace)
    settings = store.client.execute("HMGET", store.keys.task, "limit", "max_staleness")
    assert settings == [b"50", b"9"]
    assert stream.stats().ledger.waiting == ROWS - 3
    audit(stream)


def save_stream(place: Place) -> Callable[[], object]:
    filled_stream(place)
    place.scope.close()
    store = TaskStore.of(place.client, place.namespace, "math")
    return lambda: save(store, place.folder / "math")


def stream_is_saved(place: Place) -> None:
    assert [path.name for path in place.folder.iterdir()] == ["math"]
    resume(TaskStore.of(place.client, place.namespace, "again"), place.folder / "math")
    assert len(place.stream("again")) == ROWS - 3


def resume_stream(place: Place) -> Callable[[], object]:
    save_stream(place)()
    store = TaskStore.of(place.client, place.namespace, "again")
    return lambda: resume(store, place.folder / "math")


def stream_is_resumed(place: Place) -> None:
    stream = place.stream("again")
    assert sorted(each[0].extras["n"] for each in stream.take(ROWS - 3, timeout=5).groups()) == [
        3, 4, 5, 6,
    ]  # fmt: skip
    place.scope.close()
    for task in ("again", "math"):
        remove_task(place.client, task, namespace=place.namespace)
    nothing_is_left(place)


def published(place: Place) -> WeightPublisher:
    return WeightPublisher(place.client, "actor", namespace=place.namespace)


def rm_weights(place: Place) -> Callable[[], object]:
    publisher = published(place)
    for version in range(3):
        publisher.publish({"w": torch.arange(900.0) + version})
    return lambda: remove_weights(place.client, "actor", namespace=place.namespace)


def only_the_fence_is_left(place: Place) -> None:
    assert [key.rpartition(b":")[2] for key in place.kept()] == [b"fence"]
    assert list(Registry(place.client, place.namespace).names("weights")) == []


def publish(place: Place) -> Callable[[], object]:
    published(place).publish({"w": torch.zeros(900)})
    return lambda: published(place).publish({"w": torch.arange(900.0)})


def weights_are_published(place: Place) -> None:
    subscriber = WeightSubscriber(place.client, "actor", namespace=place.namespace)
    assert torch.equal(subscriber.fetch()["w"], torch.arange(900.0))
    remove_weights(place.client, "actor", namespace=place.namespace)
    only_the_fence_is_left(place)


OPERATIONS = {
    "rm table": (rm_table, nothing_is_left),
    "rm table:task": (rm_claims, claims_are_gone),
    "clear table": (clear_table, table_is_empty),
    "restore table": (restore_table, table_is_as_marked),
    "save table": (save_table, table_is_saved),
    "resume table": (resume_table, table_is_resumed),
    "register": (register, rows_have_arrived),
    "configure table": (configure_table, table_is_configured),
    "rm task": (rm_task, nothing_is_left),
    "drop group": (drop_group, one_group_is_left),
    "configure": (configure_stream, stream_is_configured),
    "save": (save_stream, stream_is_saved),
    "resume": (resume_stream, stream_is_resumed),
    "weights rm": (rm_weights, only_the_fence_is_left),
    "publish": (publish, weights_are_published),
}


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "interrupt"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_ends_early_is_finished_by_the_same(
    operation, how, client, namespace, pages, monkeypatch, tmp_path
):
    pages(table_rows=3, ended_of_group=3, versions=2)
    monkeypatch.setattr(removal, "PAGE", 3)
    monkeypatch.setattr(saving, "FRAME_BYTES", 1)
    monkeypatch.setattr(CHUNK_BYTES, 1024)
    prepare, check = OPERATIONS[operation]
    for requests in itertools.count(1):
        place = Place(client, f"{namespace}-{requests}", tmp_path / str(requests))
        place.folder.mkdir()
        with place.scope:
            act = prepare(place)
            try:
                with ending_after(requests, how):
                    act()
            except (Killed, KeyboardInterrupt):
                try:
                    act()
                except (UnknownTask, ConfigError):  # it had done all but its name
                    assert operation in ("rm table", "rm table:task", "rm task", "weights rm")
                check(place)
            else:
                check(place)
                break
    assert requests > 1


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_a_resume_that_ended_early_can_be_deleted(
    client, namespace, pages, monkeypatch, tmp_path, how
):
    pages(table_rows=3)
    monkeypatch.setattr(saving, "FRAME_BYTES", 1)
    for requests in itertools.count(1):
        place = Place(client, f"{namespace}-{requests}", tmp_path / str(requests))
        place.folder.mkdir()
        act = resume_table(place)
        try:
            with ending_after(requests, how):
                act()
        except (Killed, KeyboardInterrupt):
            there = client.execute("EXISTS", TableKeys.of(place.namespace, "again").task)
            if there:  # so `redrb rm` knows of it
                remove_table(client, "again", namespace=place.namespace)
            remove_table(client, "train", namespace=place.namespace)
            nothing_is_left(place)
        else:
            break


def delete_table(place: Place) -> Callable[[], object]:
    return filled_table(place).delete


@pytest.mark.long
@pytest.mark.parametrize("deletes", [1, 2])
@pytest.mark.parametrize(
    ("operation", "name"),
    [(resume_table, "again"), (delete_table, "train")],
    ids=["resume", "delete"],
)
def test_a_table_that_is_created_over_a_left_one_is_deleted_with_its_values(
    real_url, namespace, pages, monkeypatch, tmp_path, operation, name, deletes
):
    """`deletes`: the first of two is killed, too, after as many requests."""
    client = redrb.connect(real_url)
    pages(table_rows=3)
    monkeypatch.setattr(removal, "PAGE", 3)
    monkeypatch.setattr(saving, "FRAME_BYTES", 1)
    monkeypatch.setattr(tables, "TRASH_S", 0.0)
    for requests in itertools.count(1):
        place = Place(client, f"{namespace}-{requests}", tmp_path / str(requests))
        place.folder.mkdir()
        act = operation(place)
        try:
            with ending_after(requests, "kill"):
                act()
        except Killed:
            if deletes == 2:
                with suppress(Killed):
                    table = put_anew(place, name)
                    with ending_after(requests, "kill"):
                        table.delete()
            table = put_anew(place, name)
            stored, named = values_of(client, table)
            beside = tables.examine_table(client, place.namespace, name).beside
            if client.execute("HEXISTS", table._index.keys.task, "beside"):
                assert beside == len(stored - named)  # doctor names them
            else:  # the table was there still
                assert not stored - named
            assert table.get(["anew"], ["x"])["x"] == ["anew"]
            table.delete()
            keys = client.execute("KEYS", f"redrb:{{{place.namespace}:table:{name}*")
            assert [key for key in keys if not key.endswith(b":removed")] == []  # who did it
        else:
            break
    client.close()
    assert requests > 5


def put_anew(place: Place, name: str) -> Table:
    table = place.table(name)
    table.put(["anew"], {"x": ["anew"]})
    return table


def test_a_table_that_is_left_is_seen_and_is_no_table(open_table, client, namespace):
    """Between its index and its values: everybody but `redrb rm` takes it for deleted."""
    table = open_table()
    table.put(["a", "b"], {"x": [1, 2]})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(removal, "empty_trash", lambda *_: exec("raise Killed"))
        table.delete()
    assert client.execute("HKEYS", table._index.keys.task) == [b"left"]
    assert list(Registry(client, namespace).names("table")) == ["train"]
    for call in (table.stats, lambda: Table(client, "train", namespace=namespace, create=False)):
        with pytest.raises(UnknownTask):
            call()
    table.put(["c"], {"x": [3]})  # creates it anew
    assert table.tags().rows == {"c": {}}
    assert redrb.Table(client, "train", namespace=namespace, create=False).stats().counts.rows == 1
