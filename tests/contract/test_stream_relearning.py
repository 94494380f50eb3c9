"""Streams that were opened before their task got more settings or was cleared."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from redrb import ConfigError, ExperienceStream, TaskMismatch, WeightPublisher
from redrb.connection import Client
from redrb.stream.task.calls import Open
from tests.audit import audit
from tests.samples import numbered, numbers


def stream_of(client: Client, namespace: str, **options: Any) -> ExperienceStream:
    return ExperienceStream(client, "math", namespace=namespace, **options)


def tokens(number: int, *versions: int, **changes: Any) -> Any:
    return numbered(number, token_versions=torch.tensor(versions), **changes)


@pytest.mark.parametrize("early_index", [False, True])
@pytest.mark.parametrize("how", ["put", "put_many", "writer"])
def test_the_first_put_after_tags_were_declared_keeps_them(client, namespace, how, early_index):
    early = stream_of(client, namespace, **({"max_staleness": 9} if early_index else {}))
    first = stream_of(client, namespace, **({"max_staleness": 9} if early_index else {}))
    late = stream_of(client, namespace, tags=["score", "source"])
    item = numbered(1, policy_version=1, tags={"score": 0.5, "source": "a", "other": 3})
    if how == "put":
        early.put(item)
    elif how == "put_many":
        early.put_many([[item]])
    else:
        with early.writer() as writer:
            writer.put(item)
    assert late.count(where={"score_gt": 0.4, "source": "a"}) == 1
    early.put(numbered(2, policy_version=1, tags={"source": "b"}), tags={"score": 0.1})
    first.put(numbered(3, policy_version=1), tags={"score": 0.2})
    with pytest.raises(ConfigError, match="this task declares score, source"):
        early.put(numbered(4, policy_version=1), tags={"length": 3})
    late.join_group()
    assert late.count(where={"score_gt": 0.4}) == 1
    assert numbers(late.take(1, timeout=0, where={"source": "b", "score_lt": 0.2})) == [2]
    audit(late)


@pytest.mark.parametrize("early_index", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_the_first_put_after_a_rule_of_tokens_was_given_goes_by_it(
    client, namespace, early_index, used
):
    options: dict[str, Any] = {"max_staleness": 90} if early_index else {}
    # samples with and without versions of tokens fit into no batch, but the rule holds for both
    early = stream_of(client, namespace, checks=["values"], **options)
    early.join_group()
    if used:
        early.put(tokens(0, 1, 2))
    late = stream_of(client, namespace, max_token_staleness=2)
    mask = torch.tensor([True, False])
    early.put([tokens(1, 3, 4), tokens(2, 8, 9)])
    early.put(tokens(3, 1, 9))
    early.put(tokens(4, 4, 9, action_mask=mask))
    early.put(numbered(5), policy_version=3)
    assert late.expire(10) == 3
    audit(late)
    left = numbers(late.take(1 + used, timeout=0))
    assert left == ([0, 3] if used else [3])  # the tokens of the first group were not looked at


def test_a_writer_indexes_the_sent_bytes_and_not_the_changed_tensors(client, namespace):
    early = stream_of(client, namespace)
    late = stream_of(client, namespace, max_token_staleness=2)
    versions = torch.tensor([3, 4])
    with early.writer() as writer:
        writer.put(numbered(0, token_versions=versions))
        versions.fill_(9)
    assert late.expire(10) == 1


@pytest.mark.parametrize("order", ["fifo", "uniform"])
def test_a_rule_that_is_given_late_holds_for_waiting_groups(client, namespace, order):
    stream = stream_of(client, namespace, order=order, max_token_staleness=90)
    critic = stream_of(client, namespace, group="critic")
    stream.join_group()
    critic.join_group()
    stream.put_many([[numbered(n, policy_version=n)] for n in range(700)])
    with stream_of(client, namespace, checks=["values"]) as unchecked:
        unchecked.put(numbered(900))  # without a version it never expires
    lease = stream.take(3, timeout=0)
    later = stream_of(client, namespace, max_staleness=5)
    audit(later)
    lease.release()
    audit(later)
    assert stream.stats().ledger.waiting == 701
    assert later.expire(699) == 694
    assert critic.expire(699, max_staleness=5) == 694
    audit(later)
    assert client.execute("HEXISTS", f"{later._task.store.keys.prefix}task", "filling") == 0


def test_filling_goes_on_after_another_process_has_left_it(client, namespace):
    stream = stream_of(client, namespace, order="lifo")
    stream.join_group()
    stream.put_many([[numbered(n, policy_version=n)] for n in range(600)])
    reply = stream._task.store.call(Open("a revision", "who", given={"max_staleness": "5"}))
    assert reply.unfinished, "there are more pages"
    again = stream_of(client, namespace)
    audit(again)
    assert again.expire(599) == 594


@pytest.mark.parametrize("tags", [None, ["score"]])
def test_a_task_that_was_cleared_and_made_anew_is_learned(client, namespace, tags):
    early = stream_of(client, namespace)
    early.put(numbered(0))
    early.clear()
    late = stream_of(client, namespace, order="priority", tags=tags)
    (seq,) = early.put(numbered(1, tags={"score": 1.5}), priority=2.0)
    assert early.update_priority([seq], [7.0]) == 1
    early.join_group()
    assert late.count(where={"score": 1.5} if tags else None) == 1
    audit(late)


def test_priorities_are_changed_in_a_task_that_was_made_anew(client, namespace):
    stream = stream_of(client, namespace, order="priority")
    plain = stream_of(client, f"{namespace}2")
    (seq,) = stream.put(numbered(0), priority=1.0)
    stream.clear()
    assert stream.update_priority([seq], [2.0]) == 0
    assert stream.stats().ledger.balanced
    assert client.execute("HGET", f"{stream._task.store.keys.prefix}task", "order") == b"priority"
    stream.clear()
    stream_of(client, namespace, order="lifo").put_many([[numbered(1)]])
    with pytest.raises(TaskMismatch):
        stream.update_priority([1], [2.0])
    with pytest.raises(ConfigError, match="keeps no priorities"):
        plain.update_priority([1], [2.0])
    plain.clear()
    made = stream_of(client, f"{namespace}2", order="priority")
    (seq,) = made.put(numbered(0), priority=1.0)
    assert plain.update_priority([seq], [2.0]) == 1
    plain.join_group()
    audit(made)


def test_a_task_that_follows_weights_knows_the_version_after_a_clear(client, namespace):
    publisher = WeightPublisher(client, "actor", namespace=namespace)
    publisher.publish({"w": torch.zeros(3)})
    trainer = stream_of(client, namespace, max_staleness=1, weights="actor")
    maker = stream_of(client, namespace)
    assert trainer.clear() == 0
    maker.put(numbered(0), policy_version=1)
    assert trainer.stats().version == 1
    maker.clear()
    trainer.put(numbered(0), policy_version=1)
    assert maker.stats().version == 1
    publisher.publish({"w": torch.zeros(3)})
    assert maker.stats().version == 2


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, True),
        ({"order": "lifo", "max_token_staleness": 3}, True),
        ({"order": "stalest"}, False),
        ({"max_staleness": 3}, False),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_evicting_the_stalest_needs_versions(client, namespace, settings, refused, before):
    if before:
        stream_of(client, namespace, **settings)
        settings = {}
    if not refused:
        stream_of(client, namespace, on_full="drop_stalest", **settings)
        return
    with pytest.raises(ConfigError, match="indexes no policy versions"):
        stream_of(client, namespace, on_full="drop_stalest", **settings)


@pytest.mark.parametrize("by", ["itself", "another"])
@pytest.mark.parametrize("whole", [1, 5])
def test_evicting_the_stalest_of_a_task_without_versions_goes_by_arrival_and_is_logged(
    client, namespace, caplog, by, whole
):
    stream = stream_of(client, namespace, limit=5, max_staleness=9, on_full="drop_stalest")
    versions = [5, 1, 3, 2, 4]
    stream.put_many([[numbered(n, policy_version=n)] for n in versions])
    changing = stream if by == "itself" else stream_of(client, namespace)
    changing.configure(max_staleness=None)
    for number in range(6, 6 + whole):
        stream.put(numbered(number, policy_version=number))
    lines = [each.getMessage() for each in caplog.records if "by arrival" in each.getMessage()]
    assert len(lines) == 1
    left = versions[whole:] + list(range(6, 6 + whole))
    assert sorted(numbers(stream.take(5, timeout=0))) == sorted(left)


def test_names_of_tags_are_compared_and_not_counted(client, namespace):
    early = stream_of(client, namespace, tags=["a", "b"])
    task = f"{early._task.store.keys.prefix}task"
    early.clear()
    stream_of(client, namespace, tags=["b", "a"])
    assert json.loads(client.execute("HGET", task, "tags")) == ["b", "a"]
    with pytest.raises(TaskMismatch):
        early.put(numbered(0, tags={"a": 1.0, "b": 2.0}))
