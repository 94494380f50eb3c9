"""The registry of a namespace, unknown tasks, and `create=False`."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from typing import Any

import pytest
import torch

import redrb
from redrb import ExperienceStream, registry
from redrb.compat.xtuner import ReplayBuffer
from redrb.connection import Client
from redrb.errors import TaskInUse, UnknownTask
from redrb.keys import TaskKeys, registry_key
from redrb.registry import Registry
from redrb.stream import heartbeat
from redrb.stream.export import export_task
from redrb.stream.task import lookup
from redrb.stream.task.lookup import task_stats
from redrb.stream.task.removal import remove_task, task_contents
from redrb.watch.state.alive import task_use
from redrb.watch.state.reader import StateReader
from redrb.weights.inspection.listing import remove_weights
from tests.samples import numbered


def names(client: Client, namespace: str) -> list[str]:
    return list(Registry(client, namespace).names("task"))


def test_tasks_and_weights_are_listed_until_they_are_deleted(
    client: Client, namespace: str
) -> None:
    with (
        ExperienceStream(client, "math", namespace=namespace, order="lifo") as math,
        ExperienceStream(client, "code", namespace=namespace, weights="actor") as code,
    ):
        math.put(numbered(1))
        math.take(1, timeout=0)
        redrb.WeightPublisher(client, "actor", namespace=namespace).publish({"a": torch.ones(2)})
        state = StateReader(client, namespace, group="default").look()
        listed = state.tasks
        assert [(task.name, task.order) for task in listed] == [("code", "fifo"), ("math", "lifo")]
        assert listed[1].main is not None
        stats = listed[1].main.stats
        assert (stats.ledger.leased, stats.stored) == (1, 1)
        assert listed[1].stored_bytes == stats.bytes_put
        assert [weights.name for weights in state.weights] == ["actor"]
        code.clear()  # it follows weights, so it is created anew at once
        math.clear()
        assert names(client, namespace) == ["code"]
        remove_weights(client, "actor", namespace=namespace)
        assert list(Registry(client, namespace).names("weights")) == []


def test_a_lost_registry_fills_when_tasks_are_opened(client: Client, namespace: str) -> None:
    with ExperienceStream(client, "math", namespace=namespace):
        client.at(registry_key(namespace)).execute("DEL", registry_key(namespace))
        ExperienceStream(client, "math", namespace=namespace).close()
        assert names(client, namespace) == ["math"]


@pytest.mark.parametrize("lost", ["everything", "the registry"])
@pytest.mark.parametrize("deltas", [True, False])
def test_what_goes_on_after_redis_lost_its_data_is_listed_again(
    client: Client, namespace: str, lost: str, deltas: bool
) -> None:
    """Publisher, task and table that were opened before, each by its next call."""
    options = {"deltas": deltas, "anchor_every": 1}
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, **options)
    publisher.publish({"a": torch.ones(2)})
    table = redrb.Table(client, "rows", namespace=namespace)
    with ExperienceStream(client, "math", namespace=namespace, weights="actor") as stream:
        for _ in range(2):
            pattern = f"redrb:{{{namespace}*" if lost == "everything" else registry_key(namespace)
            client.execute("DEL", *client.execute("KEYS", pattern))
            assert publisher.publish({"a": torch.ones(2)}).version > 1
            assert list(Registry(client, namespace).names("weights")) == ["actor"]
            if lost == "everything":
                stream.put(numbered(1))
                table.put(["a"], {"n": [1]})
                state = StateReader(client, namespace).look()
                assert [task.name for task in state.tasks] == ["math"]
                assert [each.name for each in state.tables] == ["rows"]
                assert [each.name for each in state.weights] == ["actor"]
                newest = publisher.publish({"a": torch.ones(2)}).version
                assert stream.stats().version == newest


def test_followers_that_redis_lost_are_entered_again(client: Client, namespace: str) -> None:
    """On a cluster they are on the node of the weights, and not on that of the task."""
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
    publisher.publish({"a": torch.ones(2)})
    with ExperienceStream(client, "math", namespace=namespace, weights="actor") as stream:
        publisher.publish({"a": torch.ones(2)})
        client.execute("DEL", *client.execute("KEYS", f"redrb:{{{namespace}:weights:actor}}:*"))
        for version in (3, 4):
            publisher.publish({"a": torch.ones(2)})
            assert stream.stats().version == version


def test_a_deletion_keeps_the_name_of_a_task_that_was_created_meanwhile(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = Registry.remove

    def late(self: Registry, kind: registry.Kind, name: str) -> None:
        ExperienceStream(client, "math", namespace=namespace).close()
        remove(self, kind, name)

    with ExperienceStream(client, "math", namespace=namespace) as stream:
        monkeypatch.setattr(Registry, "remove", late)
        stream.clear()
        assert names(client, namespace) == ["math"]


def test_names_are_read_in_pages(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "NAMES_OF_A_CALL", 2)
    wanted = ["a", "a-b", "b", "c", "d"]
    for name in reversed(wanted):
        Registry(client, namespace).add("task", name)
    Registry(client, namespace).add("weights", "w")
    assert names(client, namespace) == wanted
    assert StateReader(client, namespace).look().tasks == ()  # no task has these names


def test_looking_at_an_unknown_task_creates_nothing(
    client: Client, namespace: str, tmp_path: object
) -> None:
    ExperienceStream(client, "math", namespace=namespace).close()
    for look in (
        lambda: ExperienceStream(client, "maht", namespace=namespace, create=False),
        lambda: task_stats(client, "maht", namespace=namespace, group="default"),
        lambda: export_task(client, "maht", f"{tmp_path}/out", namespace=namespace),
        lambda: remove_task(client, "maht", namespace=namespace),
    ):
        with pytest.raises(UnknownTask, match="similar names: 'math'") as caught:
            look()
        assert caught.value.similar == ("math",)
    key = TaskKeys.of(namespace, "maht").task
    assert not client.at(key).execute("EXISTS", key)
    assert names(client, namespace) == ["math"]
    with pytest.raises(UnknownTask, match=f"`redrb ls --namespace {namespace}` lists the tasks"):
        ExperienceStream(client, "gsm8k", namespace=namespace, create=False)
    with pytest.raises(UnknownTask, match="similar names: 'math'"):
        ExperienceStream(client, "Math-grpo-run-17", namespace=namespace, create=False)


def test_an_unknown_task_is_looked_for_in_other_namespaces(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "LOOK_S", 30.0)  # a busy machine may stand still
    other = f"{namespace}2"
    name = f"math-{namespace}"  # tests that run beside this one have other names
    said = f"There is one in namespace '{namespace}': give --namespace {namespace}"
    ExperienceStream(client, name, namespace=namespace).close()
    redrb.Table(client, f"rows-{name}", namespace=namespace)
    for each in (name, f"rows-{name}"):
        with pytest.raises(UnknownTask, match=said) as caught:
            StateReader(client, other, tasks=[each]).look()
        assert caught.value.elsewhere == (namespace,)


def test_a_replay_buffer_does_not_bring_a_removed_task_back(client: Client, namespace: str) -> None:
    async def put() -> None:
        async with ReplayBuffer(client, namespace=namespace) as buffer:
            await buffer.put([{"prompt_ids": [1]}], "math")
            await buffer.put([{"prompt_ids": [1]}], "code")

    async def look() -> None:
        async with ReplayBuffer(client, namespace=namespace) as buffer:
            assert await buffer.get(1, "math", "completed") == []
            assert await buffer.count("math", "completed") == 0
            assert await buffer.size() == 1

    asyncio.run(put())
    remove_task(client, "math", namespace=namespace)
    asyncio.run(look())
    assert names(client, namespace) == ["code"]


def test_a_stream_that_must_not_create_uses_the_task_and_does_not_bring_it_back(
    client: Client, namespace: str
) -> None:
    with (
        ExperienceStream(client, "math", namespace=namespace) as owner,
        ExperienceStream(client, "math", namespace=namespace, create=False) as guest,
    ):
        guest.put(numbered(1))
        guest.take(1, timeout=0).ack()
        owner.clear()
        for use in (lambda: guest.put(numbered(2)), lambda: guest.take(1, timeout=0)):
            with pytest.raises(UnknownTask):
                use()
        owner.put(numbered(3))
        assert guest.take(1, timeout=0).ids == (1,)


@pytest.fixture
def before_the_first_beat(monkeypatch: pytest.MonkeyPatch) -> int:
    """A lease whose heartbeat is first due after minutes; until then nothing is announced."""
    monkeypatch.setattr(heartbeat, "LONGEST_PERIOD_S", 600.0)
    return 1_800_000


def test_a_removal_shows_parts_and_refuses_while_makers_have_rights(
    client: Client, namespace: str, before_the_first_beat: int
) -> None:
    settings: dict[str, Any] = {"max_staleness": 1, "groups_per_version": 2}
    settings["lease_ms"] = before_the_first_beat
    with ExperienceStream(client, "math", namespace=namespace, **settings) as stream:
        stream.put_part("a", numbered(1), index=0, of=2, policy_version=1)
        with stream.admit(2, timeout=5):
            contents = task_contents(client, "math", namespace=namespace)
            assert (contents.stored, contents.in_parts, contents.makers) == (0, 1, 1)
            with pytest.raises(TaskInUse, match=r"rights to begin groups \(1\)"):
                task_use(client, "math", namespace=namespace).check(namespace)
    assert task_contents(client, "math", namespace=namespace).makers == 0
    assert remove_task(client, "math", namespace=namespace) == 0


def test_a_consumer_that_has_not_announced_itself_is_named(
    client: Client, namespace: str, before_the_first_beat: int
) -> None:
    stream = ExperienceStream(client, "math", namespace=namespace, lease_ms=before_the_first_beat)
    stream.put_many([[numbered(n)] for n in range(4)])
    stream.take(1, timeout=0)
    (group,) = task_contents(client, "math", namespace=namespace).consumer_groups
    assert (group.name, group.waiting, group.leased, len(group.consumers)) == ("default", 3, 1, 1)
    use = task_use(client, "math", namespace=namespace)
    assert use.workers == ()
    where = f"(process {os.getpid()} on {socket.gethostname()})"
    assert use.users == (f"a consumer of group default {where}",)
    with pytest.raises(TaskInUse, match=re.escape(where)):
        use.check(namespace)
    stream.close()
    task_use(client, "math", namespace=namespace).check(namespace)
    assert remove_task(client, "math", namespace=namespace) == 4
    with pytest.raises(UnknownTask):
        task_contents(client, "math", namespace=namespace)
    assert names(client, namespace) == []


def test_dead_consumers_do_not_keep_a_task_for_ever(client: Client, namespace: str) -> None:
    """No process sets the task's clock any more, so it stands still; the server's goes on."""
    stream = ExperienceStream(client, "math", namespace=namespace)
    stream.put(numbered(1))
    stream.take(1, timeout=0).ack()
    stream.close()
    keys, died = TaskKeys.of(namespace, "math"), int(time.time() * 1000) - 100_000
    client.execute("HSET", keys.task, "clock", f"{died} {died} 15000")
    client.execute("ZADD", f"{keys.prefix}consumers:default", died + 30_000, "host-1-dead")
    (group,) = task_contents(client, "math", namespace=namespace).consumer_groups
    assert group.consumers == ()
    task_use(client, "math", namespace=namespace).check(namespace)
    assert remove_task(client, "math", namespace=namespace) == 0
