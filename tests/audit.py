"""Counts a task's groups in the raw structures of Redis and compares every counter with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from redrb import ExperienceStream, Status
from redrb.connection.transport import Pipeline
from redrb.stream.heartbeat import Heartbeat
from redrb.stream.task.entries import Facts, unpack_facts

BASE = "9999999999999-"
_MANY = 1_000_000


@dataclass(frozen=True)
class Holdings:
    """The groups of a task that one consumer group has, by id.

    Attributes:
        waiting: Not taken, or returned.
        leased: Id -> slot of the lease.
    """

    waiting: frozenset[int]
    leased: dict[int, str]


def audit(stream: ExperienceStream) -> dict[str, Holdings]:
    """Assert that counters, indexes and entries of a task agree, for every consumer group.

    Everything is read in one transaction, so it may run beside others' work.

    Returns:
        The groups that each consumer group has.
    """
    prefix = stream._task.store.keys.prefix
    client = stream._task.store.client
    if not client.execute("EXISTS", f"{prefix}task"):
        return {}
    names = sorted(name.decode() for name in client.execute("SMEMBERS", f"{prefix}groups"))
    entries, info, task, puts, facts, joined, dead, needs, queue, *replies = _together(
        stream,
        *_of_task(prefix),
        *(command for name in names for command in _of_group(prefix, name)),
    )
    assert sorted(name.decode() for name in joined) == names, "a group came or went meanwhile"
    counters = _counters(task) + _counters(puts)
    stored = {_seq(entry_id): fields for entry_id, fields in entries}
    last = _seq(_pairs(info)["last-generated-id"])
    assert counters["last"] == last, "the last id of the task differs from the stream's"
    assert all(seq <= last for seq in stored)
    assert sorted(needs) == sorted(queue)
    sizes = {seq: len(stored[seq][1]) for seq in stored if seq > counters["sized_after"]}
    if counters["max_bytes"]:
        assert counters["bytes"] == sum(sizes.values()), "bytes"
    buried: dict[str, dict[bytes, int]] = {name: {} for name in names}
    buried[""] = {}  # incomplete groups in parts, which no consumer group had
    for letter_id, fields in dead:
        letter = _pairs(fields)
        buried[letter["group"].decode()][letter_id] = int(letter["seq"])
    settings = _pairs(task)
    known = {int(member): unpack_facts(packed) for member, packed in _pairs(facts, str).items()}
    assert known.keys() == stored.keys(), "facts without a group"
    for seq, kept in known.items():
        assert kept["size"] == len(stored[seq][1])
    found = {}
    step = len(_of_group("", ""))
    for index, name in enumerate(names):
        of_group = replies[index * step : (index + 1) * step]
        found[name] = _check_group(stored, of_group, name, buried, counters)
        _check_pools(stream, name, known, settings)
    needed = set().union(*(held.waiting | held.leased.keys() for held in found.values()))
    if names:
        assert stored.keys() == needed, "entries are stored that no consumer group needs"
    return found


def kill_consumer(stream: ExperienceStream) -> None:
    """Make a stream's consumer dead to the others: no heartbeat, and its deadline is over."""
    consumer = stream._consumer
    if consumer._heartbeat is not None:
        consumer._heartbeat.stop()
        consumer._heartbeat._thread.join()
        consumer._heartbeat = None
    key = f"{stream._task.store.keys.prefix}consumers:{stream.group}"
    stream._task.store.client.execute("ZADD", key, "XX", 1, consumer.name)


@contextmanager
def beats_of_steps() -> Iterator[None]:
    """Let no heartbeat beat by itself, so that a test decides when consumers beat."""

    def wait(heartbeat: Heartbeat, _due: float) -> bool:
        while heartbeat._nudges.get():
            pass
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Heartbeat, "_wait", wait)
        yield


def _of_task(prefix: str) -> list[tuple[Any, ...]]:
    return [
        ("XRANGE", f"{prefix}stream", "-", "+"),
        ("XINFO", "STREAM", f"{prefix}stream"),
        ("HGETALL", f"{prefix}task"),
        ("HGETALL", f"{prefix}puts"),
        ("HGETALL", f"{prefix}facts"),
        ("SMEMBERS", f"{prefix}groups"),
        ("XRANGE", f"{prefix}dead", "-", "+"),
        ("HKEYS", f"{prefix}needs:#room"),
        ("ZRANGE", f"{prefix}queue:#room", 0, -1),
    ]


def _of_group(prefix: str, name: str) -> list[tuple[Any, ...]]:
    return [
        ("HGETALL", f"{prefix}group:{name}"),
        ("XPENDING", f"{prefix}stream", name, "-", "+", _MANY),
        *(("ZRANGE", f"{prefix}ready:{_pool(name, status)}", 0, -1) for status in Status),
        ("HGETALL", f"{prefix}leases:{name}"),
        ("ZRANGE", f"{prefix}consumers:{name}", 0, -1),
        ("HGETALL", f"{prefix}deliveries:{name}"),
        ("HKEYS", f"{prefix}needs:{name}"),
        ("ZRANGE", f"{prefix}queue:{name}", 0, -1),
        ("ZRANGE", f"{prefix}letters:{name}", 0, -1, "WITHSCORES"),
    ]


def _check_group(
    stored: dict[int, Any],
    replies: list[Any],
    name: str,
    buried: dict[str, dict[bytes, int]],
    task: Counter[str],
) -> Holdings:
    state, pending, *pools, leases, consumers, deliveries, needs, queue, letters = replies
    counters = Counter({field: int(value) for field, value in _pairs(state).items()})
    # puts change the counters of the task only
    counters["put"] += task["put"] + task["filtered"] + task["kept_back"]
    counters["filtered"] += task["filtered"]
    counters["expired"] += task["arrived_stale"]
    members = [int(member) for pool in pools for member in pool]
    ready = frozenset(members)
    assert len(members) == len(ready), f"{name}: in two pools at once"
    leased = {_seq(entry_id): slot.decode() for entry_id, slot, *_ in pending}
    assert not ready & leased.keys(), f"{name}: leased and waiting at once"
    assert ready | leased.keys() <= stored.keys(), f"{name}: groups are not stored"
    indexed = dict(zip(letters[::2], map(int, letters[1::2]), strict=True))
    assert indexed == buried[name], f"{name}: dead letters and their index"
    dropped = counters["dead"] - len(indexed)
    assert 0 <= dropped <= task["dead_dropped"], f"{name}: dead"
    ended = sum(counters[kind] for kind in ("acked", "expired", "filtered", "evicted", "dead"))
    assert counters["put"] == ended + len(leased) + len(ready), f"{name}: {counters}"
    alive = {consumer.decode() for consumer in consumers}
    tokens = {slot.decode(): token.decode() for slot, token in _pairs(leases, str).items()}
    for slot in set(leased.values()):
        assert not tokens[slot].endswith(" ended"), f"{name}: an ended lease holds groups"
        assert slot.rpartition("/")[0] in alive, f"{name}: the consumer of a lease is dead"
    failed = {int(member) for member in deliveries[::2]}
    assert failed <= ready | leased.keys(), f"{name}: deliveries of groups that are gone"
    assert sorted(needs) == sorted(queue)
    return Holdings(ready, leased)


def _check_pools(
    stream: ExperienceStream, name: str, known: dict[int, Facts], settings: dict[str, bytes]
) -> None:
    """Check that each index of a pool has exactly the groups of the pool."""
    prefix, run = stream._task.store.keys.prefix, stream._task.store.client.execute
    moved = {
        int(seq): to.decode()
        for seq, to in _pairs(run("HGETALL", f"{prefix}moved:{name}"), str).items()
    }
    for status in Status:
        pool = _pool(name, status)
        ready = set(map(int, run("ZRANGE", f"{prefix}ready:{pool}", 0, -1)))
        assert all(moved.get(seq, known[seq]["status"]) == status for seq in ready), pool
        for kind, setting, field in (
            ("versions", "max_staleness", "version"),
            ("newest", "max_token_staleness", "newest"),
        ):
            members = set(map(int, run("ZRANGE", f"{prefix}{kind}:{pool}", 0, -1)))
            asked = setting in settings and (
                kind == "newest" or settings.get("order") != b"stalest"
            )
            assert members == {seq for seq in ready if asked and field in known[seq]}, (
                kind,
                pool,
            )
        if settings.get("sampled") == b"1" and "unsorted" not in settings:
            weights = Counter[int]()
            for mantissa, exponent in (math.frexp(known[seq]["score"]) for seq in ready):
                weights[exponent] += math.floor(mantissa * 2**37 + 0.5)
            mass = _pairs(run("HGETALL", f"{prefix}mass:{pool}"), int)
            assert {int(exponent): int(units) for exponent, units in mass.items()} == +weights, pool


def _pool(group: str, status: Status) -> str:
    return group if status is Status.COMPLETED else f"{group}:{status}"


def _together(stream: ExperienceStream, *commands: tuple[Any, ...]) -> list[Any]:
    pipeline = Pipeline()
    for command in (("MULTI",), *commands, ("EXEC",)):
        pipeline.add(*command)
    *_, replies = stream._task.store.client.exchange(pipeline)
    for reply in replies:
        assert not isinstance(reply, Exception), reply
    return list(replies)


def _seq(entry_id: bytes) -> int:
    text = entry_id.decode()
    assert text.startswith(BASE), text
    return int(text.removeprefix(BASE))


def _pairs(flat: list[Any], kind: type | None = None) -> dict[Any, Any]:
    names = [name if kind is str else name.decode() for name in flat[::2]]
    return dict(zip(names, flat[1::2], strict=True))


def _counters(flat: list[Any]) -> Counter[str]:
    numbers = {name: value for name, value in _pairs(flat).items() if value.isdigit()}
    return Counter({name: int(value) for name, value in numbers.items()})
