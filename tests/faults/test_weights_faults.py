"""Weights when processes are killed, connections break and memory runs out."""

import contextlib
import re
import threading
import time

import pytest
import redis
import torch

import redrb
from redrb.errors import PublisherFenced, StoreFull, StoreUnavailable
from redrb.lua import scripts
from redrb.lua.calls import Call
from redrb.weights.publishing import publisher as publishing
from redrb.weights.publishing import upload
from tests.published import prefix

MIB = 1 << 20


def chunk_keys(client, namespace):
    return sorted(client.execute("KEYS", prefix(namespace) + "chunk:*"))


def state(value, count=1000):
    return {"a": torch.full((count,), float(value))}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(publishing, "CHUNK_BYTES", 1024)


def losing(monkeypatch, client, script, *, times, before=False):
    """Break the connection around calls of `script`, after they were done or before."""
    original, left = client.once, [times]
    names = {scripts.load(script).sha, scripts.load(script).text}

    def once(*arguments):
        lost = not names.isdisjoint(arguments) and left[0] > 0
        left[0] -= lost
        if lost and before:
            raise redis.ConnectionError("lost before it was sent")
        reply = original(*arguments)
        if lost:
            raise redis.ConnectionError("lost before the reply")
        return reply

    monkeypatch.setattr(client, "once", once)


@pytest.mark.parametrize("script", ["weights/take_over", "weights/begin", "weights/commit"])
@pytest.mark.parametrize("before", [False, True])
def test_a_lost_connection_changes_nothing(
    client, namespace, monkeypatch, small_chunks, script, before
):
    redrb.WeightPublisher(client, "actor", namespace=namespace).publish(state(1))
    losing(monkeypatch, client, script, times=2, before=before)
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
    assert publisher.publish(state(2)).version == 2
    subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    assert [version.version for version in subscriber.versions()] == [1, 2]
    assert (subscriber.fetch()["a"] == 2).all()
    assert len(chunk_keys(client, namespace)) == 2 * 4


def test_a_commit_whose_reply_never_came_keeps_its_chunks(
    url, namespace, monkeypatch, small_chunks
):
    with redrb.connect(url, retry_s=0.2) as client:
        publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
        with monkeypatch.context() as patch:
            losing(patch, client, "weights/commit", times=1000)
            with pytest.raises(StoreUnavailable) as caught:
                publisher.publish(state(1))
        assert caught.value.uncertain
        subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        assert (subscriber.fetch(1)["a"] == 1).all()
        assert publisher.publish(state(2)).version == 2
        assert (subscriber.fetch(1)["a"] == 1).all()


def test_a_commit_that_was_never_sent_leaves_nothing(url, namespace, monkeypatch, small_chunks):
    with redrb.connect(url, retry_s=0.2) as client:
        publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
        with monkeypatch.context() as patch:
            losing(patch, client, "weights/commit", times=1000, before=True)
            with pytest.raises(StoreUnavailable):
                publisher.publish(state(1))
        assert chunk_keys(client, namespace) == []
        assert publisher.publish(state(2)).version == 1


def test_a_commit_that_arrives_late_is_not_the_next_attempt(
    client, namespace, monkeypatch, small_chunks
):
    """The first attempt's commit is still on its way while the second uploads the same version."""
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
    late = []

    def hold_back(call, client, keys, *beside, original=Call.run_with_bytes):
        if call.script == "weights/commit" and not late:
            late.append((call, client, keys, *beside))
            raise StoreUnavailable("timed out", where=client.where, uncertain=True)
        return original(call, client, keys, *beside)

    monkeypatch.setattr(Call, "run_with_bytes", hold_back)
    monkeypatch.setattr(publisher._committer, "discard", lambda *_: None)
    with pytest.raises(StoreUnavailable):
        publisher.publish(state(1))

    send = upload.upload

    def send_then_late_commit(*arguments, **options):
        send(*arguments, **options)
        call, *rest = late[0]
        assert call.run(*rest).outcome == "gone"

    monkeypatch.setattr(upload, "upload", send_then_late_commit)
    assert publisher.publish(state(2)).version == 1
    subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    assert (subscriber.fetch()["a"] == 2).all()


def test_killed_connections_are_made_again(real_url, namespace):
    """Connections break all the time while versions are published, fetched and waited for."""
    done = threading.Event()
    with redrb.connect(real_url) as client, redrb.connect(real_url) as killer:

        def kill():
            pause = 0.02
            while not done.wait(pause):
                pause = min(1.0, 1.02 * pause)  # a busy machine needs longer for anything at all
                with contextlib.suppress(StoreUnavailable):
                    killer.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        saboteur = threading.Thread(target=kill)
        saboteur.start()
        try:
            publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
            subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
            live = state(0, 5_000_000)
            for value in range(1, 6):
                publisher.publish(state(value, 5_000_000))
                assert subscriber.wait(timeout=10).version == value
                assert subscriber.poll(live).version == value
                assert (live["a"] == value).all()
        finally:
            done.set()
            saboteur.join()


def test_wait_survives_a_restart_of_the_server(own_server, namespace):
    server = own_server("--appendonly", "yes")
    with redrb.connect(server.url) as client:
        publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
        publisher.publish(state(1))
        subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        found = []
        waiter = threading.Thread(target=lambda: found.append(subscriber.wait(1, timeout=20)))
        waiter.start()
        time.sleep(0.2)
        server.kill()
        server.start()
        assert publisher.publish(state(2)).version == 2
        waiter.join(10)
        assert found[0].version == 2


def test_wait_gives_up_in_time_when_the_server_is_away(own_server, namespace):
    server = own_server()
    with redrb.connect(server.url, retry_s=60) as client:
        subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        assert subscriber.latest() is None
        server.kill()
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            subscriber.wait(timeout=0.5)
        assert time.monotonic() - started < 30  # the client's time is a minute


def test_no_memory_leaves_the_old_version_and_nothing_else(own_server, namespace):
    server = own_server("--maxmemory", "24mb", "--maxmemory-policy", "noeviction")
    with redrb.connect(server.url) as client:
        publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, keep=1)
        publisher.publish(state(1, MIB))
        before = chunk_keys(client, namespace)
        with pytest.raises(StoreFull, match="lower keep=") as caught:
            publisher.publish(state(2, 8 * MIB))
        assert caught.value.reason == "memory"
        assert chunk_keys(client, namespace) == before
        subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        assert (subscriber.fetch()["a"] == 1).all()
        assert publisher.publish(state(3, MIB)).version == 2


def test_staged_chunks_are_committed_even_at_the_memory_limit(own_server, namespace, monkeypatch):
    server = own_server("--maxmemory", "32mb", "--maxmemory-policy", "noeviction")
    with redrb.connect(server.url) as client:
        publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)

        def send_then_limit(*arguments, original=upload.upload, **options):
            original(*arguments, **options)
            client.execute("CONFIG", "SET", "maxmemory", "8mb")
            with pytest.raises(StoreFull):
                client.execute("SET", "filler", b"x" * MIB)

        monkeypatch.setattr(upload, "upload", send_then_limit)
        assert publisher.publish(state(1, 3 * MIB)).version == 1
        subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        assert (subscriber.fetch()["a"] == 1).all()
        redrb.WeightPublisher(client, "actor", namespace=namespace)
        with pytest.raises(PublisherFenced):
            publisher.publish(state(2, 10))


def test_wait_blocks_for_less_than_a_connection_may_be_silent(real_url, namespace):
    with redrb.connect(f"{real_url}?socket_timeout=0.4") as client:
        subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        subscriber.latest()
        before = client.execute("INFO", "stats")
        with pytest.raises(redrb.errors.WeightTimeout):
            subscriber.wait(timeout=1)
        assert connections(client.execute("INFO", "stats")) == connections(before)


def connections(stats):
    return re.search(rb"total_connections_received:(\d+)", stats)[1]
