"""Weights on a Redis Cluster: chunks on all nodes; a killed publisher leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import redrb
from redrb import WeightPublisher, WeightSubscriber
from redrb.connection import Client
from redrb.weights.publishing import upload
from redrb.weights.wire import chunks, stored_keys


class Died(BaseException):
    """What ends a publisher at some point."""


@pytest.fixture
def client(cluster):
    with redrb.connect(cluster.url, retry_s=20) as client:
        yield client


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("redrb.weights.publishing.publisher.CHUNK_BYTES", 1024)


@pytest.fixture
def publisher(client, namespace):
    return WeightPublisher(client, "actor", namespace=namespace, anchor_every=4, keep=1)


@pytest.fixture
def reader(client, namespace):
    return WeightSubscriber(client, "actor", namespace=namespace)


@pytest.fixture
def keys(client, namespace):
    """Chunks and pieces of deltas on all nodes, and how long they still live (ms, -1: for good)."""

    def found():
        names = [
            key.decode()
            for node in client.primaries()
            for key in node.execute("KEYS", f"redrb:{{{namespace}:weights:actor:*")
        ]
        return {name: client.at(name).execute("PTTL", name) for name in names}

    return found


def state(step: int) -> dict[str, Tensor]:
    """Return weights of which two elements differ from step to step."""
    values = torch.arange(20_000.0)
    values[[7, 19_000]] += step
    return {"a": values, "b": torch.full((30,), float(step))}


def same(found: dict[str, Tensor], step: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in state(step).items())


def dying(monkeypatch: pytest.MonkeyPatch, where: str, *, after: bool = False) -> None:
    """Let the next publisher die at a function of `spreading`."""
    original = getattr(stored_keys, where)

    def die(*arguments: object) -> None:
        monkeypatch.setattr(stored_keys, where, original)
        if after:
            original(*arguments)
        raise Died

    monkeypatch.setattr(stored_keys, where, die)


def test_chunks_are_on_all_nodes_and_readers_are_right(publisher, reader, client, cluster, keys):
    target = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    kinds = []
    for step in range(10):
        kinds.append(publisher.publish(state(step)).kind)
        reader.poll(target)
        assert same(target, step)
    assert kinds == ["full", "delta", "delta", "delta"] * 2 + ["full", "delta"]
    assert set(keys().values()) == {-1}
    serving = {cluster.serving(name).port for name in keys()}
    assert len(serving) == len(cluster.primaries)
    # the newest full version and its delta; chunks that did not change are the first one's
    assert sum(":delta:" in name for name in keys()) <= 2
    assert sum(":chunk:" in name for name in keys()) == -(-80_128 // 1024)


def test_chunks_of_a_publisher_that_dies_before_it_has_prepared_expire(
    publisher, reader, keys, monkeypatch
):
    publisher.publish(state(0))
    before = keys()
    monkeypatch.setattr(publisher._committer, "commit", lambda *_: (_ for _ in ()).throw(Died))
    monkeypatch.setattr(publisher._committer, "discard", lambda *_: None)  # it is dead
    with pytest.raises(Died):
        publisher.publish(state(1))
    left = {name: ttl for name, ttl in keys().items() if name not in before}
    assert left
    assert all(0 < ttl <= 3_600_000 for ttl in left.values())
    assert {name: keys()[name] for name in before} == before  # those of version 1 stay for good
    assert same(reader.fetch(), 0)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["keep", "clean"])
def test_the_next_publisher_deletes_what_one_left_that_died(
    client, namespace, reader, keys, monkeypatch, where, after
):
    """It dies while it makes keys permanent, or deletes those of versions that are not kept."""
    options = {"namespace": namespace, "deltas": False, "keep": 1}
    first = WeightPublisher(client, "actor", **options)
    first.publish({"a": torch.zeros(5000)})
    dying(monkeypatch, where, after=after)
    monkeypatch.setattr(first._committer, "discard", lambda *_: None)  # it is dead
    with pytest.raises(Died):
        first.publish({"a": torch.ones(5000)})
    assert torch.equal(reader.fetch()["a"], torch.full((5000,), float(where == "clean")))
    second = WeightPublisher(client, "actor", **options)
    second.publish({"a": torch.full((5000,), 2.0)})
    assert set(keys().values()) == {-1}
    assert len(keys()) == -(-20_032 // 1024)
    assert torch.equal(reader.fetch()["a"], torch.full((5000,), 2.0))


def test_a_failed_attempt_is_taken_away_from_all_nodes(publisher, reader, keys, monkeypatch):
    publisher.publish(state(0))
    before = keys()
    monkeypatch.setattr(publisher._committer, "commit", lambda *_: (_ for _ in ()).throw(Died))
    with pytest.raises(Died):
        publisher.publish({"a": torch.ones(30_000)})
    assert keys() == before
    assert same(reader.fetch(), 0)


def test_chunks_dropped_during_the_commit_are_sent_again(
    publisher, reader, client, keys, monkeypatch
):
    publisher.publish(state(0))
    attempts, kept = [], stored_keys.keep

    def upload_and(attempt, *arguments, **named):
        attempts.append(attempt)
        return uploaded(attempt, *arguments, **named)

    def keep(*arguments):
        whole = kept(*arguments)
        if len(attempts) == 1:  # just now
            publisher._committer.discard(attempts[0])
        return whole

    uploaded = upload.Upload.upload
    monkeypatch.setattr(upload.Upload, "upload", upload_and)
    monkeypatch.setattr(stored_keys, "keep", keep)
    assert publisher.publish(state(1)).version == 2
    assert len(attempts) == 2
    assert same(reader.fetch(), 1)
    assert set(keys().values()) == {-1}


def test_all_slots_are_asked_before_the_first_reply_is_read(publisher, reader, monkeypatch):
    """So that the nodes send side by side."""
    weights = {"a": torch.randn(8 * 256)}  # 8 chunks, in 8 slots
    publisher.publish(weights)
    events: list[str] = []
    begin, receive = Client.begin, chunks._receive

    def begun(client, pipeline):
        events.append("asked")
        return begin(client, pipeline)

    def received(connection, value):
        events.append("received")
        receive(connection, value)

    monkeypatch.setattr(Client, "begin", begun)
    monkeypatch.setattr(chunks, "_receive", received)
    target = {"a": torch.zeros(8 * 256)}
    reader.poll(target)
    assert torch.equal(target["a"], weights["a"])
    assert events[events.index("received") :] == ["received"] * 8
    assert events.count("asked") >= 8
