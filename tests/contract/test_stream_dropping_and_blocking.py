"""Puts that evict groups (`drop_oldest`) beside puts that wait for room (`block`)."""

from __future__ import annotations

import pytest

from redrb import ExperienceStream, StoreFull
from redrb.lua.calls import Found
from redrb.stream.put.calls import AskRoom, Evict
from tests.audit import audit
from tests.samples import numbered
from tests.scenes import FOREVER_MS, Scene, groups_of


@pytest.fixture
def scene(client, namespace, no_heartbeats):
    scene = Scene(client, namespace, 0, {})
    yield scene
    audit(scene.stream)
    assert scene.stream.stats().ledger.balanced
    scene.stream.close()


def block(scene: Scene, *producers: int) -> list[int]:
    """Let producers ask for room for one group; returns the room that each gets."""
    replies = [scene.run(AskRoom(f"p{number}", FOREVER_MS, [100])) for number in producers]
    return [reply.granted for reply in replies]


def evicted(stream: ExperienceStream) -> int:
    return stream.stats().ledger.evicted


@pytest.mark.parametrize("blocked", [1, 300])
@pytest.mark.parametrize("count", [1, 3])
def test_a_put_evicts_its_own_room(scene, blocked, count):
    with scene.open(limit=4, on_full="drop_oldest") as stream:
        stream.put(groups_of(4))
        block(scene, *range(blocked))
        for turn in range(1, 4):
            stream.put(groups_of(count))
            assert (evicted(stream), stream.stats().stored) == (turn * count, 4)
            assert stream.stats().producers_waiting == blocked


def test_free_room_is_left_to_the_puts_that_wait_for_it(scene):
    with scene.open(limit=6, on_full="drop_oldest") as stream:
        stream.put(groups_of(6))
        block(scene, 0, 1, 2)
        stream.take(2, timeout=0).ack()
        stream.put(numbered(6))
        assert evicted(stream) == 1
        assert block(scene, 0, 1, 2) == [1, 1, 0]


def test_room_that_nobody_waits_for_is_used_first(scene):
    with scene.open(limit=6, on_full="drop_oldest") as stream:
        stream.put(groups_of(6))
        block(scene, 0, 1)
        stream.take(3, timeout=0).ack()
        stream.put(groups_of(2))
        assert evicted(stream) == 1
        assert block(scene, 0, 1) == [1, 1]


@pytest.mark.parametrize("blocked", [0, 1, 30])
def test_room_made_by_several_calls_adds_up(scene, blocked):
    """Each call stops at fifty leased groups, before it has evicted enough."""
    with scene.open(limit=120, on_full="drop_oldest") as stream:
        ids = stream.put(groups_of(120))
        lease = stream.take(120, timeout=0)
        lease.release([ids[55], *ids[111:]])
        block(scene, *range(blocked))
        stream.put(groups_of(3))
        assert (evicted(stream), stream.stats().stored) == (3, 120)
        assert stream.stats().producers_waiting == blocked
        lease.release()


def test_a_put_ends_where_a_limit_was_lowered_and_all_groups_are_leased(scene):
    with scene.open(limit=120, on_full="drop_oldest") as stream:
        stream.put(groups_of(120))
        lease = stream.take(120, timeout=0)
        stream.configure(limit=10)
        with pytest.raises(StoreFull):
            stream.put(numbered(1), timeout=5)
        assert (evicted(stream), stream.stats().stored) == (0, 120)
        lease.release()


def test_a_put_that_fails_keeps_no_room(scene):
    with scene.open(limit=60, on_full="drop_oldest") as stream:
        ids = stream.put(groups_of(60))
        lease = stream.take(60, timeout=0)
        lease.release([ids[55]])
        block(scene, 0, 1)
        with pytest.raises(StoreFull):
            stream.put(groups_of(3))
        assert stream.stats().producers_waiting == 2
        assert block(scene, 0, 1) == [1, 0]
        lease.release()


def test_two_puts_that_evict_keep_their_room_apart(scene):
    with scene.open(limit=4) as stream:
        stream.put(groups_of(4))
        block(scene, 0)
        for name in ("a", "b"):  # each makes room, before either puts
            assert scene.run(Evict(name, 1, 0, 2, 100, 0, 100)) == Found(found=2)
        assert block(scene, 0) == [0]
        assert scene.run(Evict("a", 1, 0, 2, 100, 0, 100)) == Found(found=0)
        assert evicted(stream) == 4
        for name in ("a", "b"):
            scene.run(AskRoom(name, 0))
        assert block(scene, 0) == [1]
