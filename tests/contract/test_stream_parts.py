"""Groups in parts: a group is there once, with its last part; incomplete ones are bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
import torch

import redrb
from redrb import ConfigError, ExperienceStream
from redrb.errors import RecordError, StoreFull
from redrb.stream import PartStats
from redrb.stream.admission.calls import Admit
from redrb.stream.put.producer import Producer
from tests.parts_audit import audit_parts
from tests.samples import numbered, numbers


def parts(stream: ExperienceStream) -> PartStats:
    audit_parts(stream)
    found = stream.stats().parts
    assert found.balanced
    return found


def put_parts(
    stream: ExperienceStream, *indices: int, key: str = "a", of: int = 3, **more: Any
) -> Any:
    """Put parts whose number is their index; return the result of the last one."""
    for index in indices:
        found = stream.put_part(key, numbered(index), index=index, of=of, **more)
    return found


def make_due(stream: ExperienceStream, key: str = "a") -> None:
    """Let the age limit of a group, or the grace of its maker, be over."""
    due = f"{stream._task.store.keys.prefix}part_due"
    assert stream._task.store.client.execute("ZADD", due, "XX", "CH", 1, key) == 1


def make_old(stream: ExperienceStream, key: str = "a") -> None:
    """Let a group be as old as it may become."""
    store = stream._task.store
    records = f"{store.keys.prefix}part_records"
    record = msgpack.unpackb(store.client.execute("HGET", records, key))
    store.client.execute("HSET", records, key, msgpack.packb(record | {"ends": 1}))
    make_due(stream, key)


@pytest.fixture
def stream(open_stream):
    return open_stream()


def test_a_part_that_comes_again_or_late_counts_once(stream):
    put_parts(stream, 0, 0, 1, 1)
    assert (parts(stream).waiting, parts(stream).repeated) == (2, 2)
    assert put_parts(stream, 2) == put_parts(stream, 2) == put_parts(stream, 0) == 1
    assert (parts(stream).late, stream.stats().ledger.put) == (2, 1)


def test_parts_differ_in_versions_extras_and_length(stream):
    for index in range(2):
        item = numbered(
            index,
            sequences=torch.arange(3 + index),
            token_versions=torch.tensor([index, index + 1]),
            extras={"text": str(index)},
        )
        stream.put_part("a", [item], index=index, of=2, policy_version=5 + index)
    with stream.take(1, timeout=0) as lease:
        items = lease.items()
        assert [item.policy_version for item in items] == [5, 6]
        assert [item.extras["text"] for item in items] == ["0", "1"]
        assert [len(item.sequences) for item in items] == [3, 4]
        lease.ack()


def test_filters_orders_and_tags_see_the_whole_group(open_stream):
    stream = open_stream(
        order="priority", tags=["source"], filters=[redrb.stream.reward_variance(0.1)]
    )
    stream.join_group()
    for key, rewards in (("flat", (1, 1)), ("low", (0, 1)), ("high", (0, 1))):
        for index, reward in enumerate(rewards):
            stream.put_part(
                key,
                numbered(reward),
                index=index,
                of=2,
                tags={"source": key} if index == 0 else None,
                priority={"flat": 1, "low": 2, "high": 3}[key],
            )
    assert stream.stats().ledger.filtered == 1
    assert stream.count(where={"source": "low"}) == 1
    assert stream.take(1, timeout=0, where={"source": "high"}).ids == (2,)


def test_parts_of_a_key_agree(stream):
    put_parts(stream, 0)
    for wrong in ({"of": 4}, {"least": 1}, {"on_incomplete": "dead"}):
        with pytest.raises(ConfigError, match="differ from those of its earlier parts: of=3"):
            put_parts(stream, 1, **wrong)
    other = numbered(1, tensors={"more": torch.ones(2)})
    with pytest.raises(ConfigError, match=r'fields \{"action_log_probs"'):
        stream.put_part("a", other, index=1, of=3)
    assert put_parts(stream, 1, 2) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"key": ""}, {"key": "k" * 257}, {"index": 3}, {"of": 0}, {"least": 4}, {"part_age": "soon"}]
    + [{"on_incomplete": "keep"}, {"most_parts": 0}, {"timeout": -1}],
)
def test_unusable_arguments_are_refused(stream, wrong):
    given: dict[str, Any] = {"key": "a", "index": 0, "of": 3}
    with pytest.raises(ConfigError):
        stream.put_part(item=numbered(0), **{**given, **wrong})


def test_a_bad_part_is_refused_and_the_others_stay(stream):
    put_parts(stream, 0, 1)
    with pytest.raises(RecordError):
        stream.put_part("a", numbered(2, reward=torch.tensor(float("nan"))), index=2, of=3)
    with pytest.raises(RecordError, match="not 0 groups"):
        stream.put_part("a", [], index=2, of=3)
    assert put_parts(stream, 2) == 1


def test_the_number_of_groups_that_wait_is_bounded(stream):
    put_parts(stream, 0, key="a")
    put_parts(stream, 0, key="b")
    with pytest.raises(StoreFull, match="2 groups wait for parts") as caught:
        put_parts(stream, 0, key="c", most_parts=2)
    assert caught.value.reason == "most_parts"
    assert put_parts(stream, 1, 2, key="a", most_parts=2) == 1


@pytest.mark.parametrize("groups", [3, 10])
def test_groups_past_their_age_make_room_for_others(stream, pages, groups):
    """Their makers were killed, and no consumer lives."""
    pages(parts_dropped=3)
    for number in range(groups):
        put_parts(stream, 0, key=f"old-{number}", least=1 if number % 4 == 3 else 3)
    for number in range(groups):  # not before: each part ends groups that are due
        make_due(stream, f"old-{number}")
    assert put_parts(stream, 0, key="new", most_parts=groups) is None
    while stream._parts.finish_due(60):
        pass
    counts = parts(stream)
    assert (counts.groups, counts.delivered, counts.dropped) == (
        1,
        groups // 4,
        groups - groups // 4,
    )


def test_groups_that_are_due_together_end_in_one_beat(stream, pages):
    pages(parts_dropped=3)
    groups = 4
    for number in range(3 * groups):
        how = ({"least": 1}, {}, {"on_incomplete": "dead"})[number % 3]
        put_parts(stream, 0, key=str(number), **how)
        make_due(stream, str(number))
    stream.join_group()
    stream._consumer._slice_s = 60.0
    stream._consumer.beat()
    counts = parts(stream)
    assert (counts.delivered, counts.dropped, counts.dead, counts.groups) == (*[groups] * 3, 0)


def test_due_groups_end_in_time_and_the_next_call_goes_on(stream):
    for number in range(3):
        put_parts(stream, 0, key=str(number), least=1)
    for number in range(3):
        make_due(stream, str(number))
    for delivered in (1, 2, 3):
        assert stream._parts.finish_due(0.0)
        assert parts(stream).delivered == delivered


def test_a_task_without_room_is_not_asked_again_for_each_group(open_stream):
    stream = open_stream(limit=1)
    stream.put(numbered(9))
    for number in range(3):
        put_parts(stream, 0, key=str(number), least=1)
    for number in range(3):
        make_due(stream, str(number))
    assert not stream._parts.finish_due(60)
    with pytest.raises(StoreFull, match="3 groups wait for parts"):
        put_parts(stream, 0, key="new", most_parts=3)
    due = f"{stream._task.store.keys.prefix}part_due"
    assert stream._task.store.client.execute("ZCOUNT", due, 1, 1) == 1


def test_old_groups_are_put_with_enough_parts_dropped_or_buried(stream):
    put_parts(stream, 1, 2, least=2)
    put_parts(stream, 0, key="few", least=2)
    put_parts(stream, 0, 2, key="dead", on_incomplete="dead")
    stream.join_group()
    stream._consumer.attend()
    for key in ("a", "few", "dead"):
        make_due(stream, key)
        stream._consumer.beat()
    counts = parts(stream)
    assert (counts.delivered, counts.dropped, counts.dead, counts.waiting) == (1, 1, 1, 0)
    assert counts.bytes == 0
    letter = stream.dead_letters()[0]
    assert letter.reason == "group 'dead' has 2 of 3 parts"
    assert numbers(letter.items or []) == [0, 2]
    with stream.take(1, timeout=0) as lease:
        assert numbers(lease) == [1, 2]
        lease.ack()
    assert put_parts(stream, 0) == 1
    assert put_parts(stream, 1, key="few", least=2) is None
    assert parts(stream).late == 2


def test_a_part_that_arrives_while_its_group_is_put_for_its_age_is_not_lost(stream, monkeypatch):
    put_parts(stream, 0, 1, least=2)
    put, found = Producer.put, []

    def after_another_part(self, *arguments):
        if not found:
            found.append(None)
            found.append(put_parts(stream, 2, least=2))
        return put(self, *arguments)

    monkeypatch.setattr(Producer, "put", after_another_part)
    make_due(stream)
    stream._parts.finish_due()
    assert found[1] == 1
    assert (parts(stream).completed, parts(stream).delivered) == (1, 0)
    assert numbers(stream.take(1, timeout=0)) == [0, 1, 2]


def test_one_right_covers_the_group_and_outlives_its_maker(open_stream):
    settings = {"max_staleness": 0, "groups_per_version": 4, "order": "admission"}
    stream, maker = open_stream(**settings), open_stream(**settings)
    stream.advance(1)
    with pytest.raises(ConfigError, match="orders groups by their rights"):
        put_parts(stream, 0, policy_version=1)
    with maker.admit(3, timeout=0) as right, stream.admit(1, timeout=0) as second:
        put_parts(maker, 0, policy_version=1, admission=right)
        put_parts(stream, 1, policy_version=1, admission=second)
        assert (right.left, second.left) == (2, 1)
        put_parts(maker, 0, key="few", policy_version=1, admission=right)
    maker.close()
    rights = stream.stats().admission
    assert (rights.held, rights.returned) == (2, 2)
    put_parts(stream, 2, policy_version=1)
    make_due(stream, "few")
    stream._parts.finish_due()
    rights = stream.stats().admission
    assert (rights.used, rights.held, rights.returned, rights.late) == (1, 0, 3, 0)
    assert rights.balanced


def test_a_right_that_a_group_keeps_is_not_returned_by_a_maker_without_the_reply(open_stream):
    """It does not know that its part was stored, and leaves the block of its rights."""
    stream = open_stream(max_staleness=0, groups_per_version=4)
    stream.advance(1)
    with stream.admit(3, timeout=0) as right:
        part = right.hand_over(1)
        put_parts(stream, 0, policy_version=1, admission=part)
        right.hand_back(part.numbers)
    rights = stream.stats().admission
    assert (rights.held, rights.returned) == (1, 2)
    put_parts(stream, 1, 2, policy_version=1)
    rights = stream.stats().admission
    assert (rights.used, rights.held, rights.late) == (1, 0, 0)
    assert rights.balanced


@pytest.mark.parametrize("rule", ["dead", "drop"])
def test_a_maker_that_waits_is_woken_for_the_right_of_a_group_that_is_not_put(open_stream, rule):
    stream = open_stream(max_staleness=0, groups_per_version=1)
    stream.advance(1)
    with stream.admit(1, timeout=0) as right:
        put_parts(stream, 0, on_incomplete=rule, policy_version=1, admission=right)
    store, incarnation = stream._task.store, stream._task.description.incarnation
    waits = Admit("maker/1", 1, 1, 60_000, 60_000, 60_000, incarnation, "series")
    assert store.call(waits).outcome == "wait"
    make_due(stream)
    stream._parts.finish_due()
    assert store.client.execute("LLEN", f"{store.keys.prefix}wake:maker/1") == 1
    assert store.call(waits).outcome == "granted"


def test_a_whole_group_waits_for_room(open_stream):
    stream = open_stream(limit=1)
    stream.put(numbered(9))
    with pytest.raises(StoreFull) as caught:
        put_parts(stream, 0, 1, 2, timeout=0)
    assert any("put the group later" in note for note in caught.value.__notes__)
    stream.take(1, timeout=0).ack()
    assert put_parts(stream, 2) == 2


@pytest.mark.parametrize("rule", ["dead", "drop"])
def test_a_group_that_can_never_be_put_is_removed_at_its_age_limit(open_stream, rule):
    stream = open_stream(max_bytes=100)
    with pytest.raises(ConfigError, match="max_bytes") as caught:
        put_parts(stream, 0, 1, 2, on_incomplete=rule)
    assert any("until its age limit" in note for note in caught.value.__notes__)
    make_due(stream)
    stream._parts.finish_due()
    assert parts(stream).groups == 1  # max_bytes may be raised until then
    make_old(stream)
    stream._parts.finish_due()
    counts = parts(stream)
    assert (counts.groups, counts.dead, counts.dropped) == (0, rule == "dead", rule == "drop")
    letters = stream.dead_letters()
    assert [letter.reason for letter in letters] == ["group 'a' cannot be put"] * counts.dead
    for letter in letters:
        assert letter.exception == "redrb.errors.ConfigError"
        assert "larger than max_bytes" in letter.message
        assert numbers(letter.items or []) == [0, 1, 2]


def test_a_group_that_a_check_refuses_becomes_a_dead_letter(open_stream):
    stream = open_stream(filters=[redrb.reward_variance()])
    with pytest.raises(RecordError, match="has no reward") as caught:
        for index in range(2):
            item = numbered(index, reward=None)
            stream.put_part("a", item, index=index, of=2, on_incomplete="dead")
    assert caught.value.__notes__ == ["Group 'a' becomes a dead letter with all its parts."]
    assert (parts(stream).dead, parts(stream).groups) == (1, 0)
    assert "has no reward" in stream.dead_letters()[0].message


def test_parts_that_form_no_group_are_removed(open_stream):
    stream = open_stream(checks=[])
    for index, dtype in enumerate((torch.float32, torch.float64)):
        item = numbered(index, action_log_probs=torch.zeros(1, dtype=dtype))
        stream.put_part("a", item, index=index, of=3, on_incomplete="dead")
    make_old(stream)
    stream._parts.finish_due()
    assert (parts(stream).dead, parts(stream).groups) == (1, 0)
    assert stream.dead_letters()[0].items is None


def test_a_filter_that_raises_does_not_disturb_puts_of_other_groups(open_stream):
    def broken(_):
        raise ZeroDivisionError

    maker, other = open_stream(filters=[broken]), open_stream()
    with pytest.raises(ZeroDivisionError):
        put_parts(maker, 0, 1, 2)
    make_due(maker)
    assert put_parts(maker, 0, key="b") is None
    make_due(maker)
    other._parts.finish_due()
    assert parts(other).completed == 1


def test_a_task_that_was_cleared_knows_no_parts(stream):
    put_parts(stream, 0, 1)
    stream.clear()
    prefix = stream._task.store.keys.prefix
    assert not stream._task.store.client.execute("EXISTS", f"{prefix}part_blobs")
    assert put_parts(stream, 2) is None
    assert parts(stream).waiting == 1


def test_incomplete_groups_cannot_be_requeued_but_put_again_and_dropped(open_stream):
    stream = open_stream()
    keys = [f"group-{number}" for number in range(4)]
    for key in keys:
        put_parts(stream, 0, key=key, on_incomplete="dead")
    store = stream._store
    for key in store.client.execute("ZRANGE", f"{store.keys.prefix}part_due", 0, -1):
        make_due(stream, key)
        stream._parts.finish_due()
    letters = stream.dead_letters()
    assert [letter.id for letter in letters] == [0] * 4
    with pytest.raises(ConfigError, match=r"stream\.put\(letter\.items\)"):
        stream.requeue([letter.id for letter in letters])
    ids = stream.put(letters[0].items or [])
    stream.take(1, timeout=5).reject("bad")
    assert stream.drop_dead_letters([letter.id for letter in letters]) == 4
    assert [letter.id for letter in stream.dead_letters()] == list(ids)
    assert (stream.stats().dead_dropped, parts(stream).dead) == (4, 4)
    assert stream.drop_dead_letters([0, *ids]) == 1


def test_threads_that_put_all_parts_at_once_make_each_group_once(client, open_stream):
    stream = open_stream()

    def put(number):
        index, key = number % 4, f"group-{number // 8}"  # each part twice
        return stream.put_part(key, numbered(index), index=index, of=4)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(put, range(160)))
    lease = stream.take(20, timeout=0)
    assert numbers(lease) == [0, 1, 2, 3] * 20
    lease.ack()
    counts = parts(stream)
    assert (counts.completed, counts.groups, counts.repeated + counts.late) == (20, 0, 80)


def test_a_task_with_parts_is_not_replaced_by_a_saved_one(open_stream, tmp_path):
    stream = open_stream()
    stream.put(numbered(7))
    put_parts(stream, 0)
    stream.save(tmp_path / "task")
    stream.clear()
    put_parts(stream, 0)
    with pytest.raises(redrb.RedrbError, match="is not new"):
        stream.resume(tmp_path / "task")
    put_parts(stream, 1, 2)
    assert numbers(stream.take(1, timeout=0)) == [0, 1, 2]
