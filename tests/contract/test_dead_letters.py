"""Dead letters that are requeued, dropped, and bounded in number."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import redrb
from redrb import ExperienceStream, StoreFull
from redrb.connection import Client
from redrb.stream.task.calls import Fill
from redrb.watch.groups import Browser, Choice
from tests.conftest import Opener
from tests.samples import numbered, numbers


def filled(open_stream: Opener, count: int = 4, **settings: Any) -> ExperienceStream:
    stream = open_stream(**settings)
    stream.put_many([[numbered(n)] for n in range(1, count + 1)])
    return stream


def reject(stream: ExperienceStream, count: int) -> list[int]:
    lease = stream.take(count, timeout=0)
    ids = list(lease.ids)
    lease.reject("bad")
    return ids


def counts(stream: ExperienceStream) -> tuple[int, int, int]:
    ledger = stream.stats().ledger
    assert ledger.balanced
    return ledger.put, ledger.dead, ledger.waiting


@pytest.mark.parametrize(
    ("order", "expected"), [("fifo", [3, 4, 1, 2, 5]), ("lifo", [5, 4, 3, 2, 1])]
)
def test_letters_are_put_again_once(open_stream, order, expected):
    stream = filled(open_stream, order=order, max_bytes=10**6)
    ids = reject(stream, 2)
    stored = stream.stats()
    assert counts(stream) == (4, 2, 2)
    assert stream.requeue([*ids, *ids, 99]) == dict(zip(sorted(ids), (5, 6), strict=True))
    assert stream.requeue(ids) == {}
    assert counts(stream) == (4, 0, 4)
    assert (stream.stats().dead_letters, stream.stats().dead_dropped) == (0, 0)
    assert stream.stats().stored == stored.stored + 2
    stream.put(numbered(5))  # ids count on
    taken = []
    for _ in expected:
        lease = stream.take(1, timeout=0)
        taken += numbers(lease)
        lease.ack()
    assert taken == expected


def test_only_the_consumer_group_that_gave_a_group_up_gets_it_back(open_stream):
    first, other = filled(open_stream), open_stream(group="other")
    other.join_group()
    (seq,) = reject(first, 1)
    assert (other.requeue([seq]), other.drop_dead_letters([seq])) == ({}, 0)
    assert first.requeue([seq]) == {1: 5}
    assert counts(first) == counts(other) == (4, 0, 4)
    assert first.take(4, timeout=0).ids == (2, 3, 4, 5)
    assert other.take(4, timeout=0).ids == (1, 2, 3, 4)
    late = open_stream(group="late")
    late.join_group(start="newest")
    first.put(numbered(5))
    (seq,) = reject(late, 1)
    with open_stream(group="later") as later:
        later.join_group(start="newest")
        late.requeue([seq])
        assert counts(late) == (1, 0, 1)
        assert counts(later) == (0, 0, 0)


def test_two_operators_requeue_each_letter_once(open_stream):
    stream = filled(open_stream, 40)
    ids = reject(stream, 40)
    with ThreadPoolExecutor(4) as pool:
        requeued = list(pool.map(stream.requeue, [ids] * 4))
        dropped = list(pool.map(stream.drop_dead_letters, [ids] * 2))
    assert (sum(map(len, requeued)), sum(dropped)) == (40, 0)
    assert counts(stream) == (40, 0, 40)
    assert len(stream.take(40, timeout=0).batch()) == 40


def test_a_letter_begins_anew_with_failures_and_reads(open_stream):
    stream = filled(open_stream, 1, max_deliveries=1, max_reads=2, order="priority")
    stream.take(1, timeout=0).ack()
    with pytest.raises(ZeroDivisionError), stream.take(1, timeout=0):
        raise ZeroDivisionError
    (letter,) = stream.dead_letters()
    assert len(stream.requeue([letter.id])) == 1
    for left in (1, 0):
        stream.take(1, timeout=0).ack()
        assert counts(stream) == (1, 0, left)


def test_a_requeued_group_keeps_status_tags_versions_and_expires(client, open_stream):
    stream = open_stream(tags={"site": str}, max_staleness=2, limit=1)
    ids = stream.put(numbered(1), policy_version=1, tags={"site": "a"})
    stream.move(ids, "aborted")
    stream.take(1, timeout=0, status="aborted").reject("bad")
    stream.put(numbered(2), policy_version=1, tags={"site": "b"})
    assert stream.requeue(ids) == {1: 3}  # beyond the limit
    assert stream.count("aborted", {"site": "a"}) == 1
    shown = Browser(client, "math", namespace=stream.namespace).group(3)
    assert shown is not None
    assert (shown.oldest_version, shown.notes) == (1, ("it was requeued; its first id was 1",))
    assert stream.stats().stored == 2
    stream.advance(9)
    assert stream.expire(statuses=["aborted", "completed"]) == 2


def test_a_waiting_take_is_woken_by_a_requeue(open_stream):
    stream, other = filled(open_stream, 1), open_stream()
    ids = reject(stream, 1)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(stream.take, 1, timeout=10)
        while not other.stats().consumers_waiting:
            assert not taking.done()
        other.requeue(ids)
        assert numbers(taking.result()) == [1]


def test_requeued_groups_count_as_waiting(open_stream):
    stream = filled(open_stream, 2, max_waiting=2, on_full="error")
    stream.requeue(reject(stream, 2))
    with pytest.raises(StoreFull):
        stream.put(numbered(3))
    assert numbers(stream.take(2, timeout=0)) == [1, 2]
    assert stream.put_many([[numbered(n)] for n in (3, 4)])


def test_another_process_deletes_the_letters_that_one_has_left(open_stream):
    """The process that set a smaller bound has died before all letters were deleted."""
    stream = filled(open_stream, 40)
    reject(stream, 35)
    run, pages = stream._task.store.call, itertools.count()

    def dying(call, *beside, **options):
        if isinstance(call, Fill) and next(pages) == 1:
            raise ZeroDivisionError
        return run(call, *beside, **options)

    stream._task.store.call = dying
    with pytest.raises(ZeroDivisionError):
        stream.configure(max_dead=3)
    assert stream.stats().dead_letters == 25
    assert open_stream().stats().dead_letters == 3


def test_groups_that_were_requeued_leave_nothing(open_stream):
    stream = filled(open_stream, 3)
    stream.requeue(reject(stream, 3))
    stream.take(3, timeout=0).ack()
    keys = stream._task.store.keys
    assert not stream._task.store.client.execute("EXISTS", f"{keys.prefix}behind")


def test_dropping_letters_reads_none_of_them(real_url, namespace):
    """Each may be large."""
    with redrb.connect(real_url) as client:
        stream = ExperienceStream(client, "math", namespace=namespace)
        stream.put_many([[numbered(n)] for n in range(3)])
        ids = reject(stream, 3)
        before = reads(client)
        assert stream.drop_dead_letters([*ids, ids[0], 99]) == 3
        assert reads(client) == before
        stream.close()


def reads(client: Client) -> int:
    """Return how often the server has read entries of streams."""
    statistics = client.execute("INFO", "commandstats").decode().splitlines()
    return sum(int(re.split("[=,]", line)[1]) for line in statistics if "xrange:" in line)


def test_entries_of_another_program_hide_no_letters(open_stream, namespace, caplog):
    stream = filled(open_stream)
    store = stream._task.store
    first = reject(stream, 1)
    foreign = [
        store.client.execute("XADD", store.keys.dead, "*", *fields)
        for fields in (("seq", "x"), ("a", "b"), ("group", b"\xff"))
    ]
    second = reject(stream, 1)
    assert [letter.id for letter in stream.dead_letters()] == [*second, *first]
    assert "is passed over: an entry of the dead-letter stream cannot be read" in caplog.text
    choice = Choice(status="dead")
    shown = Browser(store.client, "math", namespace=namespace).look(choice)
    assert [group.id for group in shown.groups] == [*second, *first]
    store.client.execute("XDEL", store.keys.dead, *foreign)


def test_a_requeued_group_is_evicted_by_its_new_arrival(open_stream):
    stream = filled(open_stream, 3, limit=3, on_full="drop_oldest")
    stream.requeue(reject(stream, 1))  # the group 1
    lease = stream.take(1, timeout=0)
    stream.put(numbered(4))  # evicts the group 3
    lease.release()
    stream.put(numbered(5))  # evicts the group 2
    assert numbers(stream.take(3, timeout=0)) == [1, 4, 5]


def test_letters_of_a_restored_task_are_requeued(client, namespace, tmp_path):
    settings: dict[str, Any] = {"namespace": namespace, "max_dead": 3}
    with ExperienceStream(client, "saved", **settings) as stream:
        stream.put_many([[numbered(n)] for n in (1, 2, 3)])
        ids = reject(stream, 2)
        stream.save(tmp_path / "task")
    with ExperienceStream(client, "restored", **settings) as stream:
        stream.resume(tmp_path / "task")
        assert counts(stream) == (3, 2, 1)
        assert stream.dead_letters()[0].incarnation != stream.incarnation
        # the group 3 was put anew, as 4
        assert stream.requeue(reversed(ids)) == {1: 5, 2: 6}
        assert counts(stream) == (3, 0, 3)
        assert numbers(stream.take(3, timeout=0)) == [3, 1, 2]


def test_the_letters_of_a_consumer_group_are_deleted_with_it(client, open_stream):
    one, other = open_stream(group="one"), open_stream(group="other")
    other.join_group()
    one.put_many([[numbered(1)], [numbered(2)]])
    for stream in (one, other):
        reject(stream, 2)
    one.drop_group()
    assert client.execute("XLEN", f"{other._task.store.keys.prefix}dead") == 2
    assert len(list(other.dead_letters())) == 2
    assert other.stats().dead_dropped == 2
