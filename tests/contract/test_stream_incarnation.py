"""Redis loses its data, and another process creates the task anew."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

import redrb
from redrb import BatchTimeout, ConfigError, ExperienceStream, LeaseLost, Mixture, TaskMismatch
from redrb.stream.task.calls import Open
from redrb.stream.task.removal import remove_task
from tests.samples import numbered

SETTINGS = {"limit": 16, "max_staleness": 2}


@pytest.fixture
def wipe(client, namespace):
    """Delete all keys of the namespace, as a server does that restarts empty."""

    def wiped():
        for key in client.execute("KEYS", f"redrb:{{{namespace}:*"):
            client.execute("DEL", key)

    return wiped


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "was created anew" in text]


def settings_of(stream: ExperienceStream) -> dict[str, str]:
    """Return the settings that Redis keeps; asks as a process that gives none."""
    stored = stream._task.store.call(Open("a revision", "who")).settings
    return {name: stored[name] for name in SETTINGS}


def look(stream: ExperienceStream) -> None:
    with pytest.raises(BatchTimeout):
        stream.take(4, timeout=0)


def look_in_a_loop(stream: ExperienceStream) -> None:
    with pytest.raises(BatchTimeout):
        next(stream.leases(4, timeout=0))


def look_as_a_rank(stream: ExperienceStream) -> None:
    with pytest.raises(BatchTimeout):
        stream.take(4, timeout=0, rank=0, world_size=1, step=1)


def put_more(stream: ExperienceStream) -> None:
    stream.put(numbered(1), policy_version=1)


def drop_stale(stream: ExperienceStream) -> None:
    stream.discard_expired(1)


def beat(stream: ExperienceStream) -> None:
    stream._consumer.beat()


CALLS = [look, look_in_a_loop, look_as_a_rank, put_more, drop_stale, beat]


@pytest.mark.parametrize("call", CALLS)
def test_the_next_call_restores_the_settings_and_logs_the_loss_once(
    open_stream, wipe, caplog, call
):
    trainer = open_stream(**SETTINGS)
    maker = open_stream()
    maker.put(numbered(1), policy_version=1)
    trainer.take(1, timeout=5).ack()
    wipe()
    maker.put(numbered(1), policy_version=1)  # this creates the task without settings
    assert settings_of(maker) == {"limit": "", "max_staleness": ""}
    caplog.clear()
    for _ in range(2):
        call(trainer)
    assert settings_of(maker) == {"limit": "16", "max_staleness": "2"}
    [loss] = losses(caplog)
    assert "'math'" in loss
    assert "limit=16, max_staleness=2" in loss
    caplog.clear()
    call(trainer)
    maker.put(numbered(1), policy_version=1)
    assert not losses(caplog)  # the maker has created the task, and logged the loss then


def test_the_process_that_creates_the_task_anew_logs_the_loss(open_stream, wipe, caplog):
    maker = open_stream()
    maker.put(numbered(1))
    wipe()
    maker.put(numbered(1))
    assert len(losses(caplog)) == 1
    assert "gave it no settings" in losses(caplog)[0]


def test_a_mixture_notices_in_each_task(client, namespace, wipe, caplog):
    with Mixture(client, {"math": 1, "code": 1}, namespace=namespace) as mixture:
        makers = [ExperienceStream(client, task, namespace=namespace) for task in mixture.weights]
        wipe()
        for maker in makers:
            maker.put_many([[numbered(number)] for number in range(4)])
        caplog.clear()
        for _ in range(2):
            mixture.take(4, timeout=0).ack()
        assert len(losses(caplog)) == 2
        for maker in makers:
            maker.close()


def test_an_acknowledgement_of_lost_groups_restores_the_settings_too(open_stream, wipe):
    trainer, maker = open_stream(**SETTINGS), open_stream()
    maker.put(numbered(1), policy_version=1)
    lease = trainer.take(1, timeout=5)
    wipe()
    maker.put(numbered(1), policy_version=1)
    with pytest.raises(LeaseLost, match="Redis has lost its data"):
        trainer.take(1, timeout=0, ack=lease)
    assert settings_of(maker) == {"limit": "16", "max_staleness": "2"}


@pytest.mark.long
def test_a_waiting_take_notices(open_stream, wipe):
    trainer, maker = open_stream(**SETTINGS), open_stream()
    taken: list[redrb.Lease] = []
    waiting = threading.Thread(target=lambda: taken.append(trainer.take(2, timeout=30)))
    waiting.start()
    until = time.monotonic() + 20
    while not maker.stats().consumers_waiting:
        assert time.monotonic() < until
        time.sleep(0.01)
    wipe()
    maker.put(numbered(1), policy_version=1)
    maker.put(numbered(1), policy_version=1)
    waiting.join(30)
    assert settings_of(maker) == {"limit": "16", "max_staleness": "2"}
    taken[0].ack()


def test_a_task_created_anew_in_another_order_is_refused(open_stream, wipe):
    trainer, maker = open_stream(order="priority"), open_stream()
    wipe()
    maker.put(numbered(1))
    with pytest.raises(TaskMismatch, match="order"):
        trainer.take(1, timeout=0)


def test_a_maker_of_a_removed_task_says_who_has_removed_it(open_stream, client, caplog):
    maker = open_stream(limit=4)
    maker.put(numbered(1))
    remove_task(client, "math", namespace=maker.namespace)
    maker.put(numbered(2))
    [said] = losses(caplog)
    assert f"because process {os.getpid()} on {socket.gethostname()} removed it (`redrb rm`" in said
    assert "Restored from here: limit=4" in said
    assert len(maker) == 1


def test_the_stream_that_clears_a_task_logs_no_loss(open_stream, caplog):
    stream, other = open_stream(), open_stream()
    stream.put(numbered(1))
    stream.clear()
    stream.put(numbered(1))
    assert not losses(caplog)
    other.put(numbered(1))
    assert len(losses(caplog)) == 1


def test_a_consumer_group_that_joined_joins_again(open_stream, wipe):
    """Groups that were too stale on arrival are in its ledger, though it takes only later."""
    trainer, maker = open_stream(max_staleness=0), open_stream()
    trainer.join_group()
    wipe()
    maker.put(numbered(1), policy_version=1)
    trainer._consumer.beat()
    maker.advance(9)
    maker.put(numbered(1), policy_version=1)
    assert trainer.stats().joined
    assert trainer.stats().ledger.expired >= 1


def test_a_checkpoint_acknowledges_no_groups_that_were_put_after_a_loss(open_stream, wipe, caplog):
    trainer, maker = open_stream(), open_stream()
    maker.put_many([[numbered(number)] for number in range(3)])
    lease = trainer.take(3, timeout=0)
    trained, incarnation = dict.fromkeys(lease.ids, 1), lease.incarnation
    assert incarnation == trainer.incarnation
    wipe()
    maker.put_many([[numbered(number)] for number in range(3)])
    resumed = open_stream()
    assert resumed.settle(trained, incarnation=incarnation) == 0
    assert "3 groups that a checkpoint has trained cannot be acknowledged" in caplog.text
    with pytest.raises(ConfigError, match="id='1'"):
        resumed.settle({"1": 1}, incarnation=incarnation)
    with pytest.raises(ConfigError, match="give the samples of each group"):
        resumed.settle([1], incarnation=incarnation)
    assert len(resumed) == 3
    lease = resumed.take(2, timeout=0)
    assert resumed.settle(dict.fromkeys(lease.ids, 1), incarnation=lease.incarnation) == 2
    assert resumed.settle(dict.fromkeys(lease.ids, 1), incarnation=lease.incarnation) == 0
    assert resumed.stats().ledger.acked == 2
    lease.abandon()


def test_a_checkpoint_acknowledges_no_groups_that_were_put_anew_from_a_file(
    open_stream, tmp_path, caplog
):
    stream = open_stream()
    trained = dict.fromkeys(stream.put_many([[numbered(number)] for number in range(3)]), 1)
    incarnation = stream.incarnation
    stream.save(tmp_path / "saved")
    stream.clear()
    stream = open_stream()
    stream.resume(tmp_path / "saved")
    assert stream.settle(trained, incarnation=incarnation) == 0
    assert "3 groups that a checkpoint has trained cannot be acknowledged" in caplog.text
    lease = stream.take(3, timeout=0)
    assert min(lease.ids) > max(trained), "its ids are those of other groups"


def test_a_resume_is_no_loss_for_a_process_that_waits_for_it(open_stream, tmp_path, caplog):
    stream = open_stream()
    stream.put(numbered(1))
    stream.save(tmp_path / "saved")
    stream.clear()
    waiting, other = open_stream(), open_stream()
    other.resume(tmp_path / "saved")
    waiting.take(1, timeout=5).ack()
    assert not losses(caplog)


def test_dead_letters_and_groups_that_are_read_name_the_incarnation(open_stream):
    stream = open_stream()
    one, two = stream.put_many([[numbered(1)], [numbered(2)]])
    lease = stream.take(2, timeout=0)
    lease.reject("bad", [one])
    [letter], [read] = stream.dead_letters(), stream.read([two])
    assert {letter.incarnation, read.incarnation} == {stream.incarnation}
