"""The work of one script call does not grow with the backlog, waiters, gaps of ids or consumers.

Each scene is built twice, small and five times larger. Then the commands that each script calls are
counted by the server: the larger scene may not need noticeably more.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgpack
import pytest

import redrb
from redrb.connection.transport import Pipeline
from redrb.errors import LeaseLost
from redrb.experience import Status
from redrb.gateway.store import SessionStore
from redrb.lua.calls import Found
from redrb.stream.assembly.calls import FindDue, FinishParts
from redrb.stream.put.batch import Claim
from redrb.stream.put.calls import MOST_EVICTED, AskRoom, Evict
from redrb.stream.saving.calls import ReadRecords
from redrb.stream.take.calls import Drop, Finish, Leave
from redrb.stream.take.cause import NO_CAUSE
from redrb.stream.task.calls import (
    Count,
    Discard,
    DropGroup,
    Expire,
    ExpireMode,
    Fill,
    Join,
    Move,
    Open,
    Settle,
    Stats,
    Versions,
)
from redrb.stream.task.description import StalenessRules
from redrb.stream.task.entries import entry_id
from redrb.stream.task.expiration import EXPIRE_GROUPS
from redrb.watch.doctor.calls import Examine
from redrb.watch.state.calls import Observe
from tests.gateway_turns import turn
from tests.samples import numbered
from tests.scenes import FOREVER_MS, Scene, groups_of

pytestmark = pytest.mark.long  # scripts call the same commands on every server

SMALL, LARGE = 400, 2000
"""Both are larger than the pages in which scripts work."""

MARGIN = 40
"""Commands more than in the small scene: the pages of HSCAN vary."""

MOST = 1000
"""Commands of any one call."""

WHERE = json.dumps({"tag": "score", "inverted": False, "values": [[0.25, 0.75]]})
RARE = json.dumps({"tag": "score", "inverted": False, "values": [[7, 7]]})


Build = Callable[[Scene], None]


@pytest.fixture
def compare(real_url, namespace, no_heartbeats):
    """Build a scene twice and compare the costs."""

    def of_both(build, margin=MARGIN, **settings):
        with redrb.connect(real_url) as client:
            small, large = (
                Scene(client, f"{namespace}{size}", size, settings) for size in (SMALL, LARGE)
            )
            for scene in (small, large):
                build(scene)
                scene.close()
        assert small.costs.keys() == large.costs.keys()
        grown = {
            name: (small.costs[name], cost)
            for name, cost in large.costs.items()
            if cost > min(small.costs[name] + margin, MOST)
        }
        assert not grown, f"commands with {SMALL} and with {LARGE}: {grown}"

    return of_both


ORDERS = ["fifo", "stalest", "priority", "prioritized"]
"""Without an index of versions, with one that is the order, with other scores, and drawn."""


@pytest.mark.parametrize("order", ORDERS)
def test_the_backlog(compare, order):
    def build(scene):
        stream = scene.stream
        critic = scene.open(group="critic")
        critic.join_group()
        scene.fill(policy_version=5, tags={"score": 0.5}, priority=2.0)
        ids = scene.fill(20, policy_version=5, tags={"score": 7}, priority=1.0)
        scene.fill(3, policy_version=1)
        _every_call(scene, ids)
        assert stream.count() > 200  # every page was full

    compare(build, 300, order=order, tags=["score"], max_staleness=4, max_token_staleness=50)


def expiry(mode: ExpireMode) -> Expire:
    """Return a call that expires groups of 4 and more versions behind."""
    rules = StalenessRules(3, None)
    return Expire("default", EXPIRE_GROUPS, mode, 9, rules, [Status.COMPLETED])


def _every_call(scene: Scene, ids: Sequence[int]) -> None:
    """Run the scripts of a consumer and of a producer, on a task with two consumer groups."""
    stream = scene.stream
    scene.note("put", lambda: stream.put(numbered(1), policy_version=9, tags={"score": 0.5}))
    scene.note("put many", lambda: stream.put(groups_of(32), policy_version=9))
    lease = stream.take(4, timeout=0)
    stream.advance(2)
    leases = []  # a heartbeat would return those of a lease that is dropped, at any time
    scene.note("take", lambda: leases.append(stream.take(4, timeout=0)))
    scene.note("ack", lambda: lease.ack(lease.ids[:2]))
    scene.note("reject", lambda: lease.reject("bad", lease.ids[:1]))
    scene.note("release", lease.release)
    scene.note("take rare", lambda: scene.take("a", 2, where=RARE))
    scene.note("take common", lambda: scene.take("a", 2, where=WHERE))
    scene.cost(scene.taking("b", 10**6))
    scene.cost(Count("default", Status.COMPLETED))
    scene.cost(Count("default", Status.COMPLETED, WHERE), name="count where")
    scene.cost(Count("nobody", Status.COMPLETED, WHERE), name="count of a new group")
    scene.cost(Stats("default"))
    scene.cost(Observe("default", "-inf"))
    scene.cost(Examine())
    scene.cost(Versions("default"))
    scene.cost(Move("default", Status.ABORTED, list(map(str, ids[:4]))))
    scene.cost(Discard("default", list(map(str, ids[:4]))))
    scene.cost(Settle("default", scene.incarnation, [(str(seq), 1) for seq in ids[4:8]]))
    if scene.settings["order"].startswith("prior"):
        scene.note("task/rescore", lambda: stream.update_priority(ids[8:10], [3.0, 4.0]))
    scene.cost(expiry("discard"))
    scene.cost(expiry("keep"), name="expire keep")
    scene.cost(expiry("look"), name="expire look")
    scene.note("take beyond", lambda: scene.take("a", 2))
    scene.cost(scene.beat("a"), b"")
    scene.cost(Join("late"))
    scene.note("read", lambda: stream.read(ids[:4]))
    scene.cost(ReadRecords(["default"], list(map(str, ids[10:14]))))
    scene.cost(DropGroup("critic"))
    while scene.run(DropGroup("critic")).more:
        pass
    scene.cost(Leave("default", "a"))
    for one in leases:
        with suppress(LeaseLost):  # a random order may have drawn groups that were settled since
            one.release()
    while scene.run(Join("late")).more:
        pass


@pytest.mark.parametrize(
    ("order", "on_full"),
    [
        ("fifo", "drop_oldest"),
        ("fifo", "error"),
        ("stalest", "drop_oldest"),
        ("uniform", "drop_oldest"),
    ],
)
def test_a_full_task(compare, order, on_full):
    def build(scene):
        full = scene.open(limit=scene.size, on_full=on_full)
        critic = scene.open(group="critic")
        critic.join_group()
        scene.fill(policy_version=1)
        for start in range(0, scene.size // 2, 50):  # the critic leases half of them
            scene.take(f"c{start}", 50, group="critic")
        if on_full == "drop_oldest":
            while scene.cost(Evict("p", 1, 0, 1, 100, 1, MOST_EVICTED)).more:
                pass
            for _ in range(3):
                scene.note("put", lambda: full.put(numbered(1), policy_version=1))
        else:
            with pytest.raises(redrb.StoreFull):
                full.put(numbered(1), policy_version=1)
            scene.cost(Evict("p", 1, 0, 1, 100, 1, MOST_EVICTED))
            scene.cost(AskRoom("p", FOREVER_MS, [100, 100]))
        full.close()

    compare(build, 100, order=order, max_staleness=9)


def test_groups_of_several_consumer_groups_end_together(compare):
    """A call for 32 groups runs few commands more for seven more consumer groups.

    The other scenes have one or two. Here some groups are done or leased in each consumer group.
    """

    def build(scene):
        groups = 2 if scene.size == SMALL else 9
        full = scene.open(limit=400, on_full="drop_oldest")
        others = [scene.open(group=f"g{number}") for number in range(groups - 1)]
        for other in others:
            other.join_group()
        scene.fill(400, policy_version=1)
        leases = [other.take(64, timeout=0) for other in others]
        for lease in leases:
            lease.ack(lease.ids[16:])
        scene.cost(Evict("p", 1, 0, 32, 100, 0, MOST_EVICTED))
        scene.note("put", lambda: full.put(groups_of(32), policy_version=1))
        mine = full.take(64, timeout=0)
        scene.note("ack", lambda: mine.ack(mine.ids[:32]))
        scene.cost(expiry("discard"))
        scene.cost(DropGroup("g0"))
        while scene.run(DropGroup("g0")).more:
            pass
        for stream in (full, *others):
            stream.close()

    compare(build, 32 * 7, tags=["score"], max_staleness=9)


def test_room_for_many_bytes(compare):
    """Thousands of small groups give way to a large one page by page."""

    def build(scene):
        scene.fill()
        for producer in ("p", "q", "r"):
            reply = scene.cost(Evict(producer, 1, 0, 1, 10**9, 0, MOST_EVICTED))
            assert reply == Found(more=True, found=MOST_EVICTED)
        while scene.cost(Evict("p", 1, 0, 1, 10**9, 0, MOST_EVICTED)).more:
            pass
        assert scene.stream.stats().stored == 0

    compare(build, max_bytes=10**9)


def test_a_gap_of_ids(compare):
    """Groups were evicted, or never stored, between the first and the last one."""

    def build(scene):
        stream = scene.stream
        critic = scene.open(group="critic")
        critic.join_group()
        scene.fill(1)
        held = critic.take(1, timeout=0)
        scene.fill()
        scene.take("t", scene.size + 1)
        seqs = list(map(str, range(1, scene.size + 2)))
        scene.run(Finish("default", "t", "t/1", "1", "ack", seqs, samples=scene.size))
        scene.take("u", scene.size, group="critic")
        scene.run(Finish("critic", "u", "u/2", "2", "ack", seqs[1:], samples=scene.size))
        assert stream.stats().stored == 1
        scene.note("put", lambda: scene.fill(3))
        scene.note("take", lambda: stream.take(1, timeout=0).ack())
        small = scene.open(limit=2, on_full="drop_oldest")
        scene.note("evicting put", lambda: small.put(numbered(1)))
        scene.note("release", held.release)
        scene.note("evicting put later", lambda: small.put(numbered(1)))
        small.close()

    compare(build)


def test_waiting_takes(compare):
    def build(scene):
        for number in range(scene.size):
            scene.take(f"w{number}", 3, ttl_ms=FOREVER_MS)
            scene.take(f"q{number}", 3, ttl_ms=FOREVER_MS, where=WHERE)
            each = {"tag": "score", "inverted": False, "values": [[number, number]]}
            scene.take(f"d{number}", 3, ttl_ms=FOREVER_MS, where=json.dumps(each))
        stream = scene.stream
        scene.note("put", lambda: stream.put(numbered(1), tags={"score": 0.5}))
        scene.note("put of many", lambda: stream.put(groups_of(32), tags={"score": 5}))
        scene.cost(scene.taking("w5", 3, ttl_ms=FOREVER_MS))
        scene.cost(scene.taking("x", 3, ttl_ms=FOREVER_MS), name="queue")
        again = scene.taking("q5", 3, ttl_ms=FOREVER_MS, where=WHERE)
        scene.cost(again, name="where")
        scene.cost(Stats("default"))
        scene.cost(Examine())
        scene.cost(scene.beat("w1"), b"")
        scene.cost(Leave("default", "w3"))
        late = scene.open(group="late")
        late.join_group()
        scene.cost(DropGroup("default"))
        scene.stream.join_group()

    compare(build, 700, tags=["score"])


def test_blocked_producers(compare):
    def build(scene):
        full = scene.open(limit=4)
        scene.fill(4)
        for number in range(scene.size):
            scene.run(AskRoom(f"p{number}", FOREVER_MS, [100]))
        scene.cost(AskRoom(f"p{scene.size - 1}", FOREVER_MS, [100]), name="room of the last")
        scene.cost(AskRoom("p0", FOREVER_MS, [100]))
        scene.cost(AskRoom("new", FOREVER_MS, [100]), name="room of another")
        lease = full.take(2, timeout=0)
        scene.note("ack", lease.ack)
        scene.cost(AskRoom("p9", 0), name="room given up")
        scene.cost(Stats("default"))
        scene.cost(Examine())
        full.close()

    compare(build)


@pytest.mark.parametrize("how", ["task/clear", "task/drop_group"])
def test_waiters_of_many_queues(compare, how):
    """Takes of each status, with and without queries, wait for the task or group that ends."""

    def build(scene):
        scene.open(limit=8).close()
        scene.fill(8)
        for number in range(scene.size):
            scene.run(AskRoom(f"p{number}", FOREVER_MS, [100]))
        for status, number in itertools.product(Status, range(scene.size // 4)):
            for name, where in (("w", ""), ("q", WHERE)):
                consumer = f"{name}{number}"
                scene.take(consumer, 5, ttl_ms=FOREVER_MS, status=status, where=where)
        if how == "task/drop_group":  # else closing the scene clears the task
            scene.cost(DropGroup("default"))
        scene.stream.join_group()

    compare(build, tags=["score"])


@pytest.mark.parametrize("fate", ["alive", "dead", "spared"])
def test_consumers(compare, fate):
    def build(scene):
        client, prefix = scene.client, scene.stream._task.store.keys.prefix
        scene.fill(policy_version=1)
        for number in range(scene.size - 20):
            scene.take(f"c{number}", 1)
        if fate != "alive":
            spared = ["me"] if fate == "spared" else []
            scene.run(scene.beat("me"), b"")
            pipeline = Pipeline()
            for name in [*(f"c{number}" for number in range(scene.size - 20)), *spared]:
                pipeline.add("ZADD", f"{prefix}consumers:default", 1, name)
            client.exchange(pipeline)
        scene.cost(scene.beat("me"), b"")
        scene.cost(Stats("default"))
        scene.cost(Examine())
        scene.cost(Versions("default"))
        scene.note("put", lambda: scene.fill(1, policy_version=1))
        scene.note("take", lambda: scene.take("me", 1))
        scene.cost(expiry("discard"))
        if fate == "spared":
            while client.execute("ZCOUNT", f"{prefix}consumers:default", "-inf", 1):
                scene.run(scene.beat("me"), b"")
            assert scene.stream.stats().taken_over == 0
        scene.cost(DropGroup("default"))
        while scene.run(DropGroup("default")).more:
            pass

    compare(build, 100, max_staleness=4)


def test_a_large_lease_is_returned_page_by_page(compare):
    def build(scene):
        scene.fill()
        scene.take("c", scene.size)
        scene.cost(Leave("default", "c"))
        scene.cost(Versions("default"))
        while scene.run(Leave("default", "c")).more:
            pass
        given_up = scene.taking("b", scene.size)
        scene.run(given_up)
        drop = Drop(given_up.group, given_up.slot, given_up.token)
        scene.cost(drop)
        while scene.run(drop).more:
            pass
        scene.take("d", scene.size)
        prefix = scene.stream._task.store.keys.prefix
        scene.run(scene.beat("me"), b"")
        scene.client.execute("ZADD", f"{prefix}consumers:default", "XX", 1, "d")
        scene.cost(scene.beat("me"), b"")
        while scene.run(scene.beat("me"), b"").taken_over:
            pass

    compare(build, 200)


def test_joining_late(compare):
    def build(scene):
        scene.fill()
        scene.cost(Count("late", Status.ARCHIVED))
        scene.cost(Join("late"))
        while scene.run(Join("late")).more:
            pass
        scene.cost(Join("later", newest=True))

    compare(build, 200)


def test_versions(compare):
    def build(scene):
        for version in range(0, scene.size, 10):
            scene.fill(10, policy_version=version)
        many = [[numbered(1)] for _ in range(scene.size)]
        for version, group in enumerate(many):
            if version % 3 == 0:
                scene.stream.put(group, policy_version=10_000 + version)
        scene.cost(Versions("default"))
        report = scene.stream.staleness(20_000)
        assert report.waiting.groups == scene.size + len(range(0, scene.size, 3))

    compare(build, 410, order="stalest")


def test_a_new_staleness_rule(compare):
    def build(scene):
        scene.fill(policy_version=5)
        scene.set("max_token_staleness", 3)
        scene.set("filling", 0)
        scene.cost(Fill())
        while scene.run(Fill()).more:
            pass
        scene.cost(Open("r", "who", given={"format": "3", "order": "fifo"}))

    compare(build, 100)


def test_changed_settings(compare):
    """Settings of a task with many groups, letters, waiting takes and puts change."""

    def build(scene):
        stream, size = scene.stream, scene.size
        scene.open(group="critic").join_group()
        scene.fill(size // 2)
        stream.take(size // 2, timeout=0).reject("bad")
        scene.fill(size // 2)
        with scene.open(group="critic") as critic:
            critic.take(size, timeout=0).ack()
        stream.take(size // 2, timeout=0).ack()
        scene.fill(policy_version=5, tags={"score": 0.5})
        scene.open(limit=2 * size).close()
        for number in range(size // 2):
            each = {"tag": "score", "inverted": False, "values": [[number + 7, number + 7]]}
            for where in (RARE, json.dumps(each)):
                scene.take(f"q{number}", 3, ttl_ms=FOREVER_MS, where=where, status="aborted")
            scene.take(f"w{number}", 3 * size, ttl_ms=FOREVER_MS)
            scene.run(AskRoom(f"p{number}", FOREVER_MS, [100]))
        changes: list[dict[str, Any]] = [
            {"tags": []},
            {"tags": ["score", "site"]},
            {"max_staleness": 9},
            {"max_token_staleness": 9, "max_bytes": 10**9},
            {"max_staleness": None, "max_token_staleness": None},
            {"limit": 3 * size},
            {"max_dead": 1},
        ]
        for change in changes:
            scene.note_each(lambda change=change: stream.configure(**change))
        assert {"task/configure", "task/fill"} <= scene.costs.keys()
        stats = stream.stats()
        assert (stats.dead_letters, stats.ledger.waiting) == (1, size)

    compare(build, 300, tags=["score"], max_dead=0)


def test_orphans(compare):
    """Transactions of puts failed before their script counted the entries."""

    def build(scene):
        scene.fill(4)
        stream = scene.stream._task.store.keys.stream
        pipeline = Pipeline()
        for _ in range(scene.size):
            pipeline.add("XADD", stream, "*", "g", b"lost")
        scene.client.exchange(pipeline)
        scene.cost(AskRoom("p", FOREVER_MS, [100]))
        scene.cost(Evict("p", 1, 0, 1, 100, 0, MOST_EVICTED))
        scene.stream.put(numbered(7))
        assert scene.client.execute("XRANGE", stream, entry_id(4), "+", "COUNT", 2)[1:]
        assert scene.client.execute("XLEN", stream) == 5

    compare(build)


@pytest.mark.parametrize("order", ["fifo", "prioritized"])
def test_ranks(compare, order):
    """Ranks take beside many groups, waiting takes, blocked puts and another consumer group."""

    def build(scene):
        stream = scene.open(limit=scene.size + 200)
        critic = scene.open(group="critic")
        critic.join_group()
        scene.fill(policy_version=1)
        for number in range(scene.size // 2):
            scene.take(f"c{number}", 1, group="critic")
        scene.fill(200, policy_version=1)
        for number in range(scene.size):
            scene.take(f"w{number}", 3, ttl_ms=FOREVER_MS, status="aborted")
            scene.run(AskRoom(f"p{number}", FOREVER_MS, [100]))
        for step in (1, 2):
            scene.note_each(lambda step=step: _ranks_take(stream, step).ack())
        with pytest.raises(redrb.BatchTimeout):  # the other rank does not come
            scene.note_each(lambda: stream.take(4, rank=0, world_size=2, step=3, timeout=0.1))
        assert {"ranks/ask", "take/take", "take/finish"} <= scene.costs.keys()
        stream.close()

    compare(build, 100, order=order, max_staleness=9)


def _ranks_take(stream: redrb.ExperienceStream, step: int) -> redrb.Lease:
    return stream.take(4, rank=0, world_size=1, step=step, timeout=5)


def test_saving(compare, tmp_path):
    """The groups are put into a task for which many takes and puts wait."""

    def build(scene):
        stream, path = scene.stream, tmp_path / f"{scene.size}.redrb"
        critic = scene.open(group="critic")
        critic.join_group()
        scene.fill(policy_version=1, tags={"score": 0.5, "kind": "a"})
        with scene.open() as trainer:
            trainer.take(scene.size // 4, timeout=0).ack()
            trainer.take(scene.size // 4, timeout=0).reject("bad")
        stream.advance(1)
        scene.note_each(lambda: stream.save(path))
        stream.clear()
        other = scene.open(limit=10 * scene.size)
        other.join_group()
        for each in (stream, critic):  # now, and not at a heartbeat while requests are counted
            each._task.reopen()
        for name in ("late", "later"):
            scene.run(Join(name))
        for number in range(scene.size):
            scene.take(f"w{number}", 3, ttl_ms=FOREVER_MS)
            scene.take(f"q{number}", 3, ttl_ms=FOREVER_MS, where=WHERE)
            scene.run(AskRoom(f"p{number}", FOREVER_MS, [100]))
        scene.note_each(lambda: stream.resume(path))
        assert {"saving/records", "put/put", "task/advance"} <= scene.costs.keys()
        other.close()

    compare(build, 100, tags=["score", "kind"], max_staleness=9)


def test_groups_in_parts(compare):
    def build(scene):
        wait_for_parts(scene)
        scene.note("part", lambda: scene.stream.put_part("a", numbered(0), index=0, of=2))
        scene.note("last part", lambda: scene.stream.put_part("a", numbered(1), index=1, of=2))
        scene.cost(FindDue(10_000))
        scene.cost(FinishParts(Claim("399", 1, "dead"), "old", NO_CAUSE, "me"), b"group")
        scene.cost(scene.beat("me"), b"")
        scene.cost(Stats("default"))
        scene.cost(Examine())

    compare(build)


def wait_for_parts(scene: Scene) -> None:
    """Let as many groups as the scene is large wait for their second part, all of them too old.

    As many keys have ended so long ago that they may be forgotten.
    """
    prefix, filling = scene.stream._task.store.keys.prefix, Pipeline()
    record = {"of": 2, "least": 2, "bury": False, "kind": "", "have": "10", "count": 1}
    packed = msgpack.packb({**record, "bytes": 4, "whole": False, "ends": 1})
    for number in range(scene.size):
        filling.add("HSET", f"{prefix}part_records", number, packed)
        filling.add("HSET", f"{prefix}part_blobs", f"0 {number}", b"part")
        filling.add("ZADD", f"{prefix}part_due", 1, number)
        filling.add("HSET", f"{prefix}part_ends", f"e{number}", 1)
        filling.add("ZADD", f"{prefix}part_ended", 1, f"e{number}")
    scene.client.exchange(filling)


def test_sessions(compare):
    """Of many open sessions, and of one with many turns."""

    def build(scene):
        scene.stream.advance(7)
        store = SessionStore(scene.stream, timeout_s=600)
        opened = [store.open(f"p{n // 3}", size=3, wait_s=5) for n in range(scene.size)]
        first, second, third = (store.read(each.name) for each in opened[:3])
        for number in range(scene.size // 4):
            store.append(first, turn(number - 1))

        def use():
            store.open("new", size=2, wait_s=5)
            store.append(first, turn())
            store.append(second, turn())
            store.read(opened[0].name)
            store.reward(first.name, 1.0)
            store.reward(second.name, 1.0)
            store.drop(third.name)

        scene.note_each(use)

    compare(build, max_staleness=1, groups_per_version=100_000)
