"""Rights to begin groups: given within the bound, in order, returned, and counted."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

import redrb
from redrb import ConfigError, ExperienceSender, ExperienceStream, processes
from redrb.cli.run.held import return_held
from redrb.errors import AdmissionTimeout, RecordError
from redrb.keys import TaskKeys
from redrb.processes import process_name
from redrb.stream import AdmissionStats
from redrb.stream.admission import admitter
from redrb.stream.admission.calls import Admit
from redrb.stream.admission.maker import Maker
from tests.samples import numbered, numbers
from tests.scenes import until


def rights(stream: ExperienceStream) -> AdmissionStats:
    found = stream.stats().admission
    assert found.balanced
    return found


def put_admitted(stream: ExperienceStream, *groups: int, version: int = 1, **options: Any) -> None:
    with stream.admit(len(groups), timeout=0) as admission:
        stream.put_many(
            [[numbered(n)] for n in groups],
            policy_version=version,
            admission=admission,
            **options,
        )


@pytest.fixture
def stream(open_stream):
    stream = open_stream(max_staleness=0, groups_per_version=4, order="admission")
    stream.advance(1)
    return stream


def test_no_more_groups_are_begun_than_can_be_trained_in_time(stream):
    put_admitted(stream, 0, 1, 2, 3)
    with pytest.raises(AdmissionTimeout, match="0 rights are held, 4 groups are stored") as caught:
        stream.admit(1, timeout=0)
    assert (caught.value.stored, caught.value.most, caught.value.version) == (4, 4, 1)
    stream.take(4, timeout=0).ack()
    with pytest.raises(AdmissionTimeout, match="4 groups were trained since version 1"):
        stream.admit(1, timeout=0)
    stream.advance(2)
    with stream.admit(4, timeout=0) as admission:
        assert (admission.version, admission.count) == (2, 4)


def test_a_slow_group_holds_later_ones_back_and_is_taken_first(open_stream):
    stream = open_stream(max_staleness=1, groups_per_version=2, order="admission")
    stream.advance(1)
    slow = stream.admit(1, timeout=0)
    put_admitted(stream, 1, 2)
    stream.take(2, timeout=0).ack()
    stream.advance(2)
    put_admitted(stream, 3, version=2)
    with pytest.raises(AdmissionTimeout, match="1 right is held") as caught:
        stream.admit(1, timeout=0)
    assert caught.value.oldest_maker == next(iter(rights(stream).makers))
    stream.put(numbered(0), policy_version=1, admission=slow)
    assert numbers(stream.take(2, timeout=0)) == [0, 3]


def test_rights_that_are_not_used_return(stream):
    with stream.admit(3, timeout=0) as admission:
        stream.put(numbered(0), policy_version=1, admission=admission)
        assert admission.left == 2
    assert (rights(stream).returned, rights(stream).left) == (2, 3)
    admission.cancel()
    other = stream.admit(3, timeout=0)
    other.cancel()
    with pytest.raises(ConfigError, match="0 rights are left"):
        stream.put(numbered(1), policy_version=1, admission=other)
    del other
    assert (rights(stream).returned, rights(stream).held) == (5, 0)


def test_dropped_groups_return_their_rights(open_stream):
    stream = open_stream(
        max_staleness=0,
        groups_per_version=4,
        order="admission",
        filters=[lambda group: bool(group[0].reward != 1)],
        on_bad_group="drop",
    )
    bad = numbered(2)
    bad.reward = bad.reward * float("nan")
    with stream.admit(4, timeout=0) as admission:
        groups = [[numbered(0)], [numbered(1)], [bad], [numbered(3)]]
        stream.put_many(groups, policy_version=1, admission=admission)
        assert admission.left == 0
    assert (rights(stream).used, rights(stream).returned) == (2, 2)
    assert numbers(stream.take(2, timeout=0)) == [0, 3]


def test_a_put_that_raises_leaves_its_rights_to_be_used_again(stream):
    bad = numbered(0)
    bad.reward = bad.reward * float("nan")
    with stream.admit(2, timeout=0) as admission:
        with pytest.raises(RecordError):
            stream.put_many([[numbered(1)], [bad]], policy_version=1, admission=admission)
        assert admission.left == 2
        with pytest.raises(ConfigError, match="3 groups are put, and 2 rights are left"):
            stream.put_many([[numbered(n)] for n in range(3)], admission=admission)
        with stream.writer() as writer, pytest.raises(RecordError):
            writer.put(bad, policy_version=1, admission=admission)
        assert (admission.left, rights(stream).held) == (2, 2)


def test_a_writer_and_a_sender_use_rights_up(stream):
    with stream.admit(2, timeout=0) as admission, stream.writer() as writer:
        writer.put(numbered(0), policy_version=1, admission=admission)
        writer.put(numbered(1), policy_version=1, admission=admission)
    bad = numbered(0)
    bad.reward = bad.reward * float("nan")
    with ExperienceSender(stream) as sender:
        with stream.admit(2, timeout=0) as admission:
            sender.send(numbered(2), policy_version=1, admission=admission)
            sender.send(bad, policy_version=1, admission=admission)
            assert admission.left == 0
        with pytest.raises(redrb.errors.SendFailed):
            sender.flush()
    stream._admitter.maker.beat()
    assert (rights(stream).used, rights(stream).returned, rights(stream).held) == (3, 1, 0)


@pytest.mark.parametrize(
    ("place", "name"), [(admitter, "Admission"), (Maker, "hold"), (Maker, "_attend")]
)
def test_an_interrupt_just_after_rights_were_given_returns_them(stream, monkeypatch, place, name):
    real = getattr(place, name)

    def interrupted(*_: object, **__: object) -> None:
        monkeypatch.setattr(place, name, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(place, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.admit(4, timeout=0)
    until(lambda: not rights(stream).held)
    with stream.admit(4, timeout=0) as admission:
        assert admission.count == 4
    gc.collect()  # the interrupt's traceback had the first ones
    until(lambda: not stream._admitter.maker.held)


def test_fewer_rights_may_be_accepted_and_more_than_the_bound_are_an_error(stream):
    with stream.admit(9, least=3, timeout=0) as admission:
        assert admission.count == 4
    with pytest.raises(ConfigError, match="at most 4 groups"):
        stream.admit(5, timeout=0)
    with pytest.raises(ConfigError):
        stream.admit(2, least=3)


def test_a_maker_waits_until_a_version_comes_and_is_served_in_order(stream, open_stream):
    put_admitted(stream, 0, 1, 2, 3)
    stream.take(4, timeout=0).ack()
    served: list[int] = []

    def wait(number):
        with open_stream().admit(2, timeout=30):
            served.append(number)
            if number == 0:
                both.wait(30)

    both = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(wait, 0)
        await_waiting(stream, 1)
        second = pool.submit(wait, 1)
        await_waiting(stream, 2)
        stream.advance(2)
        second.result(30)
        both.set()
        first.result(30)
    assert sorted(served) == [0, 1]


def await_waiting(stream: ExperienceStream, requests: int) -> None:
    """Wait until so many makers wait."""
    ready = threading.Event()
    for _ in range(600):
        if rights(stream).waiting == requests:
            return
        ready.wait(0.05)
    raise AssertionError("no maker waits")


def test_makers_wait_until_a_trainer_says_how_much_it_trains(open_stream):
    maker = open_stream(max_staleness=1)
    with pytest.raises(AdmissionTimeout, match="No process has given groups_per_version"):
        maker.admit(timeout=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(maker.admit, 2, timeout=30)
        while not maker._task.store.client.execute(
            "ZCARD", f"{maker._task.store.keys.prefix}queue:#admission"
        ):
            threading.Event().wait(0.02)
        open_stream(groups_per_version=4)
        waiting.result(30).cancel()


def test_what_admission_cannot_be_combined_with(open_stream):
    with pytest.raises(ConfigError, match="has no bound of staleness"):
        open_stream().admit(timeout=0)
    for excluded in ({"max_reads": 2}, {"max_reads": 0}):
        with pytest.raises(ConfigError, match="exclude each other"):
            open_stream(max_staleness=1, groups_per_version=4, **excluded)
    open_stream(max_reads=2)
    with pytest.raises(ConfigError, match="groups_per_version and max_reads=2"):
        open_stream(max_staleness=1, groups_per_version=4)
    for bad in (0, -1, float("nan"), "4"):
        with pytest.raises(ConfigError):
            open_stream(groups_per_version=bad)


def test_a_task_ordered_by_rights_refuses_puts_without_one(stream, open_stream):
    with pytest.raises(ConfigError, match="orders groups by their rights"):
        stream.put(numbered(0), policy_version=1)
    other = ExperienceStream(
        stream._task.store.client, "other", max_staleness=1, groups_per_version=2
    )
    with other.admit(timeout=0) as admission, pytest.raises(ConfigError, match="of task 'other'"):
        stream.put(numbered(0), policy_version=1, admission=admission)
    with pytest.raises(ConfigError, match="give what stream"):
        stream.put(numbered(0), admission=3)
    other.clear()
    other.close()


def test_versions_that_jump_cause_no_burst_and_do_not_block(stream):
    put_admitted(stream, 0, 1)
    stream.advance(5000)
    assert rights(stream).left == 2
    with pytest.raises(AdmissionTimeout):
        stream.admit(3, timeout=0)
    with stream.admit(2, timeout=0):
        pass


def test_partial_batches_leave_no_credit(open_stream):
    stream = open_stream(max_staleness=1, groups_per_version=4, order="admission")
    for version in range(1, 9):
        stream.advance(version)
        put_admitted(stream, version, version=version)
        stream.take(1, timeout=0).ack()
    assert 0 <= rights(stream).left <= 8


def test_a_right_that_is_held_too_long_is_lost_and_its_group_stored_all_the_same(stream):
    admission = stream.admit(4, timeout=0, hold_s=0.001)
    threading.Event().wait(0.01)
    with stream.admit(1, timeout=0):
        assert (rights(stream).lost, rights(stream).held) == (4, 1)
        stream.put(numbered(0), policy_version=1, admission=admission)
        assert (rights(stream).late, rights(stream).used) == (1, 0)
    assert numbers(stream.take(1, timeout=0)) == [0]


def test_a_beat_follows_at_once_while_rights_of_a_dead_maker_are_left(
    open_stream, client, namespace, pages
):
    """A beat takes three of 300 back, and beats that are due come every 2.5 s."""
    pages(rights_lost=3)
    settings = {"max_staleness": 0, "groups_per_version": 400, "lease_ms": 600_000}
    dead, living = open_stream(**settings), open_stream(**settings)
    lost = dead.admit(300, timeout=0)
    kept = living.admit(1, timeout=0)
    dead._admitter.maker._heartbeat.stop()
    key = TaskKeys.of(namespace, "math").prefix + "makers"
    for maker in client.execute("ZRANGE", key, 0, 0):  # entered first
        client.execute("ZADD", key, "XX", 1, maker)
    living._admitter.maker._nudge()
    deadline = time.monotonic() + 60
    while rights(living).held > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (rights(living).held, rights(living).lost) == (1, 300)
    assert (lost.count, kept.count) == (300, 1)


def test_rights_of_a_task_that_was_cleared_are_late(stream):
    admission = stream.admit(2, timeout=0)
    stream.clear()
    with stream.admit(1, timeout=0):
        stream.put(numbered(0), policy_version=1, admission=admission)
        assert (rights(stream).late, rights(stream).held, rights(stream).granted) == (1, 1, 1)
        admission.cancel()
        assert rights(stream).held == 1


def test_a_trainer_that_needs_more_is_helped_once_nothing_goes_on(stream, caplog):
    """It takes six groups for a version, and said four."""
    put_admitted(stream, 0, 1, 2, 3)
    task = stream._task.store
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stream.take, 6, timeout=30)
        while not stream.stats().consumers_waiting:
            threading.Event().wait(0.02)
        with pytest.raises(AdmissionTimeout):
            stream.admit(2, timeout=0)
        since, state = task.client.execute("HGET", f"{task.keys.prefix}admission", "stall").split(
            b" ", 1
        )
        earlier = b"%d %b" % (int(since) - 11_000, state)
        task.client.execute("HSET", f"{task.keys.prefix}admission", "stall", earlier)
        put_admitted(stream, 4, 5)
        assert "begun beyond the bound" in caplog.text
        assert len(waiting.result(30)) == 6
    assert rights(stream).released == 2


def test_rights_in_whole_batches_may_round_the_bound_up_when_a_take_waits(stream):
    put_admitted(stream, 0, 1, 2)
    with pytest.raises(AdmissionTimeout):
        stream.admit(3, timeout=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stream.take, 4, timeout=30)
        with stream.admit(3, timeout=30) as admission:
            stream.put(numbered(3), policy_version=1, admission=admission)
            waiting.result(30)


def test_a_share_of_a_mixture_that_is_no_whole_number_does_not_block(open_stream):
    stream = open_stream(max_staleness=0, groups_per_version=2.5, order="admission")
    with ThreadPoolExecutor(1) as pool:
        for version in range(1, 6):
            stream.advance(version)
            groups = version * 5 // 2 - (version - 1) * 5 // 2
            taking = pool.submit(stream.take, groups, timeout=30)
            for number in range(groups):
                with stream.admit(timeout=30) as admission:
                    stream.put(numbered(number), policy_version=version, admission=admission)
            taking.result(30).ack()
    assert (rights(stream).released, stream.stats().ledger.expired) == (0, 0)


def test_a_saved_task_keeps_the_setting_and_no_rights(stream, client, namespace, tmp_path):
    put_admitted(stream, 0, 1)
    with stream.admit(2, timeout=0):
        stream.save(tmp_path / "task")
    other = ExperienceStream(client, "copy", namespace=namespace)
    other.resume(tmp_path / "task")
    assert (rights(other).most, rights(other).held, rights(other).left) == (4, 0, 2)
    assert numbers(other.take(2, timeout=0)) == [0, 1]
    other.close()


def test_groups_that_leave_untrained_make_room(stream):
    put_admitted(stream, 0, 1, 2, 3)
    lease = stream.take(2, timeout=0)
    lease.reject("bad")
    assert rights(stream).left == 2
    stream.advance(3)
    stream.expire(3)
    assert stream.stats().ledger.expired == 2
    assert rights(stream).left == 4


def test_threads_that_race_never_hold_more_than_the_bound(real_url):
    threads, most = 200, 8
    held, peak, lock, full = 0, 0, threading.Lock(), threading.Barrier(most)
    with redrb.connect(real_url) as client:
        stream = ExperienceStream(client, uuid4().hex, max_staleness=1, groups_per_version=4)

        def work(_):
            nonlocal held, peak
            with stream.admit(timeout=60) as admission:
                with lock:
                    held += 1
                    peak = max(peak, held)
                assert admission.left == 1
                full.wait(60)  # all rights can be held at a time
                with lock:
                    held -= 1

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        found = rights(stream)
        assert (found.granted, found.returned, found.held) == (threads, threads, 0)
        assert peak == most
        stream.clear()
        stream.close()


def ended_process(who: str) -> str:
    """Return the name of something that a process held which has ended, or of one that lives."""
    host, pid, place = process_name().rsplit("-", 2)
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    names = {
        "ended": f"{host}-{ended.pid}-{place}",
        "this process": f"{host}-{pid}-{place}",
        "another machine": f"not-{host}-{ended.pid}-{place}",
        "another container": f"{host}-{ended.pid}-{'0' * 8}{place[8:]}",
        "no process": "doctor-0123456789ab",
    }
    return names[who]


WHO = ["ended", "this process", "another machine", "another container", "no process"]


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("held", ["rights", "request", "groups"])
@pytest.mark.usefixtures("no_heartbeats")
def test_what_a_process_held_that_has_ended_on_this_machine_returns_at_the_next_beat(
    open_stream, who, late, held
):
    """Of all that are late for a heartbeat only those are dead that this machine knows to be."""
    stream, other = (open_stream(max_staleness=0, groups_per_version=4) for _ in range(2))
    stream.advance(1)
    stream.join_group()
    stream.put(numbered(0), policy_version=1)
    task, name = stream._task, ended_process(who)
    store, prefix = task.store, task.store.keys.prefix
    soon = int(store.client.execute("TIME")[0]) * 1000 + (5_000 if late else 29_000)
    if held == "groups":
        other.worker.name = name
        other._consumer._begin()
        other.take(1, timeout=0)
        store.client.execute("ZADD", f"{prefix}consumers:default", "XX", soon, name)
    else:
        count = 3 if held == "rights" else 4
        incarnation = task.description.incarnation
        store.call(Admit(f"{name}/1", count, count, 30_000, 30_000, 60_000, incarnation, "series"))
        store.client.execute("ZADD", f"{prefix}makers", "XX", soon, name)
        if held == "request":
            store.client.execute("HSET", f"{prefix}needs:#admission", f"{name}/1", f"4 {soon} 0")
    stream._consumer.beat()
    returned = who == "ended" and late
    found = stream.stats()
    assert (found.admission.held, found.admission.lost) == (
        (0, 3) if returned and held == "rights" else (3 * (held == "rights"), 0)
    )
    assert found.admission.waiting == (held == "request" and not returned)
    assert found.ledger.leased == (held == "groups" and not returned)
    assert found.taken_over == (held == "groups" and returned)
    if held == "groups" and returned:
        assert store.client.execute("HGETALL", f"{prefix}deliveries:default")


def test_a_run_returns_at_once_what_a_worker_held_that_it_has_seen_end(
    open_stream, namespace, monkeypatch
):
    stream, other = (open_stream(max_staleness=0, groups_per_version=4) for _ in range(2))
    stream.advance(1)
    stream.join_group()
    put_admitted(stream, 0)
    held = other.take(1, timeout=0), other.admit(2, timeout=0)
    assert list(map(len, (held[0].ids, held[1]._left))) == [1, 2]
    task = other._task
    waiting = Admit(
        f"{process_name()}/1", 4, 4, 30_000, 30_000, 60_000, task.description.incarnation, ""
    )
    assert task.store.call(waiting).outcome == "wait"
    client = task.store.client
    for pid, place in ((os.getpid() + 1, processes._place()), (os.getpid(), "elsewher")):
        with monkeypatch.context() as changed:  # another machine may have this one's name
            changed.setattr(processes, "_place", lambda place=place: place)
            return_held(client, "math", namespace, pid)
        found = stream.stats()
        assert (found.admission.held, found.admission.waiting, found.ledger.leased) == (2, 1, 1)
    for _ in range(2):  # repeated, it returns nothing a second time
        return_held(client, "math", namespace, os.getpid())
        found = stream.stats()
        assert (found.admission.held, found.admission.waiting, found.ledger.leased) == (0, 0, 0)
        assert (found.admission.lost, found.taken_over, found.ledger.waiting) == (2, 1, 1)
    return_held(client, "no-such-task", namespace, os.getpid())
