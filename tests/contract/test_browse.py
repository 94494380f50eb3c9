"""Groups are read for people without leasing them, by id, status, reward and query, or followed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

import redrb
from redrb import BufferItem, Status
from redrb.connection import Client
from redrb.errors import ConfigError, StoreUnavailable, UnknownTask
from redrb.stream.task.entries import entry_id, member_of
from redrb.watch.groups import Browser, Choice, Follower, GroupView, Page, as_json
from redrb.watch.groups.choice import LIMITS
from redrb.watch.groups.walk import Walk
from tests.conftest import Opener
from tests.samples import numbered
from tests.servers import Server, programs


@pytest.fixture
def browser(client: Client, namespace: str) -> Browser:
    return Browser(client, "math", namespace=namespace)


def ids(browser: Browser, **choice: Any) -> list[int]:
    return [view.id for view in browser.look(Choice(**choice)).groups]


def the(browser: Browser, group: int) -> GroupView:
    view = browser.group(group)
    assert view is not None
    json.dumps(as_json(view), allow_nan=False)
    return view


def test_the_newest_come_first_and_each_says_where_it_stands(
    open_stream: Opener, browser: Browser
) -> None:
    stream = open_stream(tags=["level"], max_staleness=9)
    open_stream(group="critic").join_group()
    stream.advance(5)
    for number in range(1, 6):
        stream.put(
            [numbered(number), numbered(number + 1)], policy_version=number, tags={"level": 1}
        )
    stream.take(1, timeout=0).ack()
    lease = stream.take(1, timeout=0)
    stream.take(1, timeout=0).reject("nan loss")
    page = browser.look(Choice(count=5))
    assert [(view.id, view.state) for view in page.groups] == [
        (5, "waiting"),
        (4, "waiting"),
        (3, "dead"),
        (2, "leased"),
        (1, "done"),
    ]
    assert page.version == 5
    assert page.total == 5
    fifth, _, _, leased, _ = page.groups
    assert (fifth.reward, fifth.rewards, fifth.samples_total) == (5.5, (5.0, 6.0), 2)
    assert (fifth.oldest_version, fifth.staleness, fifth.tags) == (5, 0, {"level": 1})
    assert fifth.samples == ()
    assert leased.lease is not None
    assert leased.lease.pid is not None
    dead = the(browser, 3)
    assert dead.state == "dead"
    assert dead.letter is not None
    assert dead.letter.reason == "nan loss"
    assert dead.reward == 3.5
    assert ids(browser, status="dead") == [3]
    assert ids(browser, status="leased") == [2]
    assert ids(browser, status="completed") == [4, 5]
    assert browser.group(99) is None
    lease.ack()


def test_reward_staleness_and_query_choose_the_groups(
    open_stream: Opener, browser: Browser
) -> None:
    stream = open_stream(tags=["source", "level"], order="priority")
    for number, reward in enumerate([3, 1, 4, 1.5, 9], start=1):
        tags = {"source": "code" if number % 2 else "math", "level": number}
        item = numbered(0, reward=torch.tensor(float(reward)))
        stream.put(item, policy_version=10 - number, tags=tags)
    stream.put(numbered(0, reward=None, status=Status.ABORTED), tags={"source": "none"})
    assert ids(browser, rank="best", count=2) == [5, 3]
    assert ids(browser, rank="worst", count=2) == [2, 4]
    assert ids(browser, rank="stalest", count=2) == [5, 4]
    assert ids(browser, where={"source": "code", "level_gt": 1}) == [5, 3]
    assert ids(browser, where={"source": "code"}, rank="worst", count=1) == [1]
    ranked = browser.look(Choice(rank="best", looks=3))
    assert [view.id for view in ranked.groups] == [5, 4]
    assert ranked.notes == (
        "only the first 3 of 6 groups were ranked",
        "1 group without a reward is left out",
    )
    looked = browser.look(Choice(where={"level": 1}, looks=1))
    assert looked.groups == () or looked.looked >= 1
    with pytest.raises(ConfigError, match="declares the tags source, level"):
        browser.look(Choice(where={"colour": "red"}))


def test_groups_that_are_trained_during_a_look_have_no_missing_reward(
    open_stream: Opener, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_stream()
    stream.put_many([[numbered(each)] for each in range(5)])
    read = Walk.payloads

    def late(self: Walk, views: Iterable[GroupView], most: int) -> Any:
        views = list(views)
        if len(views) == 5:
            stream.take(4, timeout=0).ack()
        return read(self, views, most)

    monkeypatch.setattr(Walk, "payloads", late)
    ranked = browser.look(Choice(rank="best"))
    assert [view.reward for view in ranked.groups] == [4.0]
    assert ranked.notes == ("4 groups were trained or removed during this look",)


def test_statuses_before_and_after_a_consumer_group_joins(
    open_stream: Opener, browser: Browser
) -> None:
    stream = open_stream(group="trainers")
    stream.put(numbered(1, status=Status.ABORTED))
    stream.put(numbered(2))
    assert ids(browser, status="aborted") == [1]
    assert ids(browser, status="completed") == [2]
    assert ids(browser, status="leased") == []
    stream.take(1, timeout=0).ack()
    assert ids(browser, status="completed") == []
    assert [view.state for view in browser.look(Choice()).groups] == ["waiting"]


def test_a_sample_shows_tokens_numbers_extras_and_images(
    open_stream: Opener, browser: Browser
) -> None:
    stream = open_stream()
    item = BufferItem(
        sequences=torch.tensor([0, 0, 11, 12, 21, 22, 23, 0]),
        action_log_probs=torch.tensor([-0.5, float("nan"), -2.0, 0.0]),
        reward=torch.tensor(0.75),
        advantages=torch.tensor([1.0, 2.0, 3.0, 0.0]),
        attention_mask=torch.tensor([0, 0, 1, 1, 1, 1, 1, 0]),
        action_mask=torch.tensor([True, False, True, False]),
        token_versions=torch.tensor([4, 4, 5, -1]),
        tensors={
            "screen": torch.zeros(3, 4, 5, dtype=torch.uint8),
            "weights": torch.tensor([0.5, float("inf")], dtype=torch.bfloat16),
        },
        policy_version=4,
        extras={"text": "a" * 90_000, "raw": b"abc", "score": float("nan"), "nested": [{"x": 1}]},
    )
    (group,) = stream.put(item)
    view = the(browser, group)
    (sample,) = view.samples
    assert (sample.reward, sample.policy_version) == (0.75, 4)
    tokens = sample.tokens
    assert tokens is not None
    assert tokens.prompt_ids == (11, 12)
    assert tokens.response_ids == (21, 22, 23)
    assert tokens.log_probs == (-0.5, None, -2.0)
    assert tokens.advantages == (1.0, 2.0, 3.0)
    assert tokens.trained == (True, False, True)
    assert tokens.versions == (4, 4, 5)
    fields = {field.name: field for field in sample.fields}
    assert fields["action_log_probs"].not_finite == 1
    assert fields["weights"].dtype == "bfloat16"
    assert (fields["weights"].high, fields["weights"].not_finite) == (0.5, 1)
    assert [(image.name, image.width, image.height) for image in sample.images] == [
        ("screen", 5, 4)
    ]
    assert sample.images[0].png.startswith(b"\x89PNG")
    assert len(sample.extras["text"]) < 70_000
    assert (sample.extras["raw"], sample.extras["score"]) == ("<3 bytes>", "nan")
    assert sample.extras["nested"] == [{"x": 1}]
    assert view.notes == ("1 long texts and lists of extras are cut",)


def test_a_page_holds_the_samples_of_a_bounded_number_of_bytes(
    open_stream: Opener, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_stream()
    stream.put_many([[numbered(number)] for number in range(4)])
    stream.take(2, timeout=0).reject("bad")
    monkeypatch.setattr("redrb.watch.groups.browser.SHOWN_BYTES", 1)
    for choice in (Choice(), Choice(rank="best"), Choice(status="dead")):
        first, *others = browser.look(choice, full=True).groups
        assert (len(first.samples), len(others)) == (1, 1)
        assert [len(view.samples) for view in others] == [0]
        assert all("name its id" in view.notes[0] for view in others)


def test_damaged_and_large_groups_are_named_and_not_decoded(
    client: Client, namespace: str, browser: Browser
) -> None:
    with redrb.ExperienceStream(client, "math", namespace=namespace) as stream:
        first, second, third = (stream.put(numbered(number))[0] for number in range(3))
        key, facts = (f"redrb:{{{namespace}:math}}:{name}" for name in ("stream", "facts"))
        client.execute("XDEL", key, entry_id(third))
        client.execute("XADD", key, entry_id(third + 1), "g", b"RDRB and no more")
        packed = client.execute("HGET", facts, member_of(first))
        client.execute("HSET", facts, member_of(third + 1), packed, member_of(second), b"\xc1")
        limits = replace(LIMITS, group_bytes=10)
        small = Browser(client, "math", namespace=namespace, limits=limits)
        assert the(small, first).notes[0].endswith("bytes and was not read")
        wanted = (first, second, third, third + 1)
        views = browser.look(Choice(ids=wanted), full=True).groups
        assert [view.state for view in views] == ["waiting", "damaged", "waiting", "waiting"]
        assert [view.damaged[:20] for view in views] == [
            "",
            "the record of a grou",
            "",
            "not a valid group: i",
        ]
        assert [len(view.samples) for view in views] == [1, 0, 0, 0]
        assert {first, second} <= set(ids(browser))
        stream.clear()


def test_what_cannot_be_chosen_is_refused(browser: Browser, open_stream: Opener) -> None:
    with pytest.raises(UnknownTask):
        browser.look(Choice())
    for wrong in (
        {"count": 0},
        {"count": 1001},
        {"status": "lost"},
        {"rank": "first"},
        {"ids": (1,), "status": "leased"},
        {"ids": (0,)},
        {"status": "dead", "rank": "best"},
        {"looks": 0},
    ):
        with pytest.raises(ConfigError):
            browser.look(Choice(**wrong))


def until(follower: Follower, reached: Callable[[Page], bool], **options: bool) -> list[Page]:
    """Return pages up to one that is `reached`; fails after 20 seconds."""
    found, end = [], time.monotonic() + 20
    while time.monotonic() < end:
        found.append(follower.next(0.5, **options))
        if reached(found[-1]):
            return found
    raise AssertionError(found)


def test_groups_are_shown_as_they_arrive_and_are_still_there(
    open_stream: Opener, client: Client, namespace: str
) -> None:
    stream = open_stream()
    stream.put(numbered(0))
    stream.advance(7)
    follower = Follower(client, "math", namespace=namespace)
    stream.put([numbered(1), numbered(2, tags={"a": 1})], policy_version=5)
    stream.put(numbered(3))
    pages = until(follower, lambda page: any(view.id == 3 for view in page.groups), full=True)
    first, second = (view for page in pages for view in page.groups)
    assert (first.id, first.state, first.reward, len(first.samples)) == (2, "waiting", 1.5, 2)
    assert (first.oldest_version, first.staleness, first.samples_total) == (5, 2, 2)
    assert (second.id, second.reward, second.oldest_version) == (3, 3.0, None)
    assert not any(page.notes for page in pages)
    assert len(stream.take(3, timeout=0)) == 3


def test_groups_that_are_skipped_or_gone_are_counted(
    open_stream: Opener, client: Client, namespace: str
) -> None:
    stream = open_stream()
    follower = Follower(client, "math", namespace=namespace)
    stream.put_many([[numbered(number)] for number in range(300)])
    (page,) = until(follower, lambda page: bool(page.groups))
    assert [view.id for view in page.groups] == list(range(237, 301))
    assert page.notes[0].startswith("236 groups are not shown")
    stream.put_many([[numbered(number)] for number in range(2)])
    stream.take(301, timeout=0).ack()
    (page,) = until(follower, lambda page: bool(page.groups))
    assert [view.id for view in page.groups] == [302]
    assert page.notes[0].startswith("1 group is not shown")


def test_a_task_that_is_not_there_is_named(client: Client, namespace: str) -> None:
    with pytest.raises(UnknownTask, match="math"):
        Follower(client, "math", namespace=namespace)


@pytest.mark.parametrize("own_server", list(programs())[:1], indirect=True)
def test_it_goes_on_after_a_restart_without_data(
    own_server: Callable[..., Server], namespace: str
) -> None:
    server = own_server()
    with redrb.connect(server.url, retry_s=20) as client:
        options = {"namespace": namespace}
        with redrb.ExperienceStream(client, "math", **options) as stream:
            stream.put_many([[numbered(number)] for number in range(3)])
            follower = Follower(client, "math", namespace=namespace, timeout_s=1)
            stream.put(numbered(4))
            until(follower, lambda page: bool(page.groups))
            server.kill()
            with pytest.raises(StoreUnavailable, match="not reachable"):
                follower.next(0.5)
            server.start()
            stream.put(numbered(5))
            pages = until(follower, lambda page: bool(page.groups))
            assert any("created anew" in note for page in pages for note in page.notes)
            assert [view.reward for view in pages[-1].groups] == [5.0]
