"""Doctor finds troubles that are really made, repairs what is safe, and a whole task has none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

import redrb
from redrb import ExperienceStream
from redrb.connection import Client
from redrb.keys import WeightKeys
from redrb.registry import Registry
from redrb.watch.doctor import latency, servers
from redrb.watch.doctor.checkup import Checkup, Report, report_on
from redrb.watch.doctor.repairs import Repair, repair
from redrb.watch.state.model import State, TaskState, WeightsState
from redrb.watch.state.reader import server_state
from tests import warm
from tests.audit import kill_consumer
from tests.clocks import ClockedServer
from tests.clusters import RedisCluster
from tests.conftest import REAL
from tests.finding_commands import check_command
from tests.proxy import Proxy
from tests.samples import numbered, numbers
from tests.servers import Server

OwnServer = Callable[..., Server]

OF_SERVERS = {
    *("no-persistence", "snapshots-only", "no-memory-limit", "libc-allocator", "slow-link"),
    *("latency-spikes", "many-clients", "below-security-fixes"),
    "unknown-security-fixes",
}
"""Codes that depend on how the test's server was started, and on its machine."""


def state_of(client: Client, namespace: str, **changes: object) -> State:
    """A state of the registry's tasks that shows no trouble itself."""
    tasks = tuple(map(TaskState, Registry(client, namespace).names("task")))
    known = {"tasks": tasks, "tasks_total": len(tasks)} | changes
    return State(namespace, client.where, time.time(), url=client.url, **known)  # type: ignore[arg-type]


def checked(client: Client, namespace: str, task: str = "", **changes: object) -> Checkup:
    found = Checkup(client, namespace, lambda: state_of(client, namespace, **changes), task)
    for finding in found.findings:
        check_command(finding, namespace=namespace, url=client.url)
    return found


def codes(found: Checkup) -> list[str]:
    return [finding.code for finding in found.findings if finding.code not in OF_SERVERS]


def repaired(client: Client, found: Checkup) -> list[Repair]:
    return list(repair(client, found.state, found.examined, found.left_names))


def test_a_whole_task_has_no_findings(owner: Client, namespace: str) -> None:
    with ExperienceStream(owner, "math", namespace=namespace, limit=8) as stream:
        stream.put_many([[numbered(number)] for number in range(4)])
        other = ExperienceStream(owner, "math", namespace=namespace, group="other")
        other.join_group()
        lease = stream.take(2, timeout=5)
        stream.take(1, timeout=5).reject("broken")
        lease.ack()
        lease = stream.take(1, timeout=5)
        found = checked(owner, namespace)
        assert codes(found) == []
        assert [each.entries for each in found.examined] == [4]
        assert repaired(owner, found) == []
        lease.release()
        other.close()


def test_a_task_with_parts_has_no_findings(owner: Client, namespace: str) -> None:
    with (
        ExperienceStream(owner, "wide", namespace=namespace) as wide,
        ExperienceStream(owner, "whole", namespace=namespace) as whole,
    ):
        for stream in (wide, whole):
            stream.put_many([[numbered(number)] for number in range(9)])
            stream.take(3, timeout=5).ack()
        whole.put_part("half", numbered(1), index=0, of=2)
        found = checked(owner, namespace)
        assert codes(found) == []


def test_entries_of_failed_puts_are_removed(owner: Client, namespace: str) -> None:
    with ExperienceStream(owner, "math", namespace=namespace, limit=4) as stream:
        stream.put(numbered(1))
        for _ in range(150):
            owner.execute("XADD", stream._task.store.keys.stream, "9999999999999-*", "g", b"x")
        found = checked(owner, namespace, "math")
        assert codes(found) == ["orphaned-entries"]
        assert [one.summary for one in repaired(owner, found)] == ["removed orphaned entries: 150"]
        assert codes(checked(owner, namespace, "math")) == []
        assert stream.stats().producers_waiting == 0
        assert numbers(stream.take(1, timeout=0)) == [1]


def test_a_deleted_entry_is_found(owner: Client, namespace: str) -> None:
    with ExperienceStream(owner, "math", namespace=namespace) as stream:
        first, _ = stream.put_many([[numbered(1)], [numbered(2)]])
        stream.join_group()
        owner.execute("XDEL", stream._task.store.keys.stream, f"9999999999999-{first}")
        found = checked(owner, namespace, "math")
        assert codes(found) == ["different-storage"] * 2
        assert repaired(owner, found) == []


def test_a_key_of_another_type_is_found(owner: Client, namespace: str) -> None:
    with ExperienceStream(owner, "math", namespace=namespace) as stream:
        stream.put(numbered(1))
        owner.execute("SET", f"{stream._task.store.keys.prefix}facts", "x")
        (finding,) = (
            one for one in checked(owner, namespace).findings if one.code not in OF_SERVERS
        )
        assert (finding.code, finding.subject) == ("failed-check", "task math")
        assert "WRONGTYPE" in finding.summary


WORKER = """
import sys, threading
import redrb
from tests.samples import numbered
client = redrb.connect(sys.argv[1])
options = dict(namespace=sys.argv[2], lease_ms=200)
stream = redrb.ExperienceStream(client, "math", **options)
right = redrb.ExperienceStream(client, "begun", **options).admit(2)
lease = stream.take(3)
print("took", flush=True)
stream.put(numbered(9), timeout=60)
"""


@pytest.mark.long
def test_leftovers_of_a_killed_process(owner: Client, namespace: str) -> None:
    """One process takes a batch, holds rights and waits for room when it is killed."""
    bounds = {"max_staleness": 1, "groups_per_version": 4}
    with ExperienceStream(owner, "begun", namespace=namespace, **bounds) as begun:
        begun.join_group()  # and ends: no heartbeat takes the rights back
    with ExperienceStream(owner, "math", namespace=namespace, limit=4) as stream:
        stream.put_many([[numbered(number)] for number in range(4)])
        command = [sys.executable, "-c", WORKER, owner.url, namespace]
        with warm.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "took\n"
            while not stream.stats().producers_waiting:
                pass
            assert codes(checked(owner, namespace)) == []
            process.kill()
        expected = ["dead-consumer", "lost-rights", "stuck-waiters"]
        until = time.monotonic() + 20
        while sorted(codes(found := checked(owner, namespace))) != expected:
            assert time.monotonic() < until, codes(found)
        mended = {one.code: one for one in repaired(owner, found)}
        assert sorted(mended) == ["dead-consumer", "lost-rights"]
        assert all(one.done for one in mended.values())
        assert mended["dead-consumer"].summary.startswith("let 3 groups of dead consumers")
        assert mended["lost-rights"].summary.endswith("took 2 rights back")
        assert codes(checked(owner, namespace)) == []
        stats = stream.stats()
        assert (stats.ledger.waiting, stats.consumers) == (4, 0)
        assert sorted(numbers(stream.take(4, timeout=0))) == [0, 1, 2, 3]


def test_a_consumer_that_died_without_leases(owner: Client, namespace: str) -> None:
    with ExperienceStream(owner, "math", namespace=namespace, lease_ms=200) as stream:
        stream.put(numbered(1))
        stream.take(1, timeout=0).ack()
        kill_consumer(stream)
        found = checked(owner, namespace)
        assert codes(found) == ["stale-consumer"]
        assert [one.done for one in repaired(owner, found)] == [True]
        assert codes(checked(owner, namespace)) == []


def test_a_name_without_a_task_is_removed(owner: Client, namespace: str) -> None:
    registry = Registry(owner, namespace)
    with ExperienceStream(owner, "math", namespace=namespace):
        redrb.WeightPublisher(owner, "policy", namespace=namespace).close()
        registry.add("task", "gone")
        registry.add("weights", "lost")
        tasks = (TaskState("math"),)
        found = checked(owner, namespace, tasks=tasks, tasks_total=1)
        assert codes(found) == ["name-without-task"] * 2
        assert [one.subject for one in repaired(owner, found)] == ["task gone", "weights lost"]
        assert codes(checked(owner, namespace, tasks=tasks, tasks_total=1)) == []
        assert list(registry.names("task")) == ["math"]
        assert list(registry.names("weights")) == ["policy"]


def test_expired_pins(owner: Client, namespace: str) -> None:
    keys = WeightKeys.of(namespace, "policy")
    with redrb.WeightPublisher(owner, "policy", namespace=namespace) as publisher:
        publisher.publish({"a": torch.ones(3)})
        weights = (WeightsState("policy", version=1, versions=1),)
        assert codes(checked(owner, namespace, weights=weights)) == []
        owner.execute("HSET", keys.prefix + "pins", "reader", "1 1 1000 60000")
        weights = (WeightsState("policy", version=1, versions=1, expired_pins=1),)
        found = checked(owner, namespace, weights=weights)
        assert codes(found) == ["expired-pins"]
        assert [one.summary for one in repaired(owner, found)] == ["removed 1 expired pin"]
        assert owner.execute("HLEN", keys.prefix + "pins") == 0


def test_settings_of_a_server(own_server: OwnServer, namespace: str) -> None:
    server = own_server("--disable-thp", "no", "--maxclients", "64")
    with redrb.connect(server.url) as client:

        def found() -> set[str]:
            return {finding.code for finding in checked(client, namespace).findings} - {
                "libc-allocator",
                "slow-link",
                "latency-spikes",
                "below-security-fixes",
                "unknown-security-fixes",
            }

        assert found() == {"no-persistence", "no-memory-limit", "huge-pages"}
        for name, value in (
            ("save", "60 1000"),
            ("maxmemory", "1gb"),
            ("timeout", "60"),
            ("client-output-buffer-limit", "normal 1000000 0 0"),
            ("proto-max-bulk-len", "1048576"),
        ):
            client.execute("CONFIG", "SET", name, value)
        others = [redrb.connect(server.url) for _ in range(60)]
        for each in others:
            each.execute("PING")
        expected = {"snapshots-only", "huge-pages", "idle-timeout", "small-output-buffer"}
        expected.add("small-values")
        assert found() == {*expected, "many-clients"}
        (small,) = (each for each in checked(client, namespace).findings if "values" in each.code)
        assert "1,048,576 bytes at most (proto-max-bulk-len), 536,870,912 by" in small.summary
        assert small.command.endswith("CONFIG SET proto-max-bulk-len 536870912")
        for each in others:
            each.close()
        for name, value in (
            ("appendonly", "yes"),
            ("appendfsync", "always"),
            ("timeout", "0"),
            ("client-output-buffer-limit", "normal 0 0 0"),
            ("proto-max-bulk-len", "512mb"),
        ):
            client.execute("CONFIG", "SET", name, value)
        until = time.monotonic() + 10
        while found() != {"fsync-always", "huge-pages"}:  # until the connections have ended
            assert time.monotonic() < until, found()


def test_facts_of_a_server_under_load() -> None:
    info = {
        "latest_fork_usec": "900000",
        "used_memory": "200000000",
        "used_memory_rss": "500000000",
        "mem_allocator": "libc",
        "maxclients": "nonsense",
    }
    found = servers.find(server_state(info, address="h:1"), info)
    expected = ["long-fork", "fragmented-memory", "libc-allocator"]
    assert [finding.code for finding in found] == expected


def test_a_slow_link(real_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = int(real_url.rpartition(":")[2].partition("/")[0])
    monkeypatch.setattr(latency, "SLOW_S", 0.003)
    with (
        Proxy("127.0.0.1", port) as proxy,
        redrb.connect(f"redis://127.0.0.1:{proxy.port}") as client,
    ):
        proxy.slow_down()
        found = latency.find([latency.ping(client)])
        assert [finding.code for finding in found] == ["slow-link"]


def test_a_server_that_pauses(own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "SPIKE_S", 0.1)
    monkeypatch.setattr(latency, "SLOW_S", 1.0)
    server = own_server()
    with redrb.connect(server.url) as client:
        real = client.execute
        timer = threading.Timer(0.15, os.kill, [server.pid, signal.SIGCONT])

        def first(*arguments: str) -> object:  # the pause begins with the first request
            monkeypatch.setattr(client, "execute", real)
            os.kill(server.pid, signal.SIGSTOP)
            timer.start()
            return real(*arguments)

        monkeypatch.setattr(client, "execute", first)
        found = latency.find([latency.ping(client)])
        timer.join()
    assert [finding.code for finding in found] == ["latency-spikes"]


def test_a_wrong_clock(request: pytest.FixtureRequest) -> None:
    server = ClockedServer(next(iter(REAL.values())))
    request.addfinalizer(server.close)
    server.set_clock(-3600)
    with redrb.connect(server.url) as client:
        (finding,) = latency.find([latency.ping(client)])
        assert finding.code == "clock-skew"
        assert "3,600.0 s behind" in finding.summary


@pytest.mark.long
def test_doctor_on_a_cluster(real_url: str, request: pytest.FixtureRequest, namespace: str) -> None:
    cluster = RedisCluster(REAL[request.node.callspec.params["real_url"]])
    request.addfinalizer(cluster.close)

    def reported(*, repairing: bool = False) -> tuple[set[str], Report]:
        report = report_on(
            cluster.url, namespace, "", repairing=repairing, over_s=0.01, timeout_s=10
        )
        return {finding.code for finding in report.findings} - OF_SERVERS, report

    with (
        redrb.connect(cluster.url) as client,
        ExperienceStream(client, "math", namespace=namespace) as stream,
        redrb.WeightPublisher(client, "policy", namespace=namespace) as publisher,
    ):
        publisher.publish({"a": torch.ones(3)})
        stream.put_many([[numbered(number)] for number in range(4)])
        stream.take(2, timeout=5).ack()
        Registry(client, namespace).add("task", "gone")
        stream._task.store.client.execute(
            "XADD", stream._task.store.keys.stream, "9999999999999-*", "g", b"x"
        )
        codes, report = reported()
        assert codes == {"name-without-task", "orphaned-entries"}
        assert len(report.pings) == 3
        codes, report = reported(repairing=True)
        assert codes == set()
        assert {one.code for one in report.repairs} == {"name-without-task", "orphaned-entries"}
    cluster.primaries[0].run("CLUSTER", "DELSLOTS", 1, 2)
    codes, _ = reported()
    assert "missing-slots" in codes  # and "connection" once the cluster has stopped
