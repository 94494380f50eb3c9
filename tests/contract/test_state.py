"""The state of a namespace equals what its streams say, and is read with bounded work."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

import redrb
from redrb.connection import Client
from redrb.errors import StoreDenied, UnknownTask
from redrb.stream import ExperienceStream
from redrb.stream.task.calls import Announce
from redrb.watch.state.model import Staleness, WorkerState
from redrb.watch.state.observer import LOOK_S, Observer
from redrb.watch.state.reader import StateReader
from tests.samples import numbered
from tests.servers import Server


def item(version: int | None = None) -> redrb.BufferItem:
    return numbered(1, policy_version=version)


def test_a_state_has_the_figures_of_each_task(client: Client, namespace: str) -> None:
    with (
        ExperienceStream(client, "code", namespace=namespace) as code,
        ExperienceStream(
            client, "math", namespace=namespace, order="stalest", max_staleness=4, limit=10
        ) as math,
    ):
        code.put([item(1)])
        for version in (3, 5, 7, 7):
            math.put([item(version), item(version)])
        math.advance(7)
        lease = math.take(1, timeout=5)
        state = StateReader(client, namespace).look()
        assert [task.name for task in state.tasks] == ["code", "math"]
        assert state.tasks_total == 2
        found = state.task("math")
        assert found is not None
        assert found.main is not None
        assert found.main.stats == math.stats()
        assert found.order == "stalest"
        assert found.settings == {"limit": "10", "max_staleness": "4"}
        assert found.stored_bytes > 0
        assert (found.memory_bytes or 0) > found.stored_bytes or "fake" in client.where
        waiting, leased = found.main.staleness.waiting, found.main.staleness.leased
        assert (waiting.counts[:3], waiting.mean, waiting.largest) == ((2, 0, 1), 2 / 3, 2)
        assert (leased.counts[3], leased.largest, leased.sampled) == (1, 4, False)
        assert found.main.staleness.taken.largest == 4
        lease.ack()
        [server] = state.servers
        assert server.used_memory > 0 or "fake" in client.where
        assert abs(state.time - time.time()) < 60


def test_a_task_without_a_weight_version_has_no_staleness(client: Client, namespace: str) -> None:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put([item()])
        [task] = StateReader(client, namespace).look().tasks
        assert task.main is not None
        assert not task.main.stats.joined
        stream.join_group()
        [task] = StateReader(client, namespace).look().tasks
        assert task.main is not None
        assert (task.main.staleness.waiting.total, task.main.staleness.waiting.unknown) == (0, 1)
        assert task.main.name == "default"


def test_consumer_groups_come_in_order(client: Client, namespace: str) -> None:
    for group in ("b", "default", "a"):
        with ExperienceStream(client, "math", namespace=namespace, group=group) as stream:
            stream.join_group()
    [task] = StateReader(client, namespace).look().tasks
    assert [group.name for group in task.groups] == ["default", "a", "b"]
    [task] = StateReader(client, namespace, group="b").look().tasks
    assert [group.name for group in task.groups] == ["b", "a", "default"]


def test_rates_are_those_between_two_looks(client: Client, namespace: str) -> None:
    reader = StateReader(client, namespace)
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put([item()])
        assert reader.look().tasks[0].rates is None
        stream.put([item(), item()])
        time.sleep(0.25)  # rates are figures of some time
        [task] = reader.look().tasks
        assert task.rates is not None
        assert task.rates.put == pytest.approx(1 / task.rates.over_s)
        assert task.rates.samples_put == pytest.approx(2 / task.rates.over_s)


def test_a_task_that_was_asked_for_must_exist(client: Client, namespace: str) -> None:
    with pytest.raises(UnknownTask):
        StateReader(client, namespace, tasks=["math"]).look()
    assert StateReader(client, namespace).look().tasks == ()


def test_announcements_are_not_trusted(client: Client, namespace: str) -> None:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put([item()])
        keys = stream._task.store.keys
        good: dict[str, Any] = {"role": "maker", "host": "a\x1b[2Jb", "pid": 7, "period_s": 3.0}
        packed = {
            "good": msgpack.packb(good | {"metrics": {"re\nward": 0.5}, "of a newer redrb": [1]}),
            "negative": msgpack.packb(good | {"groups": -1}),
            "huge": msgpack.packb(good | {"groups": 2**63}),
            "endless": msgpack.packb(good | {"uptime_s": float("inf")}),
            "no number": msgpack.packb(good | {"metrics": {"loss": float("nan")}}),
            "many": msgpack.packb(good | {"metrics": {str(n): 0.5 for n in range(17)}}),
            "waits": msgpack.packb(good | {"waits_for": "x"}),
            "no text": msgpack.packb(good | {"label": b"\xff"}),
            "two": msgpack.packb(good) + b"\xc0",
            "no role": msgpack.packb({"role": "king"}),
            "long": msgpack.packb(good | {"host": "h" * 2000}),
            "broken": b"\xc1",
        }
        seconds, _ = client.execute("TIME")
        for name, blob in packed.items():
            client.at(keys.stream).execute(
                "HSET", f"{keys.prefix}announcements", name, b"7 " + blob
            )
            client.at(keys.stream).execute(
                "ZADD", f"{keys.prefix}workers", int(seconds) * 1000, name
            )
        [task] = StateReader(client, namespace).look().tasks
        workers = {worker.name: worker for worker in task.workers}
        assert workers.keys() - {stream.worker.name} == {"good"}
        assert workers["good"].host == "a�[2Jb"
        assert workers["good"].metrics == {"re�ward": 0.5}


@pytest.mark.parametrize("settings", [{"order": "stalest"}, {"max_staleness": 9000}, {}])
def test_waiting_groups_are_counted_by_staleness(
    client: Client, namespace: str, settings: dict[str, Any]
) -> None:
    reader = StateReader(client, namespace)
    options = {"namespace": namespace, "checks": (), **settings}
    with ExperienceStream(client, "math", **options) as stream:
        stream.join_group()
        stream.put_many([[item(version)] for version in (160, 105, 105, 103)])
        stream.put(item())
        stream.advance(105)
        found = staleness_of(reader).waiting
        assert (found.counts, found.unknown) == ((3, 0, 1, 0, 0, 0, 0, 0), 1)
        assert (found.mean, found.largest, found.sampled) == (0.5, 2, False)
        stream.put_many([[item(5)] for _ in range(100)])
        found = staleness_of(reader).waiting
        if settings:
            assert (found.counts[0], found.counts[-1], found.sampled) == (3, 100, False)
            assert found.mean is not None
            assert 60 < found.mean < 70  # of those beyond 32 it is not known
        else:
            assert (found.total + found.unknown, found.sampled) == (64, True)
        assert found.largest == 100
        lease = stream.take(80, timeout=0)
        leased = staleness_of(reader).leased
        assert (leased.total + leased.unknown, leased.sampled) == (64, True)
        lease.ack()


def staleness_of(reader: StateReader) -> Staleness:
    """Return the staleness of the first consumer group of the first task."""
    return reader.look().tasks[0].groups[0].staleness


def test_a_look_reads_only_new_announcements(client: Client, namespace: str) -> None:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put([item()])
        keys, at = stream._task.store.keys, stream._task.store.client
        reader = StateReader(client, namespace)

        def announce(name: str, groups: int, *, ended: bool = False) -> None:
            said = {"role": "maker", "period_s": 60.0, "groups": groups, "ended": ended}
            stream._task.store.call(Announce(name, ended), msgpack.packb(said))

        def known() -> dict[str, tuple[int, str]]:
            workers = reader.look().tasks[0].workers
            return {one.name: (one.groups, one.life) for one in workers}

        announce("a", 1)
        announce("b", 1)
        assert known() == {"a": (1, "live"), "b": (1, "live")}
        at.execute("HSET", f"{keys.prefix}announcements", "a", msgpack.packb({"role": "trainer"}))
        earlier_ms = int(at.execute("TIME")[0]) * 1000 - 5000
        at.execute("ZADD", f"{keys.prefix}workers", earlier_ms, "a")
        announce("b", 2)
        assert known() == {"a": (1, "live"), "b": (2, "live")}  # "a" has said nothing since
        announce("b", 3, ended=True)
        assert known() == {"a": (1, "live"), "b": (3, "ended")}
        ended = next(one for one in reader.look().tasks[0].workers if one.name == "b")
        assert ended.seen_s < 60
        at.execute("ZREM", f"{keys.prefix}workers", "a", "b")
        known()
        assert known() == {}
        announce("b", 4)
        assert known() == {"b": (4, "live")}
        stream.clear()
        stream.put([item()])
        announce("c", 1)
        assert known().keys() == {"c"}


def test_workers_that_are_over_are_not_counted(client: Client, namespace: str) -> None:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put([item()])
        keys, at = stream._task.store.keys, stream._task.store.client
        said = msgpack.packb({"role": "maker", "period_s": 60.0})
        for name in ("a", "b"):
            stream._task.store.call(Announce(name, ended=False), said)
        long_ago_ms = int(at.execute("TIME")[0]) * 1000 - 600_001
        at.execute("ZADD", f"{keys.prefix}workers", long_ago_ms, "a")
        [task] = StateReader(client, namespace).look().tasks
        assert ([one.name for one in task.workers], task.workers_total) == (["b"], 1)


@pytest.mark.parametrize("ended_s", [0, 50, 70, 300, 550])
def test_a_dead_worker_stays_replaced_when_its_successor_has_ended(
    client: Client, namespace: str, ended_s: int
) -> None:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put([item()])
        keys, at = stream._task.store.keys, stream._task.store.client

        def announce(name: str, ago_s: int, uptime_s: float, *, ended: bool = False) -> None:
            said = {"role": "trainer", "period_s": 2.5, "lease_s": 20.0, "uptime_s": uptime_s}
            packed = msgpack.packb(said | {"ended": ended})
            stream._task.store.call(Announce(name, ended), packed)
            at.execute("ZINCRBY", f"{keys.prefix}workers", -1000 * ago_s, name)

        announce("dead", ended_s + 30, 100.0)
        announce("next", ended_s, 20.0, ended=True)
        announce("other", 0, 3600.0)  # each announcement removes some that are over
        for reader in [StateReader(client, namespace) for _ in range(2)]:
            [task] = reader.look().tasks
            names = {one.name for one in task.workers}
            assert names == {"other", *(["next"] if ended_s < 60 else [])}
            assert task.workers_total == len(names)


def test_an_observer_never_waits_for_a_stopped_server(
    own_server: Callable[..., Server], namespace: str
) -> None:
    server = own_server()
    with redrb.connect(server.url) as client, Observer(client, namespace, every_s=0.05) as observer:
        view = observer.wait(0, 10)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            while not view.error:  # the look that was under way
                view = observer.wait(view.number, 10)
            seconds = []  # a look at the server would take LOOK_S each time
            for _ in range(5):
                began = time.monotonic()
                newest = observer.newest()
                seconds.append(time.monotonic() - began)
            assert min(seconds) < LOOK_S / 2
            assert newest.state is not None
            assert newest.age_s > 1.0
            assert "not reachable" in newest.error
        finally:
            os.kill(server.pid, signal.SIGCONT)
        while view.error:
            view = observer.wait(view.number, 10, error=view.error)
        assert view.state is not None
        assert view.state.time > newest.state.time


def test_an_observer_follows_and_never_waits(client: Client, namespace: str) -> None:
    with Observer(client, namespace, every_s=0.05) as observer:
        assert observer.wait(0, 5).number == 1
        with ExperienceStream(client, "math", namespace=namespace) as stream:
            stream.put([item()])
            for _ in range(2):  # the look that is under way may be from before the put
                observer.wait(observer.newest().number, 5)
        assert [point.waiting for point in observer.history.of("math")][-1] == 1


def test_a_trainer_and_a_maker_announce_themselves(client: Client, namespace: str) -> None:
    options = {"namespace": namespace, "lease_ms": 300}
    with (
        ExperienceStream(client, "math", **options) as made,
        ExperienceStream(client, "math", **options) as trained,
    ):
        made.worker.label, made.worker.weight_version = "maker-1", 7
        made.worker.metrics = {"reward": 0.5}
        made.put([item(), item()])
        lease = trained.take(1, timeout=5)
        lease.ack()
        workers = announced(
            client, namespace, lambda found: "maker" in found and found.get("trainer", (0,))[0] == 1
        )
        assert workers["maker"][1].label == "maker-1"
        assert workers["maker"][1].weight_version == 7
        assert workers["maker"][1].metrics == {"reward": 0.5}
        assert workers["maker"][1].pid == os.getpid()
        assert workers["trainer"][1].samples == 2
        with pytest.raises(redrb.BatchTimeout):  # a step lasts until the request for the next batch
            trained.take(1, timeout=0.01)
    workers = announced(client, namespace, lambda found: found["maker"][1].life == "ended")
    assert workers["trainer"][1].life == "ended"
    assert workers["trainer"][1].steps == 1
    assert workers["trainer"][1].steps_s > 0


def test_a_worker_says_what_it_waits_for(client: Client, namespace: str) -> None:
    options = {"namespace": namespace, "lease_ms": 300}
    with ExperienceStream(client, "math", **options) as stream, pytest.raises(redrb.BatchTimeout):
        taking = threading.Thread(
            target=lambda: announced(
                client, namespace, lambda found: found["trainer"][1].waits_for == "batch"
            ),
            daemon=True,
        )
        taking.start()
        stream.take(1, timeout=1.5)
    taking.join(10)
    assert not taking.is_alive()


def test_a_maker_waits_for_an_inference_server_that_is_away(client: Client, namespace: str) -> None:
    with ExperienceStream(client, "math", namespace=namespace, lease_ms=300) as stream:
        stream.worker.engine = SimpleNamespace(away_s=40.0, where=f"http://{'h' * 60}:8000")
        stream.put(numbered(1))
        workers = announced(client, namespace, lambda found: "maker" in found)
        assert workers["maker"][1].waits_for == "engine"
        assert workers["maker"][1].waits_s >= 40
        assert workers["maker"][1].engine == stream.worker.engine.where
        stream.worker.engine.away_s = 0.0
        announced(client, namespace, lambda found: found["maker"][1].waits_for == "")


def announced(
    client: Client, namespace: str, wanted: Callable[[dict[str, tuple[int, WorkerState]]], bool]
) -> dict[str, tuple[int, WorkerState]]:
    """Return groups and state of each role, once they are as wanted."""
    with Observer(client, namespace, every_s=0.05) as observer:
        number, until = -1, time.monotonic() + 60
        while time.monotonic() < until:
            view = observer.wait(number, 5)
            number = view.number
            tasks = view.state.tasks if view.state else ()
            found = {one.role: (one.groups, one) for task in tasks for one in task.workers}
            try:
                if found and wanted(found):
                    return found
            except KeyError:
                continue
    raise AssertionError("nothing was announced as wanted")


def test_a_maker_that_may_not_announce_itself_says_so_once_and_goes_on(
    client: Client,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StoreDenied("this user may not run ZADD")

    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put([item()])
        monkeypatch.setattr(Announce, "run", refuse)
        for _ in range(2):
            stream.worker.beat()
        stream.put([item()])
    assert caplog.text.count("do not see this maker") == 1
