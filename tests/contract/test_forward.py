"""`lease.forward` moves groups to the next task exactly once, whatever dies or comes too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
import torch

import redrb
from redrb import (
    BufferItem,
    ConfigError,
    ExperienceStream,
    LeaseLost,
    StoreFull,
    make_experience_batch,
)
from redrb.errors import RecordError
from redrb.stream.mixture import Mixture
from redrb.stream.put import receiver
from redrb.stream.take.forwarding import Forwarded, ForwardOptions
from tests.audit import audit
from tests.contract.test_stream_exactly_once import WHEN, Line
from tests.samples import numbered, numbers

Open = Callable[..., ExperienceStream]


@pytest.fixture
def open_task(client, namespace):
    """Open a task of this test by name; all are audited at the end."""
    opened: list[ExperienceStream] = []

    def open_it(task, **settings):
        opened.append(ExperienceStream(client, task, namespace=namespace, **settings))
        return opened[-1]

    yield open_it
    for stream in opened:
        audit(stream)
        assert stream.stats().ledger.balanced
        stream.close()


@pytest.fixture
def rollouts(open_task):
    stream = open_task("rollouts")
    stream.join_group()
    return stream


@pytest.fixture
def scored(open_task):
    stream = open_task("scored")
    stream.join_group()
    return stream


def put(stream: ExperienceStream, *groups: int) -> None:
    stream.put_many([[numbered(n), numbered(n)] for n in groups], policy_version=3)


def with_score(group: list[BufferItem]) -> list[BufferItem]:
    for item in group:
        item.tensors["score"] = torch.tensor(0.5)
    return group


def scored_groups(lease: redrb.Lease) -> list[list[BufferItem]]:
    return [with_score(group) for group in lease.groups()]


def store_only(lease: redrb.Lease, stream: ExperienceStream, count: int) -> None:
    """Forward the first groups of a lease as a process does that dies before it acknowledges."""
    (part,) = lease.parts
    groups: Any = scored_groups(lease)[:count]
    Forwarded(part, list(part.ids)[:count], groups).store(stream, ForwardOptions())


def test_groups_get_fields_and_leave_the_first_task(rollouts, scored):
    put(rollouts, 0, 1, 2)
    lease = rollouts.take(3, timeout=0)
    assert lease.forward(scored, scored_groups(lease)) == (1, 2, 3)
    assert not lease
    assert rollouts.stats().ledger.as_dict() | {"acked": 3, "put": 3} == (
        rollouts.stats().ledger.as_dict()
    )
    found = scored.take(3, timeout=0)
    assert numbers(found) == [0, 0, 1, 1, 2, 2]
    assert found.policy_versions == [3] * 6
    assert [float(item.tensors["score"]) for item in found.items()] == [0.5] * 6


def test_a_batch_with_added_fields_is_forwarded(rollouts, scored):
    put(rollouts, 0, 1)
    lease = rollouts.take(2, timeout=0)
    batch = lease.batch()
    batch.tensors["reference"] = batch.action_log_probs - 1
    assert lease.forward(scored, batch) == (1, 2)
    first, _ = scored.take(2, timeout=0).groups()
    assert len(first) == 2
    assert torch.equal(first[0].tensors["reference"], first[0].action_log_probs - 1)


def test_some_groups_are_filtered_and_some_stay_leased(rollouts, scored):
    put(rollouts, 0, 1, 2, 3)
    lease = rollouts.take(4, timeout=0)
    groups = scored_groups(lease)
    first, second, third, fourth = lease.ids
    assert lease.forward(scored, {third: groups[2], first: None}) == (1, None)
    assert lease.ids == (second, fourth)
    assert lease.forward(scored, [None, groups[3]]) == (None, 2)
    ledger = scored.stats().ledger
    assert (ledger.put, ledger.filtered, ledger.waiting) == (4, 2, 2)
    assert rollouts.stats().ledger.acked == 4
    assert numbers(scored.take(2, timeout=0)) == [2, 2, 3, 3]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("before", [0, 1])
def test_a_forward_whose_connection_breaks_lands_once(
    client, rollouts, scored, monkeypatch, when, before
):
    put(rollouts, 0, 1)
    lease = rollouts.take(2, timeout=0)
    groups = scored_groups(lease)
    line = Line(client, monkeypatch)
    line.cuts = [""] * before + [when] * 2
    assert lease.forward(scored, groups) == (1, 2)
    assert line.cuts == []
    assert scored.stats().ledger.put == 2
    assert rollouts.stats().ledger.acked == 2


def test_a_filtered_group_is_counted_once(open_task, rollouts, scored):
    put(rollouts, 0, 1)
    lease = rollouts.take(2, timeout=0)
    (part,) = lease.parts
    groups: Any = [None, scored_groups(lease)[1]]
    Forwarded(part, list(part.ids), groups).store(scored, ForwardOptions())
    assert lease.forward(scored, groups) == (None, 1)
    assert (scored.stats().ledger.put, scored.stats().ledger.filtered) == (2, 1)


def test_filters_of_the_next_task_drop_groups_once(open_task, rollouts):
    scored = open_task("scored", filters=[lambda group: bool(group[0].reward != 1)])
    scored.join_group()
    put(rollouts, 0, 1, 2)
    lease = rollouts.take(3, timeout=0)
    store_only(lease, scored, 3)
    assert lease.forward(scored, scored_groups(lease)) == (1, None, 2)
    assert (scored.stats().ledger.put, scored.stats().ledger.filtered) == (3, 1)


def forward_all(stream: ExperienceStream, target: ExperienceStream, count: int) -> None:
    for _ in range(count):
        put(stream, 7)
        lease = stream.take(1, timeout=0)
        lease.forward(target, scored_groups(lease))


def records(stream: ExperienceStream) -> int:
    prefix, run = stream._task.store.keys.prefix, stream._task.store.client.execute
    origins = run("HKEYS", f"{prefix}sources")
    return sum(run("HLEN", f"{prefix}sources:{origin.decode()}") for origin in origins)


def test_records_do_not_grow_with_the_groups_that_were_forwarded(rollouts, scored, monkeypatch):
    monkeypatch.setattr(receiver, "LOOK_EVERY", 4)
    sizes = []
    for _ in range(4):
        forward_all(rollouts, scored, 8)
        scored.take(8, timeout=0).ack()
        sizes.append(records(scored))
    assert max(sizes) <= 8


def test_a_task_that_was_created_anew_forwards_groups_with_the_same_ids(
    open_task, rollouts, scored
):
    paused = open_task("rollouts")
    put(rollouts, 0, 1)
    late = paused.take(1, timeout=0)
    lease = rollouts.take(1, timeout=0)
    lease.forward(scored, scored_groups(lease))
    rollouts.clear()
    put(rollouts, 2, 3)
    lease = rollouts.take(2, timeout=0)
    assert lease.ids == (1, 2)
    assert None not in lease.forward(scored, scored_groups(lease))
    with pytest.raises(LeaseLost, match="created anew"):
        late.forward(scored, scored_groups(late))
    assert scored.stats().ledger.put == 3
    assert records(scored) == 2


def test_a_row_that_another_program_damaged_is_replaced(rollouts, scored):
    forward_all(rollouts, scored, 1)
    prefix, run = scored._task.store.keys.prefix, scored._task.store.client.execute
    (origin,) = run("HKEYS", f"{prefix}sources")
    run("HSET", f"{prefix}sources", origin, b"\xff\xfe 1 1 ")
    forward_all(rollouts, scored, 1)
    assert scored.stats().ledger.put == 2


def test_ids_that_a_failover_gave_to_other_groups_are_no_repetition(rollouts, scored):
    forward_all(rollouts, scored, 1)
    put(rollouts, 1, 2)
    lease = rollouts.take(2, timeout=0)
    prefix, run = scored._task.store.keys.prefix, scored._task.store.client.execute
    (origin,) = (name.decode() for name in run("HKEYS", f"{prefix}sources"))
    run("HSET", f"{prefix}sources", origin, f"{rollouts.incarnation} 9 9")
    run("HSET", f"{prefix}sources:{origin}", lease.ids[1], "1 0123456789abcdef")
    assert None not in lease.forward(scored, scored_groups(lease))
    assert scored.stats().ledger.put == 3


def test_without_room_the_groups_stay_leased_and_are_forwarded_later(open_task, rollouts):
    scored = open_task("scored", limit=2)
    put(rollouts, 0, 1, 2)
    lease = rollouts.take(3, timeout=0)
    groups = scored_groups(lease)
    with pytest.raises(StoreFull):
        lease.forward(scored, groups, timeout=0)
    assert len(lease) == 3
    stored = scored.take(2, timeout=0)
    assert numbers(stored) == [0, 0, 1, 1]
    held = stored.ids
    stored.ack()
    ids = lease.forward(scored, groups, timeout=5)
    assert ids[:2] == held
    assert numbers(scored.take(1, timeout=0)) == [2, 2]
    assert rollouts.stats().ledger.acked == 3


@pytest.mark.parametrize("needed", [False, True])
def test_a_dead_letter_that_was_forwarded_and_is_requeued_is_stored_once(
    open_task, rollouts, scored, monkeypatch, needed
):
    monkeypatch.setattr(receiver, "LOOK_EVERY", 1)
    if needed:  # by another consumer group: the old entries stay beside the new ones
        open_task("rollouts", group="other").join_group()
    put(rollouts, 0, 1)
    for number in range(2):  # a letter may be requeued, and buried, more than once
        lease = rollouts.take(2, timeout=0)
        if number == 0:
            store_only(lease, scored, 1)
        lease.reject("the stage died after the put")
        forward_all(rollouts, scored, 3)  # the floor passes the letters
        assert len(rollouts.requeue([letter.id for letter in rollouts.dead_letters()])) == 2
    lease = rollouts.take(2, timeout=0)
    assert lease.forward(scored, scored_groups(lease))[0] == 1
    assert scored.stats().ledger.put == 8
    forward_all(rollouts, scored, 2)
    assert needed or records(scored) <= 2  # the others are removed at last


def test_late_puts_of_requeued_groups_are_recognized_or_refused(rollouts, scored, monkeypatch):
    monkeypatch.setattr(receiver, "LOOK_EVERY", 1)
    put(rollouts, 0)
    lease = rollouts.take(1, timeout=0)
    (part,) = lease.parts
    layouts, groups = dict(part.layouts), scored_groups(lease)
    lease.reject("the stage was silent for too long")
    part.layouts = layouts  # the stage goes on
    late = Forwarded(part, [1], list(groups))
    forward_all(rollouts, scored, 2)
    assert len(rollouts.requeue([1])) == 1
    assert late.store(scored, ForwardOptions()) == [3]
    lease = rollouts.take(1, timeout=0)
    assert lease.forward(scored, groups) == (3,)
    forward_all(rollouts, scored, 2)  # the record is removed
    with pytest.raises(LeaseLost, match="Nothing of this call needs to be repeated"):
        late.store(scored, ForwardOptions())
    assert scored.stats().ledger.put == 5


def test_a_resumed_task_knows_what_was_forwarded_into_it(rollouts, scored, monkeypatch, tmp_path):
    monkeypatch.setattr(receiver, "LOOK_EVERY", 1)
    put(rollouts, 0, 1, 2)
    lease = rollouts.take(3, timeout=0)
    forward_all(rollouts, scored, 2)
    store_only(lease, scored, 2)
    scored.save(tmp_path / "scored")
    store_only(lease, scored, 3)  # after the save: lost with the groups that were put since
    scored.clear()
    scored.resume(tmp_path / "scored")
    # those that were put anew have other ids, which the records of the file do not know
    first, second, third = lease.forward(scored, scored_groups(lease))
    assert (first, second) == (None, None)
    assert third is not None
    forward_all(rollouts, scored, 2)
    assert scored.stats().ledger.put == 7
    assert records(scored) <= 3


def test_more_dead_letters_than_a_put_names_hold_the_floor(rollouts, scored, monkeypatch):
    monkeypatch.setattr(receiver, "LOOK_EVERY", 1)
    put(rollouts, *range(230))
    lease = rollouts.take(230, timeout=0)
    store_only(lease, scored, 220)
    lease.reject("the stage died after the put")
    forward_all(rollouts, scored, 2)
    assert len(rollouts.requeue(range(1, 231))) == 230
    lease = rollouts.take(230, timeout=0)
    lease.forward(scored, scored_groups(lease))
    assert scored.stats().ledger.put == 232


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([None], ConfigError, "1 groups for a lease of 2"),
        ({99: None}, ConfigError, r"groups \[99\] are not in this lease"),
        ("ab", ConfigError, "give a list"),
        ([[], None], RecordError, "group 1 is to be forwarded as"),
        (make_experience_batch([numbered(0)] * 3), RecordError, "3 rows, the lease 4 samples"),
    ],
)
def test_wrong_groups_are_refused_and_nothing_happens(rollouts, scored, groups, error, message):
    put(rollouts, 0, 1)
    lease = rollouts.take(2, timeout=0)
    with pytest.raises(error, match=message):
        lease.forward(scored, groups)
    assert len(lease) == 2
    assert scored.stats().ledger.put == 0


def test_groups_move_between_servers(client, rollouts, server_urls):
    with (
        redrb.connect(f"fake://{uuid4().hex}") as other,
        ExperienceStream(other, "scored") as scored,
    ):
        put(rollouts, 0, 1)
        lease = rollouts.take(2, timeout=0)
        store_only(lease, scored, 1)
        assert lease.forward(scored, scored_groups(lease)) == (1, 4)
        assert scored.stats().ledger.put == 2


def test_a_mixture_forwards_the_groups_of_each_task_once(client, namespace, open_task):
    tasks = {"math": open_task("math"), "code": open_task("code")}
    judged, run, mixed = open_task("judged"), open_task("run"), open_task("mixed")
    mixed.join_group()
    targets = {"math": judged, "code": run}
    for first, task in enumerate(tasks.values()):
        put(task, 10 * first, 10 * first + 1)
    with Mixture(client, {"math": 1, "code": 1}, namespace=namespace) as mixture:
        lease = mixture.take(4, timeout=0)
        first = lease.parts["math"]
        with pytest.raises(ConfigError, match=r"no stream for them"):
            lease.forward({"math": judged}, lease.groups())
        store_only(first, judged, 1)  # a process that died
        groups = scored_groups(lease)
        seqs = first.ids
        done = lease.forward(targets, {"math": dict(zip(seqs, groups[:2], strict=True))})
        assert (done[0], len(lease.parts["math"])) == (1, 0)  # the one that was stored before
        rest = scored_groups(lease)
        assert lease.forward(mixed, [rest[0], None]) == (1, None)
        assert not lease
    assert [each.stats().ledger.put for each in (judged, run, mixed)] == [2, 0, 2]
    assert [each.stats().ledger.acked for each in tasks.values()] == [2, 2]
    assert mixed.stats().ledger.filtered == 1
