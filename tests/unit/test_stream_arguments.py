"""Bad arguments are refused with an error that says how to correct them; nothing is stored."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import redrb
from redrb import (
    BufferItem,
    ConfigError,
    ExperienceStream,
    Status,
    TaskMismatch,
    make_experience_batch,
)
from redrb.errors import DecodeError, RecordError
from redrb.stream.task.entries import unpack_facts
from tests.audit import audit
from tests.samples import numbered, numbers


@pytest.fixture
def url():
    """A fake server: bad arguments never reach Redis."""
    return f"fake://{uuid.uuid4().hex}"


@pytest.fixture
def stream(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace, order="priority") as stream:
        yield stream
        audit(stream)


def refuses(
    stream: ExperienceStream, call: Callable[[], object], kind: type[Exception], match: str
) -> None:
    """Assert that a call raises, and that nothing was stored by it."""
    with pytest.raises(kind, match=match):
        call()
    assert stream.stats().stored == 0


def test_a_malformed_sample_is_refused_by_every_kind_of_put(stream):
    bad = numbered(2, sequences=torch.ones(3))
    groups = [[numbered(1)], [bad]]
    refuses(stream, lambda: stream.put_many(groups), RecordError, "sequences.*sample 0 in group 1")
    refuses(stream, lambda: stream.put(bad), RecordError, "sequences.*sample 0 in group 0")
    with stream.writer() as writer:
        refuses(stream, lambda: writer.put([bad]), RecordError, "sequences")


@pytest.mark.parametrize("filters", [[], [lambda _: True]])
@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("values", torch.ones(2, 2, 2), r"values has shape \[2, 2\].* \(row 0\)"),
        (
            "reward",
            torch.tensor([1.0, math.nan]),
            "reward of row 1 is nan.*finite_rewards",
        ),
    ],
)
def test_a_malformed_batch_is_refused(client, namespace, filters, field, value, match):
    stream = ExperienceStream(client, "batch", namespace=namespace, filters=filters)
    batch = make_experience_batch([numbered(0), numbered(1)])
    setattr(batch, field, value)
    refuses(stream, lambda: stream.put(batch), RecordError, match)


def test_a_filter_drops_rewards_that_are_not_finite(client, namespace):
    filters = [redrb.finite_rewards(), redrb.reward_variance()]
    stream = ExperienceStream(client, "finite", namespace=namespace, filters=filters)
    stream.join_group()
    odd = numbered(0, reward=torch.tensor(math.nan))
    stream.put_many([[numbered(1), odd], [numbered(2), numbered(3)], [odd]])
    assert numbers(stream.take(1, timeout=0)) == [2, 3]
    assert stream.stats().ledger.filtered == 2
    late = [lambda group: len(group) == 1]  # the place named is that in the put
    other = ExperienceStream(client, "late", namespace=namespace, filters=late)
    refuses(
        other,
        lambda: other.put_many([[numbered(1)] * 2, [numbered(1)], [odd]]),
        RecordError,
        "sample 0 in group 2",
    )


@pytest.mark.parametrize(
    "items", ["items", 3, None, {"a": 1}, torch.ones(2), [3], [[numbered(1)]], [None]]
)
def test_an_argument_that_is_no_sample_is_refused(stream, items):
    refuses(stream, lambda: stream.put(items), RecordError, "redrb.BufferItem")


@pytest.mark.parametrize(
    "groups", [numbered(1), [numbered(1)], make_experience_batch([numbered(1)]), ["ab"], 3]
)
def test_put_many_wants_lists_of_lists(stream, groups):
    refuses(stream, lambda: stream.put_many(groups), RecordError, "redrb.BufferItem")


def test_samples_may_come_from_any_iterable(stream):
    stream.put(numbered(n) for n in range(2))
    stream.put_many((numbered(n),) for n in range(3))
    assert len(stream) == 4


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"policy_version": -1}, "policy_version=-1"),
        ({"policy_version": 1.0}, "policy_version=1.0"),
        ({"policy_version": True}, "policy_version=True"),
        ({"policy_version": "7"}, "policy_version='7'"),
        ({"priority": math.nan}, "finite"),
        ({"priority": "high"}, "finite"),
        ({"priority": 10**400}, "finite"),
        ({"priority": torch.ones(2)}, "finite"),
        ({"status": "done"}, "use one of init, completed"),
        ({"status": 3}, "use one of"),
        ({"status": ["aborted"]}, "use one of"),
        ({"tags": ["score"]}, "give a dict"),
        ({"timeout": -1}, "give seconds"),
        ({"timeout": math.nan}, "give seconds"),
        ({"timeout": "5"}, "give seconds"),
        ({"timeout": True}, "give seconds"),
    ],
)
def test_bad_options_of_a_put_are_refused(stream, given, match):
    refuses(stream, lambda: stream.put(numbered(1), **given), ConfigError, match)
    refuses(stream, lambda: stream.put_many([[numbered(1)]], **given), ConfigError, match)


def test_a_tag_that_the_task_does_not_declare_is_refused(stream):
    kinds = (numbered(1), [numbered(1)], make_experience_batch([numbered(1), numbered(2)]))
    for items in kinds:
        refuses(
            stream,
            lambda items=items: stream.put(items, tags={"a": 1}),
            ConfigError,
            "declares none",
        )


def test_options_may_be_numpys_and_torchs(stream):
    stream.put(numbered(1), policy_version=np.int64(3), priority=np.float32(2))
    ids = stream.put(numbered(2), priority=torch.tensor(3.0), status="completed")
    assert stream.update_priority(np.array(ids), torch.tensor([1.0])) == 1
    lease = stream.take(np.int64(2), timeout=0)
    assert numbers(lease) == [1, 2]
    assert lease.policy_versions == [3, None]
    lease.ack(np.array(ids))
    assert len(lease) == 1


def test_a_status_may_be_given_by_its_name(stream):
    (first,) = stream.put(numbered(1), status="aborted")
    assert stream.count("aborted") == 1
    assert stream.move([first], "failed") == 1
    with stream.take(1, status="failed", timeout=0) as lease:
        assert lease.ids == (first,)
    with pytest.raises(ConfigError, match="current_version"):
        stream.expire(1.5, statuses="aborted")


@pytest.mark.parametrize(
    ("count", "least"), [(True, None), (1.0, None), ("2", None), (None, None), (2, True), (2, "1")]
)
def test_counts_are_ints(stream, count, least):
    for take in (stream.take, stream.leases):
        with pytest.raises(ConfigError, match="1 <= at_least <= count"):
            take(count, at_least=least, timeout=0)


@pytest.mark.parametrize("ids", [3, "12", None, [1.0], ["1"], [True], [0], [-1], {1: 2}, [None]])
def test_ids_are_a_list_of_ints(stream, ids):
    (first,) = stream.put(numbered(1))
    lease = stream.take(1, timeout=0)
    calls: Sequence[Callable[[], object]] = (
        lambda: stream.move(ids, Status.ABORTED),
        lambda: stream.read(ids),
        lambda: stream.update_priority(ids, [1.0]),
        lambda: lease.ack(ids) if ids is not None else stream.read(ids),
        lambda: lease.reject("odd", ids) if ids is not None else stream.read(ids),
    )
    for call in calls:
        with pytest.raises(ConfigError, match="id"):
            call()
    assert lease.ids == (first,)
    lease.ack()


@pytest.mark.parametrize("priorities", [1.0, "1", ["1"], [None], [math.nan], [1.0, 2.0], [True]])
def test_priorities_are_a_list_of_numbers(stream, priorities):
    with pytest.raises(ConfigError, match="priorit"):
        stream.update_priority([1], priorities)


def test_other_calls_check_their_arguments(stream):
    stream.put(numbered(1))
    lease = stream.take(1, timeout=0)
    calls: dict[str, Callable[[], object]] = {
        "version": lambda: stream.advance(-1),
        "current_version": lambda: stream.staleness("3"),
        "groups": lambda: stream.discard_expired(1.5),
        "count": lambda: stream.dead_letters(-1),
        "give a reason": lambda: lease.reject([1]),
        "give seconds": lambda: stream.take(1, timeout=-1),
        "the lease before": lambda: stream.take(1, ack=3, timeout=0),
        "current_version=None": lambda: lease.staleness(None),
        "there is no status": lambda: stream.take(1, timeout=0, status="nope"),
        "max_staleness=-1": lambda: stream.expire(3, max_staleness=-1),
        "start=": lambda: stream.join_group(start="oldest"),
    }
    for match, call in calls.items():
        with pytest.raises(ConfigError, match=match):
            call()
    lease.ack()


def makes_a_filter() -> Callable[[Sequence[BufferItem]], bool]:
    return lambda _: True


def test_a_filter_factory_that_was_not_called_is_named(client, namespace):
    filters: list[Any] = [lambda _: makes_a_filter]
    stream = ExperienceStream(client, "own", namespace=namespace, filters=filters)
    refuses(stream, lambda: stream.put(numbered(1)), ConfigError, "call it")


def test_no_tags_are_not_the_tags_of_a_task(client, namespace):
    ExperienceStream(client, "tagged", namespace=namespace, tags=["score"]).put(numbered(1))
    with pytest.raises(TaskMismatch, match="tags") as caught:
        ExperienceStream(client, "tagged", namespace=namespace, tags=[])
    assert "leave it out" in "".join(caught.value.__notes__)
    again = ExperienceStream(client, "tagged", namespace=namespace)
    assert again.count(where={"score_gt": 0}) == 0


@pytest.mark.parametrize("order", ["fifo", "stalest", "uniform"])
def test_a_priority_that_the_order_ignores_is_stored_with_one_warning(
    client, namespace, caplog, order
):
    stream = ExperienceStream(client, "ignored", namespace=namespace, order=order)
    with caplog.at_level(logging.WARNING, "redrb"):
        (first,) = stream.put(numbered(1), priority=3.0)
        with stream.writer() as writer:
            writer.put(numbered(2), priority=4.0)
        stream.put_many([[numbered(3)]], priority=5.0)
    (record,) = caplog.records
    assert "its order does not go by them" in record.getMessage()
    facts = client.execute("HGET", f"{stream._task.store.keys.prefix}facts", f"{first:016d}")
    assert unpack_facts(facts)["priority"] == 3.0


@pytest.mark.parametrize(
    "packed",
    [b"", b"\xc0", b"\x80" * 2 + b"\x81", b"\x81\xa1a" + b"\x91" * 1000 + b"\xc0", b"\xc1"],
)
def test_damaged_facts_are_refused(packed):
    with pytest.raises(DecodeError):
        unpack_facts(packed)


def test_an_order_that_goes_by_priorities_is_quiet(stream, caplog):
    with caplog.at_level(logging.WARNING, "redrb"):
        stream.put(numbered(1), priority=3.0)
    assert not caplog.records
