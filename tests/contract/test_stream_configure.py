"""`configure`: settings of a task change while others work on it."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

import pytest

from redrb import BatchTimeout, DetachedReplayBuffer, ExperienceStream, TaskMismatch
from redrb.cli.__main__ import main
from redrb.connection import Client, deadline
from redrb.errors import ConfigError, StoreError, StoreFull, UnknownTask
from redrb.stream import AdmissionStats, TaskSettings
from redrb.stream.admission import admitter
from redrb.stream.admission.calls import Admit
from redrb.stream.orders import GroupFacts
from redrb.stream.take.calls import Take
from redrb.stream.task import configuring
from tests.audit import audit, kill_consumer
from tests.conftest import REAL, Opener
from tests.samples import numbered, numbers
from tests.scenes import until

ONE_SERVER = list(REAL)[:1]

on_one_server = pytest.mark.parametrize("url", ONE_SERVER, indirect=True)
"""Marks tests that change many groups, which is slow in fakeredis."""


@pytest.fixture(params=["fake", *ONE_SERVER])
def url(request: pytest.FixtureRequest, server_urls: Callable[[str], str]) -> str:
    """URL of each backend in turn: changing settings asks nothing of a server's version."""
    if request.param == "fake":
        return f"fake://{uuid4().hex}"
    return server_urls(request.param)


@dataclass(frozen=True)
class Shortest:
    name: ClassVar[str] = "shortest"
    sampled: ClassVar[bool] = False

    def score(self, facts: GroupFacts) -> float:
        return facts.samples


GROUPS = 126
"""More than one page of the scripts that sort and fill."""


def version_of(number: int) -> int:
    return (number * 7) % 20


def priority_of(number: int) -> float:
    return float(number // 21 * 5 % 6)


def put_groups(stream: ExperienceStream, count: int = GROUPS) -> None:
    """Put groups, 21 with each of six priorities."""
    for first in range(0, count, 21):
        numbers = range(first, min(first + 21, count))
        groups = [[numbered(number, policy_version=version_of(number))] for number in numbers]
        stream.put_many(groups, priority=priority_of(first))


def test_everyone_goes_by_a_changed_setting_at_the_next_call(open_stream: Opener) -> None:
    maker, trainer = open_stream(limit=2), open_stream(limit=2)
    maker.put_many([[numbered(1)], [numbered(2)]])
    settings = trainer.configure(limit=3, max_staleness=4)
    assert settings.values["limit"] == "3"
    maker.put(numbered(3), policy_version=1)
    with pytest.raises(StoreFull):
        maker.put(numbered(4), policy_version=1, timeout=0)
    trainer.configure(limit=None)
    maker.put(numbered(4), policy_version=1)
    assert len(trainer) == 4
    assert maker.settings() == trainer.settings()


def test_a_late_take_by_former_settings_leaves_no_consumer_of_a_dead_process(
    open_stream: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, other = open_stream(), open_stream()
    other.put_many([[numbered(n)] for n in range(2)])
    sent: list[partial[Any]] = []
    send = Take.with_payload

    def noted(*args: Any) -> Any:
        sent.append(partial(send, *args))
        return send(*args)

    monkeypatch.setattr(Take, "with_payload", noted)
    dead.take(1, timeout=0).ack()
    other.configure(limit=9)
    kill_consumer(dead)
    other.take(1, timeout=0).ack()
    assert sent[0]().result().outcome == "gone"
    kill_consumer(dead)
    with pytest.raises(BatchTimeout):
        other.take(1, timeout=0)
    store = other._task.store
    (consumer,) = store.client.execute("XINFO", "CONSUMERS", store.keys.stream, "default")
    assert consumer[1].decode().startswith(other.consumer)


IMPOSSIBLE = {
    "rights": (
        {"max_staleness": 1, "groups_per_version": 2},
        lambda stream: stream.admit(4, timeout=0),
        lambda stream, count: stream.admit(count, timeout=60),
        {"max_staleness": 0},
    ),
    "rights that nobody counts yet": (
        {"max_staleness": 1},
        ExperienceStream.join_group,
        lambda stream, count: stream.admit(count, timeout=60),
        {"max_staleness": None},
    ),
    "groups": (
        {"limit": 4},
        ExperienceStream.join_group,
        lambda stream, count: stream.take(count, timeout=60),
        {"limit": 2},
    ),
    "groups that match a query": (
        {"limit": 4, "tags": ("site",)},
        ExperienceStream.join_group,
        lambda stream, count: stream.take(count, timeout=60, where={"site": "a"}),
        {"limit": 2},
    ),
    "room": (
        {"limit": 1},
        lambda stream: stream.put(numbered(0)),
        lambda stream, count: stream.put([numbered(n) for n in range(count)], timeout=60),
        {"max_bytes": 1},
    ),
}
"""What is waited for: settings, what lets it wait, the call, and the change that ends it."""


@pytest.mark.parametrize(("given", "before", "call", "change"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_a_change_makes_impossible_ends_at_once_and_keeps_nobody_waiting(
    open_stream: Opener,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    before: Callable[[ExperienceStream], object],
    call: Callable[[ExperienceStream, int], object],
    change: dict[str, Any],
) -> None:
    for module in (deadline, admitter):
        monkeypatch.setattr(module, "SLICE_S", 60.0)  # nobody looks without being woken
    admin, waiting = open_stream(**given), open_stream(lease_ms=180_000)
    kept = before(admin)  # rights return when nobody has them
    keys = admin._task.store.keys
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(call, waiting, 3)
        until(lambda: admin._store.client.execute("KEYS", f"{keys.prefix}queue:*"))
        admin.configure(**change)
        with pytest.raises(ConfigError):
            ending.result(20)
    assert not admin._store.client.execute("KEYS", f"{keys.prefix}queue:*")
    del kept


def test_a_bound_comes_while_the_request_of_a_dead_maker_is_left(open_stream: Opener) -> None:
    """It waited for rights before the task lost its bound of staleness."""
    admin = open_stream(max_staleness=1)
    hour, incarnation = 3_600_000, admin.incarnation
    admin._store.call(Admit("maker/1", 1, 1, hour, hour, hour, incarnation, "series"))
    admin.configure(max_staleness=None)
    trainer = open_stream(groups_per_version=2)
    trainer.put(numbered(1))
    trainer.take(1, timeout=0).ack()
    trainer.configure(max_staleness=1)
    trainer.advance(1)
    assert trainer.stats().admission == AdmissionStats(most=4, left=4, waiting=1)


def test_a_change_wakes_those_whom_it_lets_go_on(open_stream: Opener) -> None:
    maker, admin = open_stream(limit=1), open_stream()
    maker.put(numbered(0))
    for freed in ({"limit": 2}, {"limit": 0, "max_waiting": 3}, {"max_waiting": None}):
        with ThreadPoolExecutor(1) as pool:
            put = pool.submit(maker.put, numbered(1), timeout=30)
            until(lambda: admin.stats().producers_waiting == 1)
            admin.configure(**freed)
            put.result(timeout=20)
    assert len(admin) == 4


@on_one_server
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"max_reads": 2}, "max_reads cannot change while the task exists: the reads"),
        ({"limits": 2}, "unknown setting 'limits': use one of order, limit"),
        ({}, "at least one setting"),
        ({"limit": -1}, "limit"),
        ({"order": "best"}, "unknown order"),
        ({"order": "lifo"}, "order cannot change while task 'math' holds groups, now 1"),
        ({"tags": ["no tag!"]}, "tag"),
    ],
)
def test_a_setting_that_cannot_change_says_why(
    open_stream: Opener, changes: dict[str, Any], match: str
) -> None:
    stream = open_stream(limit=4)
    stream.put(numbered(1))
    before = stream.settings()
    with pytest.raises(ConfigError, match=match):
        stream.configure(**changes)
    assert stream.settings() == before


def test_settings_are_checked_as_they_will_be_together(open_stream: Opener) -> None:
    stream = open_stream(max_reads=2)
    with pytest.raises(ConfigError, match="groups_per_version and max_reads=2 exclude"):
        stream.configure(max_staleness=1, groups_per_version=4)
    assert "max_staleness" not in stream.settings().values


def test_a_task_that_was_cleared_has_no_settings_to_change(open_stream: Opener) -> None:
    stream, other = open_stream(limit=4), open_stream()
    other.clear()
    for call in (stream.settings, lambda: stream.configure(limit=5)):
        with pytest.raises(UnknownTask, match="no task 'math'"):
            call()


@on_one_server
def test_the_task_records_who_changed_what(open_stream: Opener) -> None:
    stream = open_stream(limit=4)
    stream.configure(limit=5, tags=["task"], max_dead=7)
    stream.configure(tags=None)
    stream.configure(limit=5)  # no change
    changes = stream.settings().changes
    assert {(each.setting, each.old, each.new) for each in changes} == {
        ("limit", "", "4"),
        ("limit", "4", "5"),
        ("tags", "", "task"),
        ("max_dead", "", "7"),
        ("tags", "task", ""),
    }
    assert (changes[0].setting, changes[-1].new) == ("tags", "4")
    assert {each.pid for each in changes} == {os.getpid()}
    for limit in range(6, 120):
        stream.configure(limit=limit)
    assert len(stream.settings().changes) == 100


# order and tags


@pytest.mark.parametrize("order", ["lifo", Shortest()])
@pytest.mark.parametrize("state", ["waiting", "leased", "left to another consumer group"])
def test_order_changes_only_while_no_group_is_stored(
    open_stream: Opener, order: Any, state: str
) -> None:
    stream, other = open_stream(), open_stream(group="other")
    if state.startswith("left"):
        other.join_group()
    (seq,) = stream.put(numbered(1))
    lease = stream.take(1, timeout=0)
    if state == "waiting":
        lease.release()
    elif state.startswith("left"):
        lease.ack()
    before = stream.settings()
    with pytest.raises(ConfigError, match=r"^order cannot change .* holds groups, now 1: change"):
        stream.configure(limit=8, order=order)
    assert stream.settings() == before
    stream.configure(limit=8, order="fifo")  # as it is
    for each in (other, stream):
        each.settle({seq: 1}, incarnation=lease.incarnation)
        if state == "waiting" or each is other:
            while len(each):
                each.take(1, timeout=0).ack()
    stream.configure(order=order)
    assert "order" in stream.settings().values


def test_an_order_object_is_given_to_a_task_without_groups(open_stream: Opener) -> None:
    stream, other = open_stream(), open_stream()
    stream.put(numbered(1))
    stream.take(1, timeout=0).ack()
    stream.configure(order=Shortest())
    stream.put_many([[numbered(1), numbered(1)], [numbered(2)]])
    with pytest.raises(ConfigError, match="not built in"):
        other.put(numbered(3))
    assert numbers(stream.take(1, timeout=0)) == [2]
    stream.clear()
    other = open_stream(order="fifo")
    other.put(numbered(3))


# indexes


@on_one_server
def test_a_bound_of_staleness_comes_and_goes(open_stream: Opener) -> None:
    stream, maker = open_stream(), open_stream()
    put_groups(maker)
    stream.advance(20)
    stream.configure(max_staleness=10)
    audit(stream)
    lease = stream.take(60, timeout=0)
    assert all(version_of(number) >= 10 for number in numbers(lease))
    stream.configure(max_staleness=None, max_token_staleness=5)
    audit(stream)
    stream.configure(max_token_staleness=None)
    with pytest.raises(ConfigError, match="no staleness is given"):
        stream.expire()
    expired = stream.stats().ledger.expired
    stream.configure(max_staleness=0)
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0)
    assert expired + 60 + len(stream) < stream.stats().ledger.expired + 60 == GROUPS


@on_one_server
def test_who_opens_a_task_finishes_what_a_dead_process_has_begun(
    open_stream: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died after the change, before the work that the change leaves."""
    stream = open_stream()
    put_groups(stream)
    stream.advance(20)
    with monkeypatch.context() as patch:
        patch.setattr(configuring, "fill", lambda _: None)
        stream.configure(max_staleness=10)
    put_groups(stream, 5)
    fields = [stream._task.store.keys.task, "filling"]
    assert stream._task.store.client.execute("HEXISTS", *fields)
    other = open_stream()
    assert not stream._task.store.client.execute("HEXISTS", *fields)
    audit(other)
    other.expire()
    assert all(version_of(number) >= 10 for number in numbers(other.take(len(other), timeout=0)))


def test_tags_come_and_go(open_stream: Opener) -> None:
    """While groups wait, which keep the tags with which they were put."""
    stream, maker = open_stream(tags=["task"]), open_stream()
    maker.put(numbered(1), tags={"task": "math"})
    stream.configure(tags=["length"])
    maker.put(numbered(3), tags={"length": 7})
    assert stream.count(where={"length": 7}) == stream.count(where={"length_ne": 7}) == 1
    with pytest.raises(ConfigError):
        stream.count(where={"task": "math"})
    stream.configure(tags=["length", "task"])
    assert numbers(stream.take(1, timeout=0, where={"task": "math", "length_ne": 7})) == [1]


def test_a_put_is_stored_beside_a_take_that_waits_for_a_dropped_tag(open_stream: Opener) -> None:
    stream, maker = open_stream(tags=["task"]), open_stream()
    pool = ThreadPoolExecutor(1)
    waiting = pool.submit(stream.take, 1, timeout=30, where={"task": "code"})
    while maker.stats().consumers_waiting == 0:
        pass
    maker.configure(tags=None)
    maker.put(numbered(2))
    with pytest.raises(StoreError, match="no longer declares the tag task"), pool:
        waiting.result(20)


def test_a_bound_of_bytes_counts_from_its_change_on(open_stream: Opener) -> None:
    stream = open_stream(max_bytes=10_000)
    stream.put(numbered(1))
    stream.configure(max_bytes=None)
    stream.put(numbered(2))
    stream.configure(max_bytes=5_000)
    audit(stream)
    stream.put(numbered(3))
    stream.take(2, timeout=0).ack()
    audit(stream)


# other processes


def test_a_lost_task_gets_the_settings_that_a_process_has_learned_last(
    open_stream: Opener, client: Client, namespace: str
) -> None:
    old, new, admin = (open_stream(limit=4, max_deliveries=3) for _ in range(3))
    admin.configure(limit=8, max_deliveries=None)
    new.put(numbered(1))
    for first, then in ((old, new), (new, old)):
        for name in client.execute("KEYS", f"redrb:{{{namespace}:*"):
            client.execute("DEL", name)
        first.put(numbered(1))
        then.put(numbered(1))
        then.put(numbered(1))
        with pytest.raises(BatchTimeout):
            then.take(4, timeout=0)
        assert new.settings().values == {"limit": "8"}
        old.take(1, timeout=0).ack()


def test_a_run_that_restarts_with_another_batch_size_goes_on(
    client: Client, namespace: str
) -> None:
    def restart(batch: int, limit: int = 2) -> DetachedReplayBuffer:
        place: dict[str, Any] = {"client": client, "namespace": namespace}
        return DetachedReplayBuffer(batch, limit, **place)

    def most(buffer: DetachedReplayBuffer) -> str:
        return buffer.stream.settings().values["max_waiting"]

    with restart(4) as buffer:
        buffer.extend([numbered(1)] * 8)
        with restart(8, 3) as later:
            later.extend([numbered(2)] * 16)
            assert most(later) == most(buffer) == "24"
        assert buffer.stream.settings().implied == {"max_waiting"}
        buffer.stream.configure(max_waiting=64)
    with restart(8, 3) as again:  # a limit that a user gave stays
        assert most(again) == "64"
        assert not again.stream.settings().implied


def test_a_restarted_process_keeps_what_was_changed_by_hand_and_says_so_once(
    open_stream: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """Its code gives the value from before the change, at each start."""
    bound = {"max_staleness": 2, "weights": "policy"}
    first = open_stream(limit=64, max_deliveries=3, max_waiting=99, **bound)
    assert not caplog.records
    changed = {"limit": 200, "max_deliveries": None, "max_waiting": 32, "max_bytes": 9999}
    open_stream().configure(**changed)
    again = open_stream(limit=64, max_deliveries=3, max_bytes=99, implied=TaskSettings(max_dead=7))
    again.put(numbered(1), policy_version=0)
    assert again.stats().limit == 200
    kept = {"limit", "max_waiting", "max_bytes", "max_staleness", "max_dead"}
    assert {*again.settings().values} == kept
    held = [message.split(". Who")[0] for message in caplog.messages]
    assert [text.split(",")[0].split(" has ")[1] for text in held] == [
        "limit=200",
        "max_bytes=9999",
        "max_deliveries=none",
    ]
    assert held[0].endswith("this process was given limit=64")
    assert f"redrb set math --namespace {first.namespace}" in caplog.messages[0]
    with pytest.raises(TaskMismatch, match="max_staleness is '2', not '3'"):
        open_stream(limit=64, max_staleness=3)  # nobody has changed it
    again.configure(limit=64)
    caplog.clear()
    open_stream(limit=64)
    assert not caplog.records


def test_settings_that_follow_from_others_do_not_replace_what_was_removed_by_hand(
    open_stream: Opener,
) -> None:
    stream = open_stream(implied=TaskSettings(limit=8))
    stream.configure(limit=None)
    open_stream(implied=TaskSettings(limit=9))
    assert "limit" not in stream.settings().values


@pytest.mark.parametrize(
    ("change", "given"), [({"order": "lifo"}, {"order": "fifo"}), ({"tags": ["a"]}, {"tags": []})]
)
def test_an_order_or_tags_that_differ_are_refused_also_after_a_change(
    open_stream: Opener, change: dict[str, Any], given: dict[str, Any]
) -> None:
    stream = open_stream(**given)
    stream.configure(**change)
    with pytest.raises(TaskMismatch, match=r"stream.configure\(\.\.\.\) or `redrb set math"):
        open_stream(**given)


def test_what_was_changed_by_hand_holds_also_after_redis_has_lost_it(
    open_stream: Opener, client: Client, namespace: str
) -> None:
    worker = open_stream(limit=64, max_deliveries=3)
    open_stream().configure(limit=200, max_deliveries=None)
    worker.put(numbered(1))
    for name in client.execute("KEYS", f"redrb:{{{namespace}:*"):
        client.execute("DEL", name)
    worker.put(numbered(1))
    restarted = open_stream(limit=64, max_deliveries=3)
    assert restarted.settings().values == {"limit": "200"}


def test_a_given_setting_replaces_an_implied_one(open_stream: Opener) -> None:
    implied = open_stream(implied=TaskSettings(limit=8))
    open_stream(implied=TaskSettings())
    assert implied.stats().limit == 0
    open_stream(implied=TaskSettings(limit=9))
    assert implied.stats().limit == 9
    open_stream(limit=4)
    assert implied.stats().limit == 4
    open_stream(implied=TaskSettings(limit=8))
    open_stream(implied=TaskSettings())
    assert implied.stats().limit == 4
    with pytest.raises(TaskMismatch):
        open_stream(limit=5)


def test_the_command_changes_and_prints_settings(
    open_stream: Opener, url: str, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = open_stream(max_staleness=3, tags=["task"])
    where = ["--namespace", namespace, "--url", url]
    changes = ["limit=32", "max_staleness=none", "tags=task,length", "max_waiting=8"]
    assert main(["set", "math", *changes, *where]) == 0
    assert stream.settings().values == {
        "limit": "32",
        "tags": "task,length",
        "max_waiting": "8",
    }
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["setting", "value", "before", "set", "at", "set", "by"]
    assert [line.split()[:2] for line in lines[:1]] == [["limit", "32"]]
    assert f"process {os.getpid()}" in lines[0]
    assert ["max_staleness", "none", "3"] in [line.split()[:3] for line in lines]  # removed
    assert ["max_waiting", "8", "none"] in [line.split()[:3] for line in lines]
    for arguments, message in (
        (["math", "limit=many"], "write a number, or none"),
        (["math", "limit"], "NAME=VALUE"),
        (["math", "limit=1", "limit=2"], "twice"),
        (["math", "rate=4"], "unknown setting 'rate'"),
        (["math", "max_reads=4"], "max_reads cannot change"),
        (["mathh"], "no task 'mathh'"),
    ):
        assert main(["set", *arguments, *where]) == 2
        assert message in capsys.readouterr().err
    assert not stream._task.store.client.execute("KEYS", f"redrb:{{{namespace}:mathh}}*")


@on_one_server
def test_settings_change_while_makers_and_trainers_work(client: Client, namespace: str) -> None:
    """Nothing is lost or taken twice, and every index has exactly the groups that wait."""
    total, done, dice = 120, threading.Event(), random.Random(3)
    streams = [
        ExperienceStream(client, "math", namespace=namespace, tags=["task"]) for _ in range(4)
    ]
    acked: Counter[int] = Counter()

    def put(stream: ExperienceStream, first: int) -> None:
        for number in range(first, total, 2):
            stream.put(numbered(number), policy_version=number, priority=1.0, timeout=60)

    def take(stream: ExperienceStream) -> None:
        while not done.is_set():
            try:
                lease = stream.take(4, at_least=1, timeout=0.05)
            except BatchTimeout:
                continue
            if dice.random() < 0.3:
                lease.release()
            else:
                acked.update(numbers(lease))
                lease.ack()

    choices: list[dict[str, Any]] = [
        *({"max_staleness": most} for most in (10_000, None, 9_000)),
        *({"limit": most} for most in (10, 100, None)),
        {"max_bytes": 10**7},
        {"max_bytes": None},
    ]
    with ThreadPoolExecutor(3) as pool:
        try:
            makers = [pool.submit(put, streams[first], first) for first in range(2)]
            trainer = pool.submit(take, streams[2])
            while sum(acked.values()) < total and not trainer.done():
                streams[3].configure(**dice.choice(choices))
        finally:
            done.set()
        for work in (*makers, trainer):
            work.result(60)
    assert acked == Counter(range(total))
    audit(streams[3])
    assert streams[3].stats().ledger.balanced
    for stream in streams:
        stream.close()


@on_one_server
def test_a_dead_letter_waits_again_in_the_new_order(open_stream: Opener) -> None:
    stream = open_stream(max_staleness=1000, max_deliveries=1)
    put_groups(stream, 21)
    lease = stream.take(3, timeout=0)
    letters = lease.ids
    lease.fail("unreadable")
    stream.take(18, timeout=0).ack()
    stream.configure(order="stalest")
    assert len(stream.requeue(letters)) == 3
    audit(stream)
    versions = [version_of(number) for number in numbers(stream.take(3, timeout=0))]
    assert versions == sorted(versions)


def test_a_letter_without_a_place_in_the_new_order_is_refused(open_stream: Opener) -> None:
    stream = open_stream(order="priority")
    (former,) = stream.put(numbered(1), priority=5)
    stream.take(1, timeout=0).reject("bad")
    stream.configure(order=Shortest())
    (later,) = stream.put([numbered(2), numbered(2)])
    stream.take(1, timeout=0).reject("bad")
    with pytest.raises(ConfigError, match=r"in the order 'priority', .*'shortest'"):
        stream.requeue([later, former])
    assert stream.stats().ledger.dead == 2
    assert len(stream.requeue([later])) == 1
    stream.take(1, timeout=0).ack()
    stream.configure(order="lifo")
    assert len(stream.requeue([former])) == 1
