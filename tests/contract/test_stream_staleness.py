"""Staleness: groups that are too stale expire at put, at take and by `expire`; reports count."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redrb import (
    BufferItem,
    ConfigError,
    ExperienceStream,
    Status,
    WeightPublisher,
    make_experience_batch,
)
from redrb.connection import Client
from redrb.errors import RecordError
from redrb.lua.pages import PAGES
from redrb.stream import TaskSettings
from redrb.stream.task.settings import NO_BOUND
from tests.audit import audit
from tests.samples import numbered, numbers

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
PAGE = PAGES["counted_versions"]


def stream_of(client: Client, namespace: str, **options: Any) -> ExperienceStream:
    return ExperienceStream(client, "math", namespace=namespace, **options)


def put_versions(stream: ExperienceStream, versions: list[int | None]) -> None:
    stream.join_group()
    for number, version in enumerate(versions):
        stream.put(numbered(number), policy_version=version)


def test_the_rule_of_tokens_looks_at_the_newest_that_counts(client: Client, namespace: str) -> None:
    # samples with and without versions of tokens fit into no batch, but the rule holds for both
    stream = stream_of(client, namespace, max_token_staleness=2, checks=["values"])
    stream.join_group()

    def put(number: int, versions: list[int], mask: list[int] | None = None) -> None:
        actions = torch.zeros(len(versions))
        item = BufferItem(
            sequences=torch.ones(len(versions) + 1, dtype=torch.int64),
            action_log_probs=actions,
            values=actions,
            reward=torch.tensor(float(number)),
            kl=actions,
            advantages=actions,
            token_versions=torch.tensor(versions),
            action_mask=None if mask is None else torch.tensor(mask, dtype=torch.bool),
        )
        stream.put([item])

    put(0, [1, 2, 9])  # its newest token is fresh
    put(1, [1, 2, 3])
    put(2, [1, 2, 9], mask=[1, 1, 0])  # fresh tokens outside of the mask do not count
    put(3, [9, 9, 9], mask=[0, 0, 0])  # nothing counts, so nothing is stale
    put(4, [-1, -1, 4])
    stream.put([numbered(5, policy_version=9), numbered(6, policy_version=3)])  # one is stale
    assert stream.expire(10) == 4
    audit(stream)
    assert numbers(stream.take(2, timeout=0)) == [0, 3]


def test_an_experience_is_looked_at_row_by_row(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace, max_token_staleness=2)
    items = [numbered(n, token_versions=torch.tensor([n, 2 * n])) for n in range(1, 6)]
    stream.join_group()
    stream.put(make_experience_batch(items))
    assert stream.expire(10) == 3
    assert numbers(stream.take(2, timeout=0)) == [4, 5]


def test_a_function_is_called_with_each_group_that_expires(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace, order="stalest", max_staleness=2)
    put_versions(stream, [5, 7, 10])
    seen: list[int] = []
    assert stream.expire(10, on_expired=lambda group: seen.extend(numbers(group))) == 2
    assert seen == [0, 1]
    ledger = stream.stats().ledger
    assert (ledger.expired, ledger.waiting) == (2, 1)
    audit(stream)

    def broken(group: list[BufferItem]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stream.expire(99, on_expired=broken)
    assert stream.stats().ledger.waiting == 1


def test_a_maker_may_count_groups_that_it_does_not_put(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace, max_staleness=2)
    stream.join_group()
    stream.discard_expired(3)
    stream.discard_expired(0)
    ledger = stream.stats().ledger
    assert (ledger.put, ledger.expired, ledger.waiting) == (3, 3, 0)
    assert ledger.balanced
    with pytest.raises(ConfigError):
        stream.discard_expired(-1)


def test_the_task_learns_versions_from_the_publisher(client: Client, namespace: str) -> None:
    publisher = WeightPublisher(client, "actor", namespace=namespace)
    state = {"w": torch.zeros(3)}
    publisher.publish(state)
    stream = stream_of(client, namespace, max_staleness=1, weights="actor")
    assert stream.stats().version == 1
    put_versions(stream, [1])
    publisher.publish(state)
    publisher.publish(state)
    assert stream.stats().version == 3
    for version in (2, 3):
        stream.put(numbered(version - 1), policy_version=version)
    assert stream.expire() == 1
    assert numbers(stream.take(2, timeout=0)) == [1, 2]


FUTURE: dict[str, Callable[[int], dict[str, Any]]] = {
    "of the put": lambda version: {"put": version},
    "of the samples": lambda version: {"policy_version": version},
    "of the tokens": lambda version: {"token_versions": torch.tensor([version, version])},
    "of the newest token": lambda version: {"token_versions": torch.tensor([1, version])},
}


def put_by(stream: ExperienceStream, how: str, way: str, newest: int, version: int) -> None:
    """Put a sample of the newest version, and one of another that is said in one of the ways."""
    fields = FUTURE[way](version)
    default = fields.pop("put", None)
    first = {name: value for name, value in FUTURE[way](newest).items() if name != "put"}
    group = [numbered(0, **first), numbered(1, **fields)]
    if how == "put":
        stream.put(group, policy_version=default)
    elif how == "put_many":
        stream.put_many([group], policy_version=default)
    elif how == "writer":
        with stream.writer() as writer:
            writer.put(group, policy_version=default)
    else:
        for index, part in enumerate(group):
            stream.put_part(str(version), part, index=index, of=2, policy_version=default)


@pytest.mark.parametrize("way", FUTURE)
@pytest.mark.parametrize("how", ["put", "put_many", "writer", "put_part"])
@pytest.mark.parametrize("rule", [{}, {"max_staleness": 1}, {"max_token_staleness": 1}], ids=str)
def test_a_version_that_is_not_published_is_refused(
    client: Client, namespace: str, rule: Any, how: str, way: str
) -> None:
    """Such as the number of an optimizer step, by which the group would not expire."""
    publisher = WeightPublisher(client, "actor", namespace=namespace)
    WeightPublisher(client, "other", namespace=namespace).publish({"w": torch.ones(1)}, version=900)
    stream = stream_of(client, namespace, weights="actor", **rule)
    with stream:
        for newest in (1, 2):
            publisher.publish({"w": torch.zeros(3)})
            for version in (500, newest + 1):
                with pytest.raises(RecordError, match="step") as caught:
                    put_by(stream, how, way, newest, version)
                assert f"'actor' that is published is {newest}" in str(caught.value)
                assert caught.value.field == "policy_version"
                sample = 0 if way == "of the put" or how == "put_part" else 1
                assert (caught.value.group, caught.value.sample) == (0, sample)
                assert f"sample {sample} of group 0 has policy_version {version}" in str(
                    caught.value
                )
            put_by(stream, how, way, newest, newest)
        assert stream.stats().ledger.put == 2


def test_token_versions_of_any_integers_are_compared_with_what_is_published(
    client: Client, namespace: str
) -> None:
    publisher = WeightPublisher(client, "actor", namespace=namespace)
    for _ in range(3):
        publisher.publish({"w": torch.zeros(3)})
    with stream_of(client, namespace, weights="actor", checks=["versions"]) as stream:
        for dtype in INTEGERS:
            fine, bad = (torch.tensor(each, dtype=dtype) for each in ([2, 3], [4, 1]))
            groups = [
                [numbered(4 * group + place, token_versions=fine) for place in range(4)]
                for group in range(3)
            ]
            groups[1][2] = replace(groups[1][2], token_versions=bad)
            before = stream.stats().ledger.put
            with pytest.raises(RecordError, match="sample 2 of group 1 has policy_version 4") as at:
                stream.put_many(groups)
            assert (at.value.group, at.value.sample, at.value.bad_groups) == (1, 2, (1,))
            stream.put_many(groups[::2])
            assert stream.stats().ledger.put - before == 2


def test_a_version_counts_as_published_before_its_task_learns_of_it(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that dies between the two, and one that publishes while makers put."""
    publisher = WeightPublisher(client, "actor", namespace=namespace)
    maker = stream_of(client, namespace, max_staleness=1, weights="actor")
    maker.put(numbered(0), policy_version=7)  # nothing is published: nobody knows
    monkeypatch.setattr(publisher._committer, "_advance_followers", lambda _: None)
    for version in range(1, 20):
        publisher.publish({"w": torch.zeros(3)})
        maker.put(numbered(version), policy_version=version)
        assert maker.stats().version == version


def test_groups_of_before_redis_lost_its_data_are_still_taken_in(
    client: Client, namespace: str
) -> None:
    publisher = WeightPublisher(client, "actor", namespace=namespace)
    maker = stream_of(client, namespace, max_staleness=1, weights="actor")
    publisher.publish({"w": torch.zeros(3)}, version=300)
    maker.put(numbered(0), policy_version=300)
    client.execute("DEL", *client.execute("KEYS", f"redrb:{{{namespace}:*"))
    WeightPublisher(client, "actor", namespace=namespace).publish({"w": torch.zeros(3)})
    maker.put(numbered(1), policy_version=300)
    maker.put(numbered(2), policy_version=1)
    with pytest.raises(RecordError):
        maker.put(numbered(3), policy_version=301)
    assert maker.stats().ledger.put == 2


@pytest.mark.parametrize("on_expired", ["discard", "keep"])
def test_it_warns_when_everything_that_arrives_expires(
    client: Client, namespace: str, caplog: pytest.LogCaptureFixture, on_expired: Any
) -> None:
    stream = stream_of(client, namespace, max_staleness=0, on_expired=on_expired)
    stream.advance(5)
    with caplog.at_level(logging.WARNING, "redrb"):
        for number in range(7):
            stream.put(numbered(number), policy_version=4)
        assert "too stale on arrival" not in caplog.text
        for number in range(9):
            stream.put(numbered(number), policy_version=4)
    assert caplog.text.count("too stale on arrival") == 1
    assert "raise max_staleness" in caplog.text


def test_a_report_tells_how_stale_groups_are(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace, max_staleness=100, max_token_staleness=100)
    stream.join_group()
    stream.advance(10)
    for number, (oldest, newest) in enumerate([(10, 10), (8, 9), (8, 10), (5, 10)]):
        stream.put(numbered(number, token_versions=torch.tensor([oldest, newest])))
    lease = stream.take(2, timeout=0)
    report = stream.staleness()
    assert report.current_version == 10
    assert report.leased.histogram == {0: 1, 2: 1}
    assert report.leased_newest.histogram == {0: 1, 1: 1}
    assert report.waiting.histogram == {2: 1, 5: 1}
    assert report.waiting_newest.histogram == {0: 2}
    assert report.taken.histogram == {0: 1, 2: 1}
    assert (report.waiting.mean, report.waiting.max, report.waiting.groups) == (3.5, 5, 2)
    stream.advance(12)
    later = stream.staleness()
    assert later.leased.histogram == {2: 1, 4: 1}
    assert later.taken.histogram == {0: 1, 2: 1}  # as stale as they were then
    lease.ack()
    stream.take(2, timeout=0)
    assert stream.staleness().taken.histogram == {0: 1, 2: 1, 4: 1, 7: 1}


@pytest.mark.parametrize("joined", [True, False])
def test_a_report_needs_neither_an_index_of_versions_nor_a_consumer_group_that_joined(
    client: Client, namespace: str, *, joined: bool
) -> None:
    with (
        stream_of(client, namespace) as stream,
        stream_of(client, namespace, group="default" if joined else "other") as taker,
    ):
        taker.join_group()
        for number, version in enumerate([7, 7, 9, None, 7, 9]):
            stream.put(numbered(number), policy_version=version)
        stream.put(numbered(9), policy_version=8, status=Status.ABORTED)
        assert stream.staleness(10).waiting.histogram == {3: 3, 2: 1, 1: 2}
        lease = taker.take(6, timeout=0)
        found = stream.staleness(10)
        assert found.waiting.histogram == ({2: 1} if joined else {3: 3, 2: 1, 1: 2})
        assert found.leased.histogram == ({3: 3, 1: 2} if joined else {})
        lease.ack()
        assert stream.staleness(10).waiting.histogram == {2: 1}


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    "count", [1, *(PAGES["counted_versions"] + more for more in (-1, 0, 1)), 2500]
)
def test_a_report_without_an_index_counts_every_group_once(
    client: Client, namespace: str, count: int, *, joined: bool
) -> None:
    """A page is a call of HSCAN, which gives more or fewer fields than it was asked for."""
    with stream_of(client, namespace) as stream:
        if joined:
            stream.join_group()
        stream.put_many([[numbered(number)] for number in range(count)], policy_version=7)
        stream.put(numbered(count), policy_version=9)
        assert stream.staleness(10).waiting.histogram == {3: count, 1: 1}


@pytest.mark.parametrize("order", ["fifo", "stalest", "uniform"])
def test_staleness_is_split_into_flight_and_queue(
    client: Client, namespace: str, order: str
) -> None:
    options: dict[str, Any] = {"max_staleness": 100} if order == "fifo" else {"order": order}
    options["checks"] = ["values"]  # the staleness of a group without a version is not counted
    stream = stream_of(client, namespace, tags=["score"], **options)
    stream.join_group()
    stream.put(numbered(0), policy_version=1)  # no current version is known yet
    stream.advance(10)
    for version in (10, 7, 12, None):  # the third maker was ahead of the task
        stream.put(numbered(1), policy_version=version, tags={"score": 12})
    stream.advance(13)
    stream.put(numbered(2), policy_version=9)
    stream.take(6, timeout=0).release()
    report = stream.staleness()
    assert report.taken.histogram == {12: 1, 3: 1, 6: 1, 1: 1, 4: 1}
    assert report.taken_in_flight.histogram == {0: 2, 3: 1, 4: 1}
    assert report.taken_queued.histogram == {3: 2, 1: 1, 0: 1}
    audit(stream)
    stream.advance(15)
    stream.take(6, timeout=0).ack()
    report = stream.staleness()
    assert report.taken_in_flight.histogram == {0: 4, 3: 2, 4: 2}
    assert report.taken_queued.histogram == {3: 3, 1: 1, 0: 1, 5: 2, 2: 1}


def test_a_resume_keeps_the_count_of_stale_groups_of_a_maker(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    stream = stream_of(client, namespace, max_staleness=9)
    stream.put(numbered(0, policy_version=1))
    stream.save(tmp_path / "saved")
    other = stream_of(client, f"{namespace}2", max_staleness=9)
    other.join_group()
    other.discard_expired(5)
    other.resume(tmp_path / "saved")
    ledger = other.stats().ledger
    assert (ledger.put, ledger.expired, ledger.waiting, ledger.balanced) == (6, 5, 1, True)


def test_errors_of_expire_name_the_missing_argument(client: Client, namespace: str) -> None:
    plain = stream_of(client, namespace)
    with pytest.raises(ConfigError, match="no staleness is given"):
        plain.expire(3)
    with pytest.raises(ConfigError, match="no weight version"):
        plain.expire(max_staleness=3)
    with pytest.raises(ConfigError, match="does not index versions"):
        plain.expire(3, max_staleness=3)
    with pytest.raises(ConfigError, match="on_expired"):
        plain.expire(3, max_staleness=3, on_expired="burn")  # type: ignore[arg-type]


def test_stats_count_waiting_groups_by_status(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace)
    stream.put(numbered(0))
    assert stream.stats().waiting == {Status.COMPLETED: 1}
    stream.put(numbered(1), status=Status.ABORTED)
    stream.join_group()
    assert stream.stats().waiting == {Status.COMPLETED: 1, Status.ABORTED: 1}
    assert stream.counts()[Status.ABORTED] == 1
    stream.take(1, timeout=0)
    assert stream.stats().waiting == {Status.ABORTED: 1}


@pytest.mark.parametrize("name", ["max_staleness", "max_token_staleness"])
def test_a_bound_without_a_version_to_count_from_is_logged_when_the_stream_opens(
    client: Client, namespace: str, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    bound: dict[str, Any] = {name: 2}

    def opened(task: str, **given: Any) -> list[str]:
        caplog.clear()
        with ExperienceStream(client, task, namespace=namespace, **given) as stream:
            stream.put(numbered(1), policy_version=0)
            stream.take(1, timeout=0).ack()
            stream.configure(limit=5)
            stream.put(numbered(1), policy_version=0)
        return [text for text in caplog.messages if "has no effect before" in text]

    (said,) = opened("math", **bound)
    assert f"task 'math': {name}=2 has no effect before the task knows" in said
    assert "weights=NAME" in said
    assert "stream.advance(version)" in said
    assert not opened("math")
    with ExperienceStream(client, "plain", namespace=namespace) as stream:
        caplog.clear()
        stream.configure(limit=4)
        assert "has no effect before" not in caplog.text
        stream.configure(**bound)
        assert "task 'plain'" in caplog.text
    assert not opened("code", weights="policy", **bound)
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.advance(1)
    assert not opened("math", **bound)
    assert not opened("trained", implied=TaskSettings(**bound))  # its trainer advances it
    bound[name] = NO_BOUND
    assert not opened("unbounded", **bound)
