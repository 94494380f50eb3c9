"""A Redis Cluster of three primaries: tasks spread over them, slots move, nodes come and go."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

import redrb
from redrb import (
    BatchTimeout,
    ConfigError,
    ExperienceStream,
    Mixture,
    ReplayBuffer,
    StoreUnavailable,
)
from redrb.cli.run.job import delete_namespace
from redrb.connection import Client
from redrb.connection.cluster import Cluster
from redrb.errors import StoreClosed, StoreDenied
from redrb.keys import TaskKeys, maker_key, trainer_key
from redrb.stream.take.forwarding import Forwarded, ForwardOptions
from redrb.train.announcements import (
    Announcement,
    AnnouncementReader,
    announce,
)
from tests.audit import audit
from tests.clusters import Primary, RedisCluster
from tests.samples import numbered, numbers
from tests.servers import Server, free_port

SECRET = "s3cret"


@pytest.fixture
def client(cluster):
    with redrb.connect(cluster.url, retry_s=20) as client:
        yield client


Names = Callable[[Callable[[str], str]], list[str]]


@pytest.fixture
def spread(cluster):
    """Names of which each has its key, which a function returns, on another node."""

    def names(key_of):
        found: dict[int, str] = {}
        for number in count():
            found.setdefault(cluster.serving(key_of(f"n{number}")).port, f"n{number}")
            if len(found) == len(cluster.primaries):
                return list(found.values())
        raise AssertionError

    return names


@pytest.fixture
def tasks(spread, namespace):
    """Three tasks, each on another node."""
    return spread(lambda task: TaskKeys.of(namespace, task).stream)


def other(cluster: RedisCluster, key: str) -> Primary:
    """Return a node that does not serve a key."""
    serving = cluster.serving(key)
    return next(primary for primary in cluster.primaries if primary is not serving)


def stream_of(client: Client, task: str, namespace: str, **settings: Any) -> ExperienceStream:
    return ExperienceStream(client, task, namespace=namespace, **settings)


def test_groups_are_forwarded_once_to_a_task_on_another_node(client, tasks, namespace):
    first, second, _ = (stream_of(client, task, namespace) for task in tasks)
    with first, second:
        second.join_group()
        first.put_many([[numbered(n)] for n in range(4)])
        lease = first.take(4, timeout=0)
        (part,) = lease.parts
        stored: Any = lease.groups()[:2]
        Forwarded(part, list(part.ids)[:2], stored).store(second, ForwardOptions())
        lease.release()  # by the heartbeat, after a process has died
        lease = first.take(4, timeout=0)
        lease.forward(second, lease.groups())
        assert second.stats().ledger.put == 4
        assert numbers(second.take(4, timeout=0)) == [0, 1, 2, 3]
        assert first.stats().ledger.acked == 4


def test_tasks_are_used_on_the_nodes_where_they_are(client, cluster, tasks, namespace):
    for number, task in enumerate(tasks):
        with stream_of(client, task, namespace, order="priority", tags=["n"]) as stream:
            stream.put([numbered(number)], priority=1.0, tags={"n": number})
            stream.put([numbered(number + 10)], priority=2.0, tags={"n": 5})
            assert stream.count(where={"n": 5}) == 1
            with stream.take(1, timeout=0) as lease:
                assert numbers(lease) == [number + 10]
            stream.take(1, timeout=0).reject("bad")
            assert stream.dead_letters()[0].reason == "bad"
            ledger = stream.stats().ledger
            assert (ledger.put, ledger.acked, ledger.dead, ledger.balanced) == (2, 1, 1, True)
            audit(stream)
        assert cluster.serving(TaskKeys.of(namespace, task).stream).run("DBSIZE")


def test_takes_and_puts_that_wait_are_woken_on_each_node(client, tasks, namespace):
    with ThreadPoolExecutor(2 * len(tasks)) as threads:
        streams = [stream_of(client, task, namespace, limit=2) for task in tasks]
        waiting = [threads.submit(stream.take, 2, timeout=30) for stream in streams]
        for stream in streams:
            stream.put([numbered(1)])
        time.sleep(0.2)
        assert not any(take.done() for take in waiting)
        for stream in streams:
            stream.put([numbered(2)])
        leases = [take.result(10) for take in waiting]
        assert [numbers(lease) for lease in leases] == [[1, 2]] * len(tasks)
        blocked = [threads.submit(stream.put, [numbered(3)]) for stream in streams]
        time.sleep(0.2)
        assert not any(put.done() for put in blocked)
        for lease in leases:
            lease.ack()
        for put in blocked:
            put.result(10)


def test_a_mixture_takes_from_tasks_on_different_nodes(client, tasks, namespace):
    for task in tasks:
        with stream_of(client, task, namespace) as stream:
            stream.put_many([[numbered(number)] for number in range(20)])
    shares = dict(zip(tasks, (0.5, 0.25, 0.25), strict=True))
    with Mixture(client, shares, namespace=namespace) as mixture:
        for _ in range(5):
            with mixture.take(8, timeout=5) as lease:
                assert {task: len(ids) for task, ids in lease.ids.items()} == dict(
                    zip(tasks, (4, 2, 2), strict=True)
                )
        assert mixture.taken() == dict(zip(tasks, (20, 10, 10), strict=True))
        with pytest.raises(BatchTimeout):
            mixture.take(8, timeout=0)


def test_an_unused_task_is_named_with_tasks_of_all_nodes(client, tasks, namespace):
    for task in tasks:
        with stream_of(client, task, namespace) as stream:
            stream.put(numbered(1))
    with (
        stream_of(client, f"{tasks[0]}x", namespace) as unused,
        pytest.raises(BatchTimeout, match="Nobody has ever put") as caught,
    ):
        unused.take(1, timeout=0)
    assert caught.value.similar[0] == tasks[0]
    assert set(caught.value.similar) == set(tasks)


def test_a_replay_buffer_has_its_tasks_on_different_nodes(client, tasks, namespace, tmp_path):
    def rollout(number):
        return {
            "rollout_id": number,
            "response": "text",
            "reward": {"score": 1.0},
            "status": "completed",
        }

    async def scenario():
        async with ReplayBuffer(client, namespace=namespace) as buffer:
            for number, task in enumerate(tasks):
                await buffer.put([rollout(number)], task)
            assert await buffer.size() == len(tasks)
            await buffer.save(tmp_path / "replay")
            assert await buffer.is_ready(dict.fromkeys(tasks, 1))
            groups, taken = await buffer.take_batch(dict.fromkeys(tasks, 1))
            assert taken == dict.fromkeys(tasks, 1)
            assert [each[0][0]["rollout_id"] for each in groups.values()] == [0, 1, 2]
        async with ReplayBuffer(client, namespace=uuid.uuid4().hex) as buffer:
            await buffer.resume(tmp_path / "replay")
            assert await buffer.size() == len(tasks)

    asyncio.run(scenario())


def test_a_task_is_saved_and_resumed_on_another_node(client, tasks, namespace, tmp_path):
    with stream_of(client, tasks[0], namespace, order="stalest") as stream:
        stream.put_many([[numbered(number)] for number in range(50)], policy_version=3)
        stream.take(10, timeout=0).ack()
        stream.save(tmp_path / "task")
    with stream_of(client, tasks[1], namespace) as resumed:
        resumed.resume(tmp_path / "task")
        ledger = resumed.stats().ledger  # of the resumed task: it counts anew
        assert (ledger.put, ledger.waiting, ledger.acked) == (40, 40, 0)
        assert sorted(numbers(resumed.take(40, timeout=0))) == list(range(10, 50))
        audit(resumed)


def test_makers_on_all_nodes_hear_of_a_trainer(client, spread, namespace):
    makers = spread(lambda maker: maker_key(namespace, maker))
    boxes = [maker_key(namespace, maker) for maker in makers]
    boxes.append(trainer_key(namespace, "trainer"))
    with ThreadPoolExecutor(len(boxes)) as threads:
        waiting = [threads.submit(AnnouncementReader(client, box).newest, 20) for box in boxes]
        time.sleep(0.1)
        news = Announcement("trainer", 7)
        announce(client, boxes, news)
        assert [wait.result(10) for wait in waiting] == [news] * len(boxes)


def test_weights_reach_tasks_and_readers_on_other_nodes(client, tasks, namespace):
    import torch

    publisher = redrb.WeightPublisher(client, "policy", namespace=namespace)
    streams = [
        stream_of(client, task, namespace, weights="policy", max_staleness=1) for task in tasks
    ]
    for version in (1, 2):
        publisher.publish({"w": torch.full((3, 5), float(version))})
        assert [stream.staleness().current_version for stream in streams] == [version] * 3
    subscriber = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    state = {"w": torch.zeros(3, 5)}
    assert subscriber.poll(state) is not None
    assert state["w"].tolist() == [[2.0] * 5] * 3


def test_the_keys_of_a_demo_run_are_deleted_on_all_nodes(client, cluster, tasks, namespace):
    streams = [stream_of(client, task, namespace) for task in tasks]
    for stream in streams:
        stream.put([numbered(1)])
    for stream in streams:
        stream.close()
    delete_namespace(client, namespace)
    pattern = f"redrb:{{{namespace}:*"
    assert [primary.run("KEYS", pattern) for primary in cluster.primaries] == [[], [], []]


def test_a_slot_that_has_moved_is_followed(client, cluster, tasks, namespace):
    with stream_of(client, tasks[0], namespace) as stream, stream.writer() as writer:
        stream.put([numbered(0)])
        held = stream.take(1, timeout=0)
        writer.put([numbered(1)])
        key = stream._task.store.keys.stream
        to = other(cluster, key)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(stream.take, 3, timeout=30)
            time.sleep(0.2)
            with cluster.moving(key, to):
                pass
            assert cluster.serving(key) is to
            for number in (2, 3):
                writer.put([numbered(number)])
            writer.flush()
            lease = waiting.result(20)
        assert numbers(lease) == [1, 2, 3]
        lease.ack()
        held.ack()
        assert stream.stats().ledger.acked == 4
        audit(stream)


def test_while_a_slot_moves_nothing_is_done_by_half(client, cluster, tasks, namespace):
    streams = [
        stream_of(client, tasks[0], namespace, order="stalest", max_bytes=10**6) for _ in range(4)
    ]
    stream = streams[0]
    stream.put_many([[numbered(number)] for number in range(6)], policy_version=1)
    held = stream.take(2, timeout=0)
    key = stream._task.store.keys.stream
    source, to = cluster.serving(key), other(cluster, key)
    with ThreadPoolExecutor(8) as threads:

        def work():
            doing.append(threads.submit(streams[1].put, [numbered(6)], policy_version=1))
            doing.append(threads.submit(streams[2].take, 2, timeout=30))
            doing.append(threads.submit(streams[3].stats))

        doing: list[Future[Any]] = []
        with cluster.moving(key, to) as keys:
            work()
            doing.append(threads.submit(held.ack))
            time.sleep(0.2)
            first, second = [name for name in keys if name != key], [key]
            for name in [*first[: len(first) // 2], *second]:  # the task's hash goes, or stays
                cluster.migrate(source, to, name)
            time.sleep(0.3)
            assert not any(done.done() for done in doing[:2])
        done = [one.result(10) for one in doing]
        assert sorted(numbers(done[1])) == [2, 3]
        done[1].ack()
    ledger = stream.stats().ledger
    assert (ledger.put, ledger.acked, ledger.waiting, ledger.balanced) == (7, 4, 3, True)
    audit(stream)


def test_puts_and_takes_lose_nothing_while_their_slot_moves(client, cluster, tasks, namespace):
    total, makers = 600, 2
    taken: list[int] = []
    moved_often = threading.Event()
    key = TaskKeys.of(namespace, tasks[0]).stream
    with stream_of(client, tasks[0], namespace, limit=40) as stream:

        def make(maker):
            with (
                stream_of(client, tasks[0], namespace) as maker_stream,
                maker_stream.writer() as writer,
            ):
                for number in range(maker, total, makers):
                    assert number < total - 100 or moved_often.wait(60)
                    writer.put([numbered(number)])

        def train():
            for lease in stream.leases(4, timeout=30):
                taken.extend(numbers(lease))
                if len(taken) == total:
                    lease.ack()
                    return

        with ThreadPoolExecutor(makers + 1) as threads:
            working = [threads.submit(make, maker) for maker in range(makers)]
            working.append(threads.submit(train))
            moves = 0
            while not all(one.done() for one in working):
                with cluster.moving(key, other(cluster, key)):
                    pass
                moves += 1
                if moves > 3:
                    moved_often.set()
                time.sleep(0.02)
            for one in working:
                one.result()
        assert sorted(taken) == list(range(total))
        ledger = stream.stats().ledger
        assert (ledger.put, ledger.acked, ledger.balanced) == (total, total, True)
        audit(stream)


def test_a_primary_that_dies_and_comes_back_is_waited_for(client, cluster, tasks, namespace):
    with stream_of(client, tasks[0], namespace) as stream:
        stream.put([numbered(1)])
        serving = cluster.serving(stream._task.store.keys.stream)
        with ThreadPoolExecutor(2) as threads:
            waiting = threads.submit(stream.take, 2, timeout=30)
            time.sleep(0.1)
            serving.kill()
            put = threads.submit(stream.put, [numbered(2)])
            time.sleep(0.3)
            assert not put.done()
            serving.start()
            put.result(20)
            with waiting.result(20) as lease:
                assert numbers(lease) == [1, 2]
        assert stream.stats().ledger.acked == 2
        audit(stream)
    cluster.wait_until_whole()


def test_a_slot_whose_migration_does_not_end_is_named_in_the_error(cluster, tasks, namespace):
    with (
        redrb.connect(cluster.url, retry_s=0.2) as client,
        stream_of(client, tasks[0], namespace) as stream,
    ):
        key = stream._task.store.keys.stream
        with (
            cluster.moving(key, other(cluster, key)),
            pytest.raises(StoreUnavailable, match="moving the keys") as caught,
        ):
            stream.put([numbered(1)])
        assert not caught.value.uncertain
        stream.put([numbered(2)])
        assert numbers(stream.take(1, timeout=0)) == [2]
        audit(stream)


def test_one_of_the_named_nodes_is_enough(cluster, namespace):
    alive = cluster.primaries[2].port
    with redrb.connect(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{alive}") as client:
        assert len(client.primaries()) == 3
        for number in range(6):
            stream_of(client, f"n{number}", namespace).put([numbered(number)])


def test_a_node_that_evicts_keys_is_refused(cluster):
    first, *_, node = cluster.primaries
    node.run("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        with (
            redrb.connect(f"redis+cluster://127.0.0.1:{first.port}") as client,
            pytest.raises(ConfigError, match=f"{node.port} has maxmemory-policy allkeys-lru"),
        ):
            for each in client.primaries():
                each.execute("PING")
    finally:
        node.run("CONFIG", "SET", "maxmemory-policy", "noeviction")


def test_a_node_that_knows_no_slots_is_not_believed(cluster, namespace):
    stranger = Primary(cluster.primaries[0].program)  # not joined yet
    try:
        for _ in range(6):  # nodes are asked in random order
            url = f"redis+cluster://127.0.0.1:{stranger.port},{cluster.url.partition('://')[2]}"
            with redrb.connect(url) as client:
                assert len(client.primaries()) == 3
                stream_of(client, "n1", namespace).put([numbered(1)])
        with pytest.raises(StoreUnavailable, match="serves no slots"):
            redrb.connect(f"redis+cluster://127.0.0.1:{stranger.port}")
    finally:
        stranger.close()


def test_named_nodes_that_are_silent_or_no_redis_are_passed_over(cluster):
    good = f"127.0.0.1:{cluster.primaries[0].port}"
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        url = f"redis+cluster://127.0.0.1:{silent.getsockname()[1]},{good}"
        with redrb.connect(url, connect_timeout=1.5) as client:
            assert isinstance(client, Cluster)
            client.topology.learn(first=silent.getsockname())  # as after a failure
            assert time.monotonic() - began < 15  # sockets wait for 20 s otherwise
            assert len(client.primaries()) == 3

        def answer():
            for _ in range(3):  # two that were given up, and that of the next client
                connection, _ = silent.accept()
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.close()

        answered = pool.submit(answer)
        with redrb.connect(url) as client:
            assert len(client.primaries()) == 3
        answered.result(timeout=10)


def test_urls_for_one_server_and_for_clusters_are_not_confused(cluster):
    port = cluster.primaries[0].port
    with pytest.raises(ConfigError, match=rf"redis\+cluster://127.0.0.1:{port}"):
        redrb.connect(f"redis://127.0.0.1:{port}/0")
    plain = Server(cluster.primaries[0].program)
    try:
        with pytest.raises(ConfigError, match=rf"use redis://127.0.0.1:{plain.port}"):
            redrb.connect(f"redis+cluster://127.0.0.1:{plain.port}")
    finally:
        plain.close()
    with pytest.raises(ConfigError, match="database 0"):
        redrb.connect(f"{cluster.url}/1")
    away = f"127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnavailable, match=f"no node of the cluster {away}") as caught:
        redrb.connect(f"redis+cluster://:{SECRET}@{away}")
    assert SECRET not in str(caught.value)


def test_a_request_without_a_key_is_refused(client):
    with pytest.raises(ConfigError, match=r"client\.at"):
        client.execute("PING")
    assert [primary.execute("PING") for primary in client.primaries()] == [b"PONG"] * 3


def test_user_and_password_are_those_of_all_nodes(cluster, namespace):
    for primary in cluster.primaries:
        primary.run("ACL", "SETUSER", "maker", "on", f">{SECRET}", "+@all", "~redrb:*")
    url = cluster.url.replace("://", f"://maker:{SECRET}@")
    with redrb.connect(url) as client:
        assert SECRET not in repr(client) + client.where
        assert client.url == url
        for number in range(6):
            with stream_of(client, f"n{number}", namespace) as stream:
                stream.put([numbered(number)])
                assert numbers(stream.take(1, timeout=0)) == [number]
    with pytest.raises(StoreDenied):
        redrb.connect(url.replace(SECRET, "wrong"))


def test_threads_share_a_client_whose_nodes_they_learn_anew(client, cluster, tasks, namespace):
    streams = [stream_of(client, task, namespace) for task in tasks for _ in range(4)]
    go = threading.Barrier(len(streams))

    def put(number):
        go.wait(10)
        for _ in range(10):
            streams[number].put([numbered(number)])

    key = streams[0]._task.store.keys.stream
    with cluster.moving(key, other(cluster, key)):
        pass
    with ThreadPoolExecutor(len(streams)) as threads:
        list(threads.map(put, range(len(streams))))
    assert [len(stream) for stream in streams] == [40] * len(streams)


def test_all_work_ends_when_the_client_is_closed(cluster, tasks, namespace):
    with redrb.connect(cluster.url, retry_s=20) as client:
        stream = stream_of(client, tasks[0], namespace, lease_ms=300)
        stream.put([numbered(1)])
        lease = stream.take(1, timeout=0)
        thread = stream._consumer._heartbeat._thread
    for call in (lease.ack, stream.stats, client.primaries):
        with pytest.raises(StoreClosed):
            call()
    thread.join(5)
    assert not thread.is_alive()
