"""Publishers, readers and servers that are killed at every point: weights stay whole."""

import multiprocessing
import signal
import time

import pytest
import torch

import redrb
from redrb.errors import WeightError
from redrb.weights.publishing import upload
from redrb.weights.reading import catalogue
from tests.faults import weight_workers as workers
from tests.faults.weight_workers import ELEMENTS, KINDS, POINTS, state
from tests.published import (
    CHUNK_BYTES,
    check_nothing_left,
    entries,
    named_keys,
    prefix,
    stored_keys,
)

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.faults.weight_workers"])


@pytest.fixture
def client(real_url):
    with redrb.connect(real_url) as client:
        yield client


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(CHUNK_BYTES, 1024)


def started(function, *arguments):
    process = processes.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def check_killed(process):
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def points_of(kind):
    skipped = {"full": {"pieces"}, "delta": {"chunks"}, "anchor": set()}[kind]
    return [point for point in POINTS if point not in skipped]


def zeros():
    return {"a": torch.zeros(ELEMENTS, dtype=torch.int16)}


def until_expired(client, namespaces):
    deadline = time.monotonic() + 30
    while any(set(stored_keys(client, n)) != named_keys(client, n) for n in namespaces):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_publisher_killed_at_any_point(client, real_url, namespace, kind, small_chunks):
    names = {point: f"{namespace}-{point}" for point in points_of(kind)}
    for name in names.values():  # a task that learns of new versions
        redrb.ExperienceStream(client, "task", namespace=name, weights="actor").close()
    dying = [
        started(workers.publish_and_die, real_url, name, kind, point)
        for point, name in names.items()
    ]
    readers = {}
    for process, (point, name) in zip(dying, names.items(), strict=True):
        check_killed(process)
        newest = 2 if point in ("committed", "advancing", "advanced") else 1
        reader, target = redrb.WeightSubscriber(client, "actor", namespace=name), zeros()
        assert reader.poll(target).version == newest, point
        assert torch.equal(target["a"], state(kind, newest)["a"]), point
        readers[point] = (reader, target, newest)
        staged = set(stored_keys(client, name)) - named_keys(client, name)
        count = {"chunks": 3, "pieces": 3}.get(point)
        count = (7 if kind == "anchor" else 0) + 3 if point == "chunks" else count
        assert len(staged) >= (count or 0), point
        if point == "committed":  # the keys of version 1 may be left, for the next publisher
            assert not {key for key in staged if ":1:" not in key}
            continue
        assert bool(staged) == (point in ("chunks", "pieces", "commit")), point
        for key in staged if point != "commit" else ():
            assert 500 < client.execute("TTL", prefix(name) + key) <= 600 + 1
            client.execute("PEXPIRE", prefix(name) + key, 1)  # as if these seconds were over
    until_expired(client, [names[point] for point in names if "commit" not in point])
    for point, name in names.items():
        reader, target, newest = readers[point]
        successor = redrb.WeightPublisher(client, "actor", namespace=name, keep=1)
        published = successor.publish(state(kind, 3))  # and deletes the keys of point "commit"
        assert (published.version, published.kind) == (newest + 1, "full")
        assert reader.poll(target) == published
        assert torch.equal(target["a"], state(kind, 3)["a"])
        check_nothing_left(client, name)


@pytest.mark.parametrize("point", ["begin", "chunks", "commit", "committed"])
def test_a_publisher_of_adapters_killed_at_any_point(
    client, real_url, namespace, point, small_chunks
):
    check_killed(started(workers.publish_adapter_and_die, real_url, namespace, point))
    newest = 3 if point == "committed" else 2
    reader = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    target = torch.nn.Sequential(torch.nn.Linear(512, 8, bias=False))
    assert reader.poll(target).version == newest
    assert (target[0].weight == 4.0 * (newest - 1)).all()  # four ranks of ones times B
    with redrb.WeightPublisher(client, "actor", namespace=namespace, keep=1) as successor:
        assert successor.publish_lora(workers.adapter(5)).version == newest + 1
        assert reader.poll(target).version == newest + 1
        assert (target[0].weight == 20.0).all()
        for key in stored_keys(client, namespace):
            if client.execute("TTL", prefix(namespace) + key) > 0:  # as if its time were over
                client.execute("DEL", prefix(namespace) + key)
    check_nothing_left(client, namespace)


def test_a_reader_killed_in_mid_fetch(client, real_url, namespace, small_chunks):
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, keep=1, deltas=False)
    publisher.publish(state("full", 1))
    check_killed(started(workers.fetch_and_die, real_url, namespace))
    publisher.publish(state("full", 2))
    assert list(entries(client, namespace)) == [1, 2]
    pins = f"{prefix(namespace)}pins"
    reader, pin = client.execute("HGETALL", pins)
    low, high, *_ = pin.split()
    client.execute("HSET", pins, reader, b"%s %s 1" % (low, high))  # as if its time were over
    publisher.publish(state("full", 3))
    assert list(entries(client, namespace)) == [3]
    check_nothing_left(client, namespace)


@pytest.mark.parametrize("kind", KINDS)
def test_a_publisher_that_wakes_up_after_another_took_over(
    client, real_url, namespace, kind, small_chunks
):
    here, there = processes.Pipe()
    old = started(workers.publish_and_pause, real_url, namespace, kind, there)
    assert here.poll(60)
    assert here.recv() == "staged"
    new = redrb.WeightPublisher(client, "actor", namespace=namespace, keep=1)
    assert new.publish(state(kind, 5)).version == 2
    here.send("go on")
    assert here.poll(60)
    assert here.recv() == "fenced"
    old.join(60)
    assert old.exitcode == 0
    reader, target = redrb.WeightSubscriber(client, "actor", namespace=namespace), zeros()
    assert reader.poll(target).version == 2
    assert torch.equal(target["a"], state(kind, 5)["a"])
    check_nothing_left(client, namespace)


def restarting(monkeypatch, server, module, name, *, at):
    """Restart the server within the call number `at` of a function."""
    calls, original = [], getattr(module, name)

    def restarted(*arguments, **options):
        calls.append(1)
        if len(calls) == at:
            server.kill()
            server.start()
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, restarted)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "lost"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_server_that_restarts_in_mid_fetch(
    own_server, namespace, monkeypatch, small_chunks, kept, in_place
):
    server = own_server(*(["--appendonly", "yes"] if kept else []))
    with redrb.connect(server.url) as client:
        publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
        publisher.publish(state("full", 1))
        reader, target = redrb.WeightSubscriber(client, "actor", namespace=namespace), zeros()
        restarting(monkeypatch, server, catalogue, "fetch", at=3)
        if kept:
            assert reader.poll(target, in_place=in_place).version == 1
            assert torch.equal(target["a"], state("full", 1)["a"])
            return
        try:
            assert reader.poll(target, in_place=in_place) is None
        except WeightError:
            assert in_place
        assert reader.version is None
        assert in_place or not target["a"].any()
        assert publisher.publish(state("full", 2)).version == 2
        assert reader.poll(target, in_place=in_place).version == 2
        assert torch.equal(target["a"], state("full", 2)["a"])


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "lost"])
@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_server_that_restarts_in_mid_publish(
    own_server, namespace, monkeypatch, small_chunks, kept, kind
):
    server = own_server(*(["--appendonly", "yes"] if kept else []))
    with redrb.connect(server.url) as client:
        publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
        publisher.publish(state(kind, 1))
        original = upload.upload

        def send(client, values, **options):
            def breaking():
                for number, value in enumerate(values):
                    if number == 3:
                        server.kill()
                        server.start()
                    yield value

            monkeypatch.setattr(upload, "upload", original)
            original(client, breaking(), **options)

        monkeypatch.setattr(upload, "upload", send)
        published = publisher.publish(state(kind, 2))
        assert published.version == 2
        assert published.kind == (kind if kept else "full")
        reader, target = redrb.WeightSubscriber(client, "actor", namespace=namespace), zeros()
        assert reader.poll(target).version == 2
        assert torch.equal(target["a"], state(kind, 2)["a"])
        assert publisher.publish(state("delta", 3)).version == 3
        assert torch.equal(reader.fetch()["a"], state("delta", 3)["a"])
        check_nothing_left(client, namespace)
