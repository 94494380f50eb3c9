"""Sessions of agents in Redis: any gateway goes on with them, nothing is twice, nothing is lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec
import pytest

import redrb
from redrb import ConfigError, ExperienceStream
from redrb.connection import Client
from redrb.errors import (
    AdmissionTimeout,
    EncodeError,
    RecordError,
    SessionOver,
    StoreError,
    StoreUnavailable,
    UnknownSession,
)
from redrb.gateway import store as gateway_store
from redrb.gateway.calls import UseSession
from redrb.gateway.messages import Edited
from redrb.gateway.session import Session, Turn
from redrb.gateway.store import Opened, SessionStore, session_name
from redrb.stream import SessionStats
from redrb.stream.admission.calls import Admit
from redrb.stream.put.producer import Producer
from tests.audit import audit
from tests.clusters import RedisCluster
from tests.gateway_turns import turn
from tests.parts_audit import audit_parts
from tests.samples import numbers

Gateway: TypeAlias = Callable[..., SessionStore]

BOUND = {"max_staleness": 0, "groups_per_version": 1}
"""A task that gives one right."""


@pytest.fixture
def gateway(open_stream) -> Gateway:
    """Open a gateway of the same task; each is another process, as far as Redis knows."""
    return lambda timeout_s=600.0, **settings: SessionStore(
        open_stream(**settings), timeout_s=timeout_s
    )


def stream_of(store: SessionStore) -> ExperienceStream:
    return store._stream


def raw(store: SessionStore, *command: Any) -> Any:
    """Run a command on a key of the task, whose name is the second word."""
    word, name, *others = command
    task = store._task.store
    return task.client.execute(word, f"{task.keys.prefix}{name}", *others)


def begun(store: SessionStore, prompt: str = "p", size: int = 1, **options: Any) -> Session:
    opened = store.open(prompt, size=size, wait_s=options.pop("wait_s", 5), **options)
    return store.read(opened.name)


def rewarded(store: SessionStore, session: Session, reward: float = 1.0) -> int | None:
    """Let a session have a turn and its reward."""
    store.append(session, turn())
    return store.reward(session.name, reward)


def silence(store: SessionStore, session: Session) -> None:
    """Let a session, and all others of its group, be silent for too long."""
    for name in (f"session:{session.name}", f"gathering:{session.group}"):
        raw(store, "DEL", name)
    raw(store, "ZADD", "part_due", "XX", 1, session.group)
    if session.right:
        raw(store, "ZADD", "holds", "XX", 1, session.right)


def waits_s(store: SessionStore, session: Session) -> float:
    """Return the seconds for which a group waits for further parts."""
    due = float(raw(store, "ZSCORE", "part_due", session.group))
    return due / 1000 - int(raw(store, "HGET", "task", "clock").split()[1]) / 1000


def rights(store: SessionStore) -> Any:
    found = stream_of(store).stats().admission
    assert found.balanced
    return found


def check_books(store: SessionStore) -> None:
    audit(stream_of(store))
    audit_parts(stream_of(store))
    stats = stream_of(store).stats()
    assert stats.ledger.balanced
    assert stats.parts is None or stats.parts.balanced
    assert stats.admission is None or stats.admission.balanced


@pytest.mark.parametrize("size", [1, 2, 3, 200])
def test_sessions_of_a_prompt_fill_one_group_after_the_other(gateway, size):
    store = gateway()
    sessions = [begun(store, size=size) for _ in range(size)]
    assert [session.index for session in sessions] == list(range(size))
    assert len({session.group for session in sessions}) == 1
    other, next_one = begun(store, "q", size), begun(store, size=size)
    assert len({sessions[0].group, other.group, next_one.group}) == 3
    for number, session in enumerate(reversed(sessions)):
        done = rewarded(store, session, size - 1 - number)
        assert (done is None) == (number + 1 < size)
    assert numbers(stream_of(store).take(1, timeout=0)) == list(range(size))
    check_books(store)


def test_groups_of_another_size_or_rule_are_filled_apart(gateway):
    store = gateway()
    wanted = [{"size": 2}, {"size": 3}, {"size": 2, "least": 1}]
    wanted.append({"size": 2, "on_incomplete": "dead"})
    assert len({begun(store, **options).group for options in wanted}) == 4
    assert [begun(store, **options).index for options in wanted] == [1] * 4


def test_another_gateway_goes_on_with_a_session(gateway):
    one, other = gateway(tags=["site"]), gateway(tags=["site"])
    opened = one.open("p", size=1, tags={"site": "a"}, wait_s=0)
    first = one.append(one.read(opened.name), turn())
    one.close()
    session = other.read(opened.name)
    assert session.turns == [first]
    other.append(session, turn(0))
    assert other.reward(session.name, 2.0, extras={"checked": True}) == 1
    stream = stream_of(other)
    assert stream.count(where={"site": "a"}) == 1
    with stream.take(1, timeout=0) as lease:
        (item,) = lease.items()
        assert item.sequences is not None
        assert item.sequences.tolist() == other.read(opened.name).tokens(1)
        assert item.extras == {"prompt": "p", "redrb_session": opened.id, "checked": True}
        lease.ack()
    check_books(other)


def test_a_request_that_comes_again_gets_the_turn_that_was_first(gateway):
    one, other = gateway(), gateway()
    session = begun(one)
    first = turn()
    assert one.append(session, first) is first
    again = turn(request=first.request)
    assert other.append(session, again) == other.append(session, first) == first
    assert one.reward(session.name, 1.0) == 1
    assert other.append(session, again) == first  # its reply was lost, and the reward came
    assert raw(one, "HGET", f"session:{session.name}", "turns") == b"1"


def test_a_reward_counts_once_and_ends_the_session(gateway):
    one, other = gateway(), gateway()
    session = begun(one)
    one.append(session, turn())
    assert one.reward(session.name, 1.0) == other.reward(session.name, 2.0) == 1
    with pytest.raises(SessionOver, match="has its reward already") as caught:
        other.append(session, turn(0))
    assert caught.value.reason == "over"
    assert numbers(stream_of(one).take(1, timeout=0)) == [1]
    check_books(one)


def test_a_reward_that_cannot_be_stored_may_be_given_again(gateway):
    store = gateway()
    session = begun(store)
    with pytest.raises(RecordError, match="has no turn"):
        store.reward(session.name, 1.0)
    store.append(session, turn())  # it was not ended
    for wrong in (float("nan"), float("inf"), "1", None):
        with pytest.raises(ConfigError):
            store.reward(session.name, wrong)
    assert not store.read(session.name).over
    with pytest.raises(redrb.RedrbError):
        store.reward(session.name, 1.0, extras={"x": (1, 2)})
    assert store.reward(session.name, 1.0) == 1


def test_a_turn_that_comes_while_the_reward_does_is_in_the_sample_or_refused(gateway):
    store = gateway()
    session = begun(store)
    store.append(session, turn())
    late = [turn(0) for _ in range(20)]
    kept: list[Turn] = []

    def add() -> None:
        with suppress(SessionOver):
            for each in late:
                kept.append(store.append(session, each))

    thread = threading.Thread(target=add)
    thread.start()
    store.reward(session.name, 1.0)
    thread.join()
    assert len(stream_of(store).take(1, timeout=0).items()) == max(len(kept), 1)


def test_whoever_guesses_an_id_or_a_secret_finds_nothing(gateway):
    store = gateway()
    opened = store.open("p", size=1, wait_s=0)
    other = store.open("p", size=1, wait_s=0)
    said = set()
    for guess in (
        *((opened.id, other.secret), (opened.id, ""), ("", opened.secret), ("", "")),
        *(("0" * 16, opened.secret), (opened.id, opened.secret.upper()), ("*", "*")),
        *((opened.id, opened.secret + "\x00"), ("\ud800", "\udfff"), ("é" * 10_000, "{}")),
    ):
        with pytest.raises(UnknownSession) as caught:
            store.read(session_name(*guess))
        said.add(str(caught.value))
    assert len(said) == 1
    stored = [raw(store, "HGETALL", f"session:{opened.name}")]
    assert opened.secret not in str(stored)


ONCE = "a secret of the caller"


def test_an_equal_call_with_the_secret_of_the_first_finds_its_session(gateway):
    one, other = gateway(**BOUND), gateway(**BOUND)
    stream_of(one).advance(7)
    first = one.open("p", size=2, tags={"site": "a"}, wait_s=0, once=ONCE)
    again = other.open("p", size=2, tags={"site": "a"}, wait_s=0, once=ONCE)
    assert (first.id, first.secret, first.version) == (again.id, again.secret, again.version)
    assert (first.is_new, again.is_new) == (True, False)
    session = other.read(again.name)
    assert raw(one, "HGET", f"gathering:{session.group}", "next") == b"1"
    second = one.open("p", size=2, tags={"site": "a"}, wait_s=0, once=f"{ONCE} 2")
    assert one.read(second.name).group == session.group
    assert rewarded(one, session) is None
    assert other.open("p", size=2, tags={"site": "a"}, wait_s=0, once=ONCE).id == first.id
    assert rewarded(other, one.read(second.name)) == 1
    assert rights(one).granted == 1
    check_books(one)


def test_another_call_with_the_same_secret_begins_another_session(gateway):
    store = gateway()
    wanted = [{"prompt": "p"}, {"prompt": "q"}, {"size": 2}, {"least": 1, "size": 2}]
    wanted += [{"size": 2, "on_incomplete": "dead"}, {"tags": {"a": 1}}, {"tags": {"a": 2}}]
    calls = [{"prompt": "p", "size": 1, "wait_s": 0, **each} for each in wanted]
    opened = [store.open(**call, once=ONCE) for call in calls[1:]]
    assert len({each.secret for each in opened} | {each.id for each in opened}) == 2 * 6
    assert all(each.is_new for each in opened)
    assert len({store.open(**calls[0]).id for _ in range(3)}) == 3  # without a secret


def test_equal_calls_that_come_together_begin_one_session(gateway):
    stores = [gateway(**BOUND) for _ in range(2)]
    stream_of(stores[0]).advance(7)
    with ThreadPoolExecutor(16) as pool:
        asked = [
            pool.submit(stores[number % 2].open, "p", size=3, wait_s=2, once=ONCE)
            for number in range(16)
        ]
        opened = [each.result(60) for each in asked]
    assert len({each.name for each in opened}) == 1
    assert [each.is_new for each in opened].count(True) == 1
    session = stores[0].read(opened[0].name)
    assert raw(stores[0], "HGET", f"gathering:{session.group}", "next") == b"1"
    found = rights(stores[0])
    assert (found.held, found.granted - found.returned) == (1, 1)


def test_nothing_in_redis_tells_the_secret_of_a_call(gateway):
    store = gateway()
    opened = store.open("p", size=1, wait_s=0, once=ONCE)
    client = store._task.store.client
    kept = [client.execute("KEYS", "*"), raw(store, "HGETALL", f"session:{opened.name}")]
    for secret in (ONCE, opened.secret):
        assert secret not in str(kept)


def test_a_session_that_nobody_was_told_of_is_dropped_unless_another_call_found_it(gateway):
    store = gateway(**BOUND)
    stream_of(store).advance(7)
    options: dict[str, Any] = {"size": 1, "wait_s": 0, "once": ONCE}
    first = store.open("p", **options)
    store.drop(first.name, unless_shared=True)
    assert rights(store).held == 0
    again = store.open("p", **options)  # in a group of its own
    assert (again.id, again.is_new) == (first.id, True)
    assert not store.open("p", **options).is_new
    store.drop(again.name, unless_shared=True)
    session = store.read(again.name)
    store.drop(again.name)
    third = store.open("p", **options)
    assert (third.is_new, store.read(third.name).index) == (True, 0)
    assert store.read(third.name).group != session.group
    assert rewarded(store, store.read(third.name)) == 1
    check_books(store)


@pytest.mark.parametrize("parent", [-1, 0])
def test_of_turns_that_come_together_one_is_stored_where_none_may_branch(gateway, parent):
    stores = [gateway() for _ in range(2)]
    session = begun(stores[0])
    if parent == 0:
        stores[0].append(session, turn(), may_branch=False)
    before, stored = len(stores[0].read(session.name).turns), []

    def add(number: int) -> None:
        with suppress(Edited):
            stored.append(stores[number % 2].append(session, turn(parent), may_branch=False))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(add, range(100)))
    assert stores[0].read(session.name).turns[before:] == stored
    assert len(stored) == 1
    assert stores[0].append(session, stored[0], may_branch=False) == stored[0]  # a retry
    stores[0].append(session, turn(parent))
    assert len(stores[0].read(session.name).items(1.0)) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"prompt": ""}, {"prompt": "p" * 201}, {"prompt": "a\nb"}, {"prompt": 7}, {"size": 0}]
    + [
        {"size": True},
        {"least": 3},
        {"least": 0},
        {"on_incomplete": "keep"},
        {"wait_s": -1},
        {"wait_s": None},
    ]
    + [{"tags": tags} for tags in ({"a": [1]}, {"a": None}, {1: "a"}, "ab", {"a": float("nan")})]
    + [{"tags": {"a": "\ud800"}}, {"tags": {"a": 2**70}}, {"tags": {"a": "x" * 10_000}}],
)
def test_unusable_arguments_are_refused(gateway, wrong):
    given: dict[str, Any] = {"prompt": "p", "size": 2, "wait_s": 0, **wrong}
    store = gateway(tags=["a"])
    with pytest.raises((ConfigError, RecordError, EncodeError)):
        store.open(**given)
    assert begun(store, tags={"a": "b", "undeclared": 0.5}).index == 0


def test_a_prompt_may_have_any_printable_name(gateway):
    store = gateway()
    for prompt in ("p" * 200, "é" * 100, "a b", "{x}:*?[", "日本"):
        assert begun(store, prompt).prompt == prompt


def test_a_session_is_bounded(gateway, monkeypatch):
    store = gateway()
    monkeypatch.setattr(gateway_store, "MOST_TURNS", 2)
    session = begun(store)
    first = store.append(session, turn())
    store.append(session, turn(0))
    with pytest.raises(SessionOver, match="as many turns or bytes") as caught:
        store.append(session, turn(1))
    assert caught.value.reason == "full"
    assert store.append(session, first) == first
    monkeypatch.setattr(gateway_store, "MOST_TURNS", 3)
    monkeypatch.setattr(gateway_store, "MOST_BYTES", 1000)
    with pytest.raises(SessionOver):
        store.append(session, turn(1, 100))
    store.append(session, turn(1))
    assert store.reward(session.name, 1.0) == 1


def test_the_samples_of_branches_are_bounded(gateway, monkeypatch):
    """What branches share is in each sample, so few stored tokens can be many."""
    store = gateway()
    monkeypatch.setattr(gateway_store, "MOST_TOKENS", 2000)
    opened = store.open("p", size=1, wait_s=0)
    store.append(store.read(opened.name), turn(tokens=500))
    with pytest.raises(SessionOver) as caught:
        for _ in range(10):
            store.append(store.read(opened.name), turn(0))
    assert caught.value.reason == "full"
    session = store.read(opened.name)
    assert len(session.turns) == 1 + 3
    assert store.append(session, session.turns[-1]) == session.turns[-1]
    store.reward(session.name, 1.0)
    items = stream_of(store).take(1, timeout=0).items()
    assert sum(len(item) for each in items if (item := each.sequences) is not None) == (
        int(raw(store, "HGET", f"session:{session.name}", "tokens"))
    )
    assert raw(store, "HGET", f"session:{session.name}", "samples") == b"%d" % len(items)


@pytest.mark.parametrize("bound", [{"MAX_SAMPLES": 5}, {"GROUP_TOKENS": 14}, {"GROUP_EXTRAS": 79}])
def test_a_session_has_its_share_of_a_group(gateway, monkeypatch, bound):
    """What is too much for a group would drop its other sessions with it."""
    for name, most in bound.items():
        monkeypatch.setattr(gateway_store, name, most)
    store = gateway()
    one, other = begun(store, size=2), begun(store, size=2)
    store.append(one, turn())
    store.append(one, turn())
    if "GROUP_EXTRAS" in bound:
        with pytest.raises(RecordError, match="give smaller ones"):
            store.reward(one.name, 1.0, extras={"a": "1" * 12})  # 20 bytes, in 4 samples
        store.reward(one.name, 1.0, extras={"a": "1" * 11})
    else:
        for parent in (-1, 0, -1):
            with suppress(SessionOver):  # the session as it was read first: all come at once
                store.append(one, turn(parent))
        assert len(store.read(one.name).turns) == 2 + (bound == {"MAX_SAMPLES": 5})
        with pytest.raises(SessionOver, match="share") as caught:
            store.append(one, turn(-1))
        assert caught.value.reason == "full"
        store.reward(one.name, 1.0)
    assert rewarded(store, other) == 1
    check_books(store)


@pytest.mark.parametrize("turns", [1, 1000])
def test_a_long_session_is_one_sample(gateway, turns):
    store = gateway()
    opened = store.open("p", size=1, wait_s=0)
    session = store.read(opened.name)
    for number in range(turns):
        store.append(session, turn(number - 1))
    assert len(store.read(opened.name).turns) == turns
    store.reward(session.name, 1.0)
    (item,) = stream_of(store).take(1, timeout=0).items()
    assert item.action_mask is not None
    assert int(item.action_mask.sum()) == 2 * turns


def test_a_group_takes_one_right_and_needs_no_gateway_to_keep_it(gateway):
    one, other = gateway(**BOUND), gateway(**BOUND)
    stream_of(other).advance(7)
    sessions = [begun(one, size=2), begun(other, size=2)]
    assert (rights(other).granted, rights(other).held) == (1, 1)
    assert not stream_of(one)._admitter.maker.held
    one.close()
    with pytest.raises(AdmissionTimeout, match="1 right is held"):
        other.open("p", size=2, wait_s=0)
    assert rewarded(other, sessions[0]) is None
    assert rewarded(other, sessions[1]) == 1
    found = rights(other)
    assert (found.used, found.held, found.late, found.lost) == (1, 0, 0, 0)
    check_books(other)


def test_sessions_that_begin_together_take_one_right(gateway):
    store = gateway(**BOUND)
    stream_of(store).advance(7)
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: store.open("p", size=8, wait_s=30), range(8)))
    sessions = [store.read(each.name) for each in opened]
    assert sorted(session.index for session in sessions) == list(range(8))
    assert {each.version for each in opened} == {7}
    assert rights(store).granted == 1


def test_a_right_that_came_for_a_group_that_another_gateway_began_returns(gateway, monkeypatch):
    one, other = (gateway(max_staleness=0, groups_per_version=2) for _ in range(2))
    stream_of(one).advance(7)
    admit, first = ExperienceStream.admit, []

    def after_another_gateway(self: ExperienceStream, *arguments: Any, **options: Any) -> Any:
        if not first:
            first.append(None)
            first.append(begun(other, size=2))
        return admit(self, *arguments, **options)

    monkeypatch.setattr(ExperienceStream, "admit", after_another_gateway)
    session = begun(one, size=2)
    assert (session.group, session.index) == (first[1].group, 1)
    found = rights(one)
    assert (found.granted, found.returned, found.held) == (2, 1, 1)
    assert not stream_of(one)._admitter.maker.held


def test_the_right_of_a_group_whose_sessions_are_dropped_returns_at_once(gateway):
    store = gateway(**BOUND)
    stream_of(store).advance(7)
    sessions = [begun(store, size=3) for _ in range(2)]
    store.drop(sessions[0].name)
    store.drop(sessions[0].name)  # a repetition
    assert rights(store).held == 1
    task = store._task
    waits = Admit("maker/1", 1, 1, 60_000, 60_000, 60_000, task.description.incarnation, "s")
    assert task.store.call(waits).outcome == "wait"
    store.drop(sessions[1].name)
    assert raw(store, "LLEN", "wake:maker/1") == 1
    assert (rights(store).returned, rights(store).held) == (1, 0)
    assert task.store.call(waits).outcome == "granted"
    with pytest.raises(UnknownSession):
        store.append(sessions[1], turn())


def test_a_group_whose_sessions_are_silent_gives_its_right_back(gateway):
    store = gateway(**BOUND)
    stream_of(store).advance(7)
    session = begun(store, size=2)
    silence(store, session)
    again = begun(store, size=2)
    assert again.group != session.group
    assert (rights(store).lost, rights(store).held) == (1, 1)
    with pytest.raises(UnknownSession):
        store.reward(session.name, 1.0)


def test_a_right_that_was_lost_counts_as_late(gateway):
    store = gateway(**BOUND, order="admission")
    stream_of(store).advance(7)
    session = begun(store)
    raw(store, "ZADD", "holds", "XX", 1, session.right)
    with stream_of(store).admit(timeout=0):  # takes it back
        assert rewarded(store, session) == 1
    assert (rights(store).late, rights(store).lost) == (1, 1)
    check_books(store)


def test_all_of_a_session_lives_as_long_as_it_is_used(gateway):
    store = gateway(**BOUND)
    stream_of(store).advance(7)
    opened = store.open("p", size=2, wait_s=0)
    session = store.read(opened.name)
    keys = [f"session:{session.name}", f"gathering:{session.group}"]
    prefix = store._task.store.keys.prefix
    [filling] = store._task.store.client.execute("KEYS", f"{prefix}filling:*")
    keys.append(filling.decode().removeprefix(prefix))
    for use, renewed in (
        (lambda: store.read(opened.name), keys),
        (lambda: store.append(session, turn()), keys),
        (lambda: begun(store, size=2), keys[1:2]),
    ):
        assert all(raw(store, "PEXPIRE", key, 1000) > 0 for key in keys)
        raw(store, "ZADD", "holds", "XX", 2, session.right)
        use()
        assert all(500_000 < raw(store, "PTTL", key) <= 600_000 for key in renewed)
        assert float(raw(store, "ZSCORE", "holds", session.right)) > 1_000_000
    assert not raw(store, "EXISTS", keys[2])  # the group is full


def test_a_group_waits_as_long_as_a_session_of_it_is_used(gateway):
    store = gateway(timeout_s=600)
    first, second = begun(store, size=2), begun(store, size=2)
    assert rewarded(store, first) is None
    raw(store, "ZADD", "part_due", "XX", 2, first.group)
    store.read(first.name)  # one that is over keeps nothing waiting
    assert raw(store, "ZSCORE", "part_due", first.group) == b"2"
    store.append(second, turn())
    assert float(raw(store, "ZSCORE", "part_due", first.group)) > 1_000_000
    assert store.reward(second.name, 0.0) == 1


def test_a_rewarded_session_that_is_dropped_is_a_part_all_the_same(gateway):
    store = gateway(timeout_s=6000)
    first, second = begun(store, size=2), begun(store, size=2)
    rewarded(store, first)
    store.drop(first.name)
    assert waits_s(store, first) > 3000
    assert rewarded(store, second) == 1


def test_a_reward_that_broke_off_is_repeated_also_after_a_drop(gateway, monkeypatch):
    store = gateway()
    opened = store.open("p", size=1, wait_s=0)
    session = store.read(opened.name)
    store.append(session, turn())
    with monkeypatch.context() as patch, suppress(Death):
        patch.setattr(ExperienceStream, "put_part", die)
        store.reward(session.name, 1.0)
    store.drop(session.name)
    assert store.reward(session.name, 1.0) == 1


def test_no_session_joins_a_group_that_has_ended(gateway):
    store = gateway()
    first = begun(store, size=2)
    rewarded(store, first)
    raw(store, "ZADD", "part_due", "XX", 1, first.group)
    stream_of(store)._parts.finish_due()
    second = begun(store, size=2)
    assert (second.index, second.group != first.group) == (0, True)


@pytest.mark.parametrize("rule", ["least", "drop", "dead"])
def test_a_silent_session_leaves_its_group_to_the_rule(gateway, rule):
    store = gateway(**BOUND)
    stream = stream_of(store)
    stream.advance(7)
    options: dict[str, Any] = {"least": 1} if rule == "least" else {"on_incomplete": rule}
    first, second = (begun(store, size=2, **options) for _ in range(2))
    rewarded(store, first)
    silence(store, second)
    stream._parts.finish_due()
    parts = stream.stats().parts
    assert (parts.delivered, parts.dropped, parts.dead) == (
        rule == "least",
        rule == "drop",
        rule == "dead",
    )
    assert rights(store).held == 0
    with pytest.raises(UnknownSession):
        rewarded(store, second)
    if rule == "least":
        stream.take(1, timeout=0).ack()
        stream.advance(8)
    assert begun(store, size=2, **options).group != first.group
    check_books(store)


@pytest.mark.parametrize("dropped_first", [True, False])
def test_a_group_that_lacks_a_dropped_session_waits_for_nothing_else(gateway, dropped_first):
    store = gateway(timeout_s=6000)
    first, second = (begun(store, size=2, least=1) for _ in range(2))
    if dropped_first:
        store.drop(second.name)
        rewarded(store, first)
    else:
        rewarded(store, first)
        store.drop(second.name)
    assert waits_s(store, first) <= 31
    raw(store, "ZADD", "part_due", "XX", 1, first.group)
    stream_of(store)._parts.finish_due()
    assert stream_of(store).stats().parts.delivered == 1


def test_a_group_that_a_session_may_join_yet_waits_for_it(gateway):
    store = gateway(timeout_s=6000)
    first, second = (begun(store, size=3) for _ in range(2))
    rewarded(store, first)
    store.drop(second.name)
    assert waits_s(store, first) > 3000
    assert begun(store, size=3).group == first.group


def test_sessions_of_a_task_that_was_cleared_are_gone(gateway):
    store = gateway()
    session = begun(store, size=2)
    store.append(session, turn())
    stream_of(store).clear()
    for use in (
        lambda: store.append(session, turn(0)),
        lambda: store.append(session, session_turn(store, session)),
        lambda: store.reward(session.name, 1.0),
    ):
        with pytest.raises(UnknownSession):
            use()
    store.drop(session.name)
    again = begun(store, size=2)
    assert (again.index, again.group != session.group) == (0, True)


def session_turn(store: SessionStore, session: Session) -> Turn:
    """Return a turn with the request of one that the session has."""
    fields = raw(store, "HKEYS", f"session:{session.name}")
    [request] = [field.decode().split()[1] for field in fields if field.startswith(b"request ")]
    return turn(request=bytes.fromhex(request))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", 0),
        ("head", b"\xc1"),
        ("head", b"\x80"),
        ("0", b"junk"),
        ("turns", b"2"),
        ("turns", b"x"),
    ],
)
def test_a_damaged_session_is_an_error(gateway, field, value):
    store = gateway()
    opened = store.open("p", size=1, wait_s=0)
    session = store.read(opened.name)
    store.append(session, turn())
    if field == "size":
        head = msgspec.msgpack.decode(raw(store, "HGET", f"session:{session.name}", "head"))
        field, value = "head", msgspec.msgpack.encode(head | {field: value})
    raw(store, "HSET", f"session:{session.name}", field, value)
    with pytest.raises((StoreError, UnknownSession)):
        store.read(opened.name)


@pytest.mark.parametrize(
    "field",
    ["id", "group", "index", "size", "least", "bury", "prompt", "tags", "series", "right", "place"],
)
def test_a_head_with_any_other_value_is_refused_or_is_a_session(gateway, field):
    store = gateway(**BOUND)
    odd: list[Any] = [None, -1, 0, 7, 2**63, 0.5, True, "", "x", "7\n", "9" * 30, "\0", "z" * 300]
    odd += [[], ["a"], {}, {"a": 1}, '{"a": []}', '{"a": {}}', "[1]", "[" * 10**5, b"\xff"]
    for number, value in enumerate(odd):
        opened = store.open(f"{number}", size=2, least=1, wait_s=5)
        store.append(store.read(opened.name), turn())
        key = f"session:{opened.name}"
        head = msgspec.msgpack.decode(raw(store, "HGET", key, "head"))
        raw(store, "HSET", key, "head", msgspec.msgpack.encode(head | {field: value}))
        with suppress(StoreError, UnknownSession):
            store.read(opened.name)
            with suppress(SessionOver):
                store.append(store.read(opened.name), turn(0))
            store.reward(opened.name, 1.0)
        raw(store, "HSET", key, "head", msgspec.msgpack.encode(head))
        store.drop(opened.name)
        stream_of(store).clear()


def test_a_script_that_runs_again_does_nothing_more(gateway):
    """The connection broke after each of them, and the client repeats the request."""
    store = gateway(**BOUND)
    stream_of(store).advance(7)
    call = store._task.store.call
    opens: list[Any] = []

    def twice(asked: Any, *beside: bytes) -> Any:
        first = call(asked, *beside)
        opens.append(asked)
        assert call(asked, *beside) == first
        return first

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._task.store, "call", twice)
        sessions = [begun(store, size=3) for _ in range(2)]
        store.drop(sessions[1].name)
    assert [type(each).__name__ for each in opens].count("OpenSession") == 4
    assert [session.index for session in sessions] == [0, 1]
    counts = raw(store, "HMGET", f"gathering:{sessions[0].group}", "next", "open", "dropped")
    assert counts == [b"2", b"1", b"1"]
    store.append(sessions[0], turn())
    for _ in range(2):
        call(UseSession(sessions[0].name, 600_000, ends=True))
    assert raw(store, "HGET", f"gathering:{sessions[0].group}", "open") == b"0"


class Death(KeyboardInterrupt):
    """A gateway was killed."""


def die(*_: object, **__: object) -> None:
    raise Death


class Agents:
    """Agents with random histories at two gateways, which die between any two requests."""

    def __init__(self, seed: int, gateway: Gateway) -> None:
        self.dice = random.Random(seed)
        self.stores = [gateway(max_staleness=1, groups_per_version=8) for _ in range(2)]
        stream_of(self.store).advance(7)
        self.open: dict[str, Opened] = {}
        self.turns: dict[str, list[Turn]] = {}
        self.trained: list[int] = []

    @property
    def store(self) -> SessionStore:
        return self.dice.choice(self.stores)

    def some(self) -> tuple[str, Session]:
        opened = self.open[self.dice.choice(list(self.open))]
        return opened.id, self.store.read(opened.name)

    def step(self) -> None:
        steps = [self.begin] * 4 + [self.train]
        if self.open:
            steps += [self.sample] * 8 + [self.end] * 3 + [self.drop, self.fall_silent]
        self.dice.choice(steps)()

    def begin(self) -> None:
        with suppress(AdmissionTimeout):
            opened = self.store.open(self.dice.choice("abc"), size=2, least=1, wait_s=0)
            self.open[opened.id], self.turns[opened.id] = opened, []

    def sample(self) -> None:
        name, session = self.some()
        assert session.turns == self.turns[name]
        asked = turn(self.dice.randint(-1, len(session.turns) - 1), self.dice.randint(1, 3))
        assert self.store.append(session, asked) == asked
        if self.dice.random() < 0.3:  # the SDK sends it again, to any gateway
            again = turn(asked.parent, request=asked.request)
            assert self.store.append(session, again) == asked
        self.turns[name].append(asked)

    def end(self) -> None:
        name, session = self.some()
        if not session.turns:
            return
        dies_before, dies_after = (self.dice.random() < 0.3 for _ in range(2))
        del self.open[name]
        with pytest.MonkeyPatch.context() as patch, suppress(Death):
            if dies_before:
                patch.setattr(ExperienceStream, "put_part", die)
            elif dies_after:
                patch.setattr(Producer, "put", die)
            self.store.reward(session.name, 1.0)
        if dies_before and dies_after:  # the agent dies, too
            del self.turns[name]
        else:
            self.store.reward(session.name, 1.0)

    def drop(self) -> None:
        name, session = self.some()
        self.store.drop(session.name)
        self.store.drop(session.name)
        del self.open[name], self.turns[name]

    def fall_silent(self) -> None:
        _, session = self.some()
        for name, opened in list(self.open.items()):
            found = self.store.read(opened.name)
            if found.group == session.group:
                silence(self.store, found)
                del self.open[name], self.turns[name]
        stream_of(self.store)._parts.finish_due()

    def train(self) -> None:
        """Train all groups that are there."""
        stream = stream_of(self.store)
        while stream.count():
            with stream.take(1, timeout=0) as lease:
                for item in lease.items():
                    assert item.sequences is not None
                    assert item.action_mask is not None
                    actions = item.sequences[-len(item.action_mask) :]
                    self.trained += actions[item.action_mask].tolist()
                lease.ack()

    def finish(self) -> None:
        """Let all that is not finished fall silent, and train the rest."""
        while self.open:
            self.fall_silent()
        for group in raw(self.store, "ZRANGE", "part_due", 0, -1):
            raw(self.store, "ZADD", "part_due", "XX", 1, group)
        stream_of(self.store)._parts.finish_due(60)
        for right in raw(self.store, "ZRANGE", "holds", 0, -1):
            raw(self.store, "ZADD", "holds", "XX", 1, right)
        self.train()


@pytest.mark.every_server
@pytest.mark.parametrize("seed", range(4))
def test_random_agents_at_two_gateways(gateway, seed):
    """What is trained is what was sampled, each token once, whatever died on the way."""
    agents = Agents(seed, gateway)
    for _ in range(10):
        for _ in range(20):
            agents.step()
        check_books(agents.store)
    agents.finish()
    turns = [each for all_of_one in agents.turns.values() for each in all_of_one]
    assert len(turns) > 20
    assert sorted(agents.trained) == sorted(n for each in turns for n in each.sampled.tokens)
    with stream_of(agents.store).admit(timeout=0):  # takes back what is held for too long
        found = rights(agents.store)
    assert (found.held, found.late) == (1, 0)
    check_books(agents.store)


def test_a_turn_is_stored_when_replicas_have_it(real_url: str, namespace: str) -> None:
    with redrb.connect(real_url, min_replicas=1, retry_s=0.2) as client:
        store = SessionStore(ExperienceStream(client, "math", namespace=namespace), timeout_s=600)
        session = begun(store)
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            store.append(session, turn())
        store.close()


def test_sessions_are_used_through_gateways_at_a_cluster(
    cluster: RedisCluster, namespace: str
) -> None:
    with redrb.connect(cluster.url, retry_s=20) as client:
        for task in ("math", "code", "chat"):
            streams = [ExperienceStream(client, task, namespace=namespace) for _ in range(2)]
            one, other = (SessionStore(stream, timeout_s=600) for stream in streams)
            session = begun(one)
            one.append(session, turn())
            assert rewarded(other, session) == 1
            one.drop(session.name)
            check_books(other)


def test_open_and_silent_sessions_and_their_turns_are_counted(gateway: Gateway) -> None:
    store, other = gateway(), gateway()
    assert stream_of(store).stats().sessions is None

    def counted() -> SessionStats:
        found = stream_of(other).stats().sessions
        assert found == stream_of(store).stats().sessions
        return found

    over, dropped, left = (begun(store) for _ in range(3))
    assert counted() == SessionStats(open=3, begun=3)
    first = turn()
    for each in (store, other):
        each.append(over, first)  # the same request
    store.append(left, turn())
    assert counted() == SessionStats(open=3, begun=3, turns=2)
    for _ in range(2):
        store.drop(dropped.name)
        other.reward(over.name, 1.0)
    assert counted() == SessionStats(open=1, begun=3, turns=2)
    for name in ("a", "b"):  # as if they were silent, and gone
        raw(
            store,
            "ZADD",
            "sessions",
            int(raw(store, "ZSCORE", "sessions", left.id)) - 301_000,
            name,
        )
    raw(store, "ZADD", "sessions", "XX", 1, "b")
    assert counted() == SessionStats(open=2, silent=1, begun=3, turns=2)
    stream_of(store).clear()
    assert stream_of(other).stats().sessions is None
    assert raw(store, "EXISTS", "sessions") == 0


def test_a_client_that_is_used_for_sessions_leaves_no_key_that_stays(
    gateway: Gateway, client: Client
) -> None:
    store = gateway()
    session = begun(store)
    rewarded(store, session)
    stream_of(store).clear()
    left = client.execute("KEYS", f"{store._task.store.keys.prefix}*")
    assert left
    assert all(client.execute("PTTL", key) > 0 for key in left)
