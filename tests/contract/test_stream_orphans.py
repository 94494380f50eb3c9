"""Puts whose script fails leave nothing behind: their entries go, and nobody gets their payload."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import redrb
from redrb import BatchTimeout, ConfigError, ExperienceStream
from redrb.connection.transport import Pipeline
from redrb.errors import StoreDenied, StoreError
from redrb.stream.put.calls import AskRoom, Evict, Put, RoomReply
from redrb.stream.take.calls import Take, TakeRequest
from tests.audit import audit
from tests.samples import numbered, numbers

SECRET = "secret-of-a-test"

SETTINGS: dict[str, Any] = {
    "order": "prioritized",
    "limit": 6,
    "max_bytes": 100_000,
    "tags": ["score", "source"],
    "max_staleness": 3,
}

NEEDED = ["HSET", "ZADD", "HINCRBY", "XRANGE", "HMGET", "SMEMBERS", "DEL", "XLEN"]
"""Commands that every put of such a task runs."""

FURTHER = ["XDEL", "HDEL", "HGET", "ZREM", "ZCARD", "RPUSH", "PEXPIRE", "XREVRANGE", "XPENDING"]
"""Commands that some puts run."""


def put(stream: ExperienceStream, number: int) -> tuple[int, ...]:
    tags: dict[str, Any] = {"score": number, "source": "a"}
    return stream.put(numbered(number), policy_version=5, priority=2.0, tags=tags, timeout=5)


@pytest.fixture
def limited(owner, real_url):
    """Connect as a new user with these rules; called again, change them."""
    name, clients = f"u{uuid.uuid4().hex[:8]}", []

    def connect(*rules):
        owner.execute("ACL", "SETUSER", name, "reset", "on", f">{SECRET}", "~*", "&*", *rules)
        clients.append(redrb.connect(real_url.replace("://", f"://{name}:{SECRET}@"), retry_s=2))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    owner.execute("ACL", "DELUSER", name)


@pytest.mark.parametrize(
    ("command", "known"),
    [*((name, False) for name in NEEDED + FURTHER), *((name, True) for name in NEEDED)],
)
def test_a_user_without_one_command(owner, limited, namespace, command, *, known):
    stream = ExperienceStream(owner, "math", namespace=namespace, **SETTINGS)
    stream.join_group()
    other = ExperienceStream(limited("+@all"), "math", namespace=namespace, **SETTINGS)
    allowed = {1}
    put(stream, 1)
    if known:
        put(other, 2)
        allowed.add(2)
    limited("+@all", f"-{command.lower()}")
    for _ in range(2 * SETTINGS["limit"]):  # more than the limit: none of them may take room
        with pytest.raises(StoreError) as caught:
            put(other, 99)
        if not known and command != "HMGET":
            assert isinstance(caught.value, StoreDenied)
            assert command in str(caught.value)
    assert stream.stats().ledger.put == len(allowed)
    (mine,) = put(stream, 3)
    allowed.add(3)
    assert _stored(stream) == allowed
    (read,) = stream.read([mine])
    assert numbers(read.items) == [3]
    audit(stream)
    while len(allowed) < SETTINGS["limit"]:
        allowed.add(10 + len(allowed))
        put(stream, max(allowed))
    assert stream.stats().stored == SETTINGS["limit"]
    lease = stream.take(SETTINGS["limit"], timeout=5)
    assert set(numbers(lease)) == allowed
    lease.ack()
    audit(stream)
    assert stream.stats().ledger.balanced


def _stored(stream: ExperienceStream) -> set[int]:
    entries = stream._task.store.client.execute("XRANGE", stream._task.store.keys.stream, "-", "+")
    groups = stream.read([int(entry.rpartition(b"-")[2]) for entry, _ in entries])
    return {numbers(group.items)[0] for group in groups if group is not None}


@pytest.mark.parametrize("command", ["RPUSH", "PEXPIRE"])
def test_a_put_that_cannot_wake_is_taken_back(owner, limited, namespace, command):
    """A user who lost the right to wake consumers after the first put."""
    stream = ExperienceStream(owner, "math", namespace=namespace, **SETTINGS)
    other = ExperienceStream(limited("+@all"), "math", namespace=namespace, **SETTINGS)
    put(other, 1)
    with pytest.raises(BatchTimeout):  # from now on a place in the queue is kept
        stream.take(2, timeout=0.01)
    take = Take(
        "default", "c", "c/0", "1", TakeRequest(2, 2), "w", 60_000, 60_000, stream.incarnation
    )
    assert stream._task.store.call(take).outcome == "short"
    limited("+@all", f"-{command.lower()}")
    for _ in range(9):
        with pytest.raises(StoreError):
            put(other, 2)
    assert stream.stats().ledger.put == 1
    audit(stream)
    limited("+@all")
    put(other, 3)
    prefix = stream._task.store.keys.prefix
    owner.execute("DEL", f"{prefix}queue:default", f"{prefix}needs:default")
    assert sorted(numbers(stream.take(2, timeout=5))) == [1, 3]
    audit(stream)


def test_entries_of_a_transaction_whose_script_is_unknown(client, open_stream):
    stream = open_stream(limit=5, on_full="drop_oldest")
    stream.join_group()
    keys = stream._task.store.keys
    stream.put(numbered(1))
    for count in (1, 3, 250):
        pipeline = Pipeline()
        pipeline.add("MULTI")
        for _ in range(count):
            pipeline.add("XADD", keys.stream, "NOMKSTREAM", "*", "g", b"lost")
        pipeline.add("EVALSHA", "0" * 40, 1, keys.stream)
        pipeline.add("EXEC")
        client.exchange(pipeline)
        assert stream.stats().ledger.put == len(stream)
        (seq,) = stream.put(numbered(count))
        (read,) = stream.read([seq])
        assert numbers(read.items) == [count]
        audit(stream)
    assert numbers(stream.take(4, timeout=0)) == [1, 1, 3, 250]


def test_orphans_do_not_keep_a_blocked_put_waiting(client, open_stream):
    stream = open_stream(limit=4)
    stream.join_group()
    keys = stream._task.store.keys
    for _ in range(4):
        client.execute("XADD", keys.stream, "NOMKSTREAM", "*", "g", b"lost")
    assert stream._task.store.call(AskRoom("p", 60_000, [10])) == RoomReply(1, "limit")
    assert stream._task.store.call(AskRoom("p", 0)) == RoomReply(0, "")
    stream.put(numbered(1))


def refuses_to_go_on(stream: ExperienceStream, open_stream: Callable[..., object]) -> None:
    """Check that calls whose ids would follow those of a lost record fail and change nothing."""
    calls: list[Callable[[], object]] = [
        *(lambda: stream.put(numbered(9)), lambda: stream.put_many([[numbered(9)]] * 3)),
        *(lambda: stream.put_many([[numbered(9)]] * 8, timeout=0), open_stream),
        *(lambda: stream._task.store.call(AskRoom("p", 60_000, [10])),),
        *(lambda: stream.requeue([1]), lambda: stream.configure(limit=9)),
        *(lambda: open_stream(group="late").join_group(),),
        *(lambda: stream._task.store.call(Evict("p", 1, 0, 1, 10, 0)),),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="redrb doctor TASK --repair"):
            call()
        assert stream._task.store.client.execute("XLEN", stream._task.store.keys.stream) == 7


@pytest.mark.parametrize("on_full", ["block", "drop_oldest"])
def test_a_task_that_has_lost_the_record_of_its_puts_loses_nothing_more(
    client, open_stream, on_full
):
    stream = open_stream(limit=8, on_full=on_full, max_deliveries=1)
    stream.put_many([[numbered(number)] for number in range(8)])
    stream.take(1, timeout=0).fail("bad")
    prefix = stream._task.store.keys.prefix
    kept = client.execute("HGETALL", f"{prefix}puts")
    client.execute("DEL", f"{prefix}puts")
    refuses_to_go_on(stream, open_stream)
    client.execute("HSET", f"{prefix}puts", *kept)
    stream.put(numbered(9))
    audit(stream)


@pytest.mark.parametrize(
    ("last", "page"),
    [
        *((last, 3) for last in ("0", "1", "5", "-5", "x", "nan", "inf", "1.5", "9" * 28)),
        *(("9007199254740993", 3), ("1", 100)),
    ],
)
def test_a_wrong_last_id_deletes_no_group(client, open_stream, pages, last, page):
    pages(orphans=page)
    stream = open_stream(limit=12, max_deliveries=1)
    stream.put_many([[numbered(number)] for number in range(8)])
    stream.take(1, timeout=0).fail("bad")
    keys = stream._task.store.keys
    client.execute("HSET", keys.puts, "last", last)
    refuses_to_go_on(stream, open_stream)
    client.execute("HSET", keys.puts, "last", 8 if last != "7" else 7)
    given = client.execute("XINFO", "STREAM", keys.stream)
    newest = given[given.index(b"last-generated-id") + 1].rpartition(b"-")[2]
    client.execute("HSET", keys.puts, "last", newest)
    stream.put(numbered(9))
    audit(stream)


@pytest.mark.parametrize("lost", ["last", "stream"])
def test_a_put_that_the_stream_does_not_hold_is_no_success(client, namespace, lost):
    stream = ExperienceStream(client, "math", namespace=namespace)
    stream.put(numbered(1))
    keys = stream._task.store.keys
    if lost == "last":
        client.execute("HSET", keys.puts, "last", 1000)
    else:
        client.execute("DEL", keys.stream)
    with pytest.raises(StoreError, match="redrb doctor math --repair"):
        stream.put(numbered(2))
    with pytest.raises(StoreError, match="redrb doctor TASK --repair"):
        ExperienceStream(client, "math", namespace=namespace)
    stream.close()


@pytest.mark.parametrize("known", [b"1", b"x"])
def test_a_put_without_groups_removes_orphans(client, open_stream, known):
    stream = open_stream()
    stream.put(numbered(1))
    client.execute("XADD", stream._task.store.keys.stream, "9999999999999-*", "g", known)
    put = Put("p", 1, 0, 0, 0, 1, 0, "", "completed", "", None, None, None)
    assert stream._task.store.call(put).outcome == "ok"
    assert len(stream) == 1


@dataclass(frozen=True)
class Scored:
    """An order whose score can be changed."""

    scores: list[Any]
    sampled: bool = True
    name: str = "mine"

    def score(self, _: object) -> Any:
        return self.scores[0]


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("bad", [True, float("nan"), "inf", None])
def test_a_score_that_is_none(open_stream, bad, *, sampled):
    order = Scored([1.0], sampled)
    stream = open_stream(order=order)
    stream.join_group()
    ids = stream.put_many([[numbered(1)], [numbered(2)]])
    order.scores[0] = bad
    with pytest.raises(ConfigError, match="returned the score"):
        stream.put(numbered(9))
    with pytest.raises(ConfigError, match="returned the score"):
        stream.update_priority(ids, [1.0, 2.0])
    order.scores[0] = 2.0
    assert stream.update_priority(ids, [1.0, 2.0]) == 2
    stream.put(numbered(3))
    assert sorted(numbers(stream.take(3, timeout=0))) == [1, 2, 3]


@pytest.mark.parametrize("bad", [float("inf"), 1e308, 1e101, -1])
def test_a_weight_whose_sum_would_overflow(open_stream, bad):
    order = Scored([1e100])
    stream = open_stream(order=order)
    stream.join_group()
    ids = stream.put_many([[numbered(number)] for number in range(20)])
    order.scores[0] = bad
    for call in (lambda: stream.put(numbered(9)), lambda: stream.update_priority(ids[:1], [1.0])):
        with pytest.raises(ConfigError, match=r"between 0 and 1e\+100"):
            call()
    for _ in range(4):
        stream.take(5, timeout=0).ack()
    assert stream.stats().ledger.waiting == 0


def test_priorities_near_the_largest_number(open_stream):
    stream = open_stream(order="prioritized")
    stream.join_group()
    with pytest.raises(ConfigError, match=r"between 0 and 1e\+100"):
        stream.put(numbered(1), priority=1e308)
    (seq,) = stream.put(numbered(1), priority=1e150)
    with pytest.raises(ConfigError, match=r"between 0 and 1e\+100"):
        stream.update_priority([seq], [1e308])
    assert numbers(stream.take(1, timeout=0)) == [1]
