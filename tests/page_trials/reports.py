"""Trials of pages of reports, of saved tasks and of published weights."""

from __future__ import annotations

import torch

import redrb
from redrb.keys import WeightKeys
from redrb.stream.saving.records import SAVED
from redrb.stream.task.calls import Announce
from redrb.watch.groups import Browser, Choice, Follower
from redrb.watch.state.calls import Observe
from redrb.weights.inspection.listing import remove_weights, versions_of
from redrb.weights.wire.calls import FindSteps
from redrb.weights.wire.lora_config import LoraConfig
from tests.page_trials.bench import LONG, Bench, put, train, until
from tests.published import CHUNK_BYTES


def versions_counted(bench: Bench, count: int) -> None:
    """The report has every version, waiting and leased."""
    stream = bench.open(max_staleness=1000)
    stream.join_group()
    for number in range(2 * count):
        put(stream, 1, policy_version=number)
    held = stream.take(count, timeout=0)
    stream.advance(2 * count)
    report = stream.staleness()
    assert (report.waiting.groups, report.leased.groups) == (count, count)
    assert sorted(report.waiting.histogram) == list(range(1, count + 1))
    held.ack()


def browsed(bench: Bench, count: int) -> None:
    """Every group is found, by state and by query, once."""
    stream = bench.open(tags=["kind"])
    stream.join_group()
    put(stream, 2 * count, tags={"kind": 1})
    held = stream.take(count, timeout=0)
    browser = Browser(bench.client, "math", namespace=bench.namespace)

    def ids(**choice: object) -> list[int]:
        return sorted(view.id for view in browser.look(Choice(count=100, **choice)).groups)  # type: ignore[arg-type]

    whole = list(range(1, 2 * count + 1))
    assert ids() == whole
    assert ids(where={"kind": 1}) == whole
    assert ids(status="leased") == whole[:count]
    assert ids(status="completed") == whole[count:]
    assert ids(ids=tuple(whole[:3])) == whole[:3]
    held.reject("bad")
    assert ids(status="dead") == whole[:count]


def followed(bench: Bench, count: int) -> None:
    """Groups that arrive are shown in order; the oldest of a burst are counted."""
    stream = bench.filled(0)
    follower = Follower(bench.client, "math", namespace=bench.namespace)
    put(stream, count)
    shown: list[int] = []
    notes: list[str] = []

    def is_over() -> bool:
        page = follower.next(0.5)
        shown.extend(view.id for view in page.groups)
        notes.extend(page.notes)
        return count in shown

    until(is_over)
    assert shown == list(range(count - len(shown) + 1, count + 1))
    skipped = sum(int(note.split()[0].replace(",", "")) for note in notes)
    assert len(shown) + skipped == count


def consumer_groups_observed(bench: Bench, count: int) -> None:
    """A page of consumer groups is reported, each with its own figures."""
    stream = bench.filled(2)
    for number in range(count - 1):
        bench.open(group=f"g{number}").join_group()
    reported = bench.run(Observe("", "-inf")).groups
    assert len(reported) == min(count, 3)
    assert stream.group in {each.name for each in reported}
    for each in reported:
        assert each.figures["waiting"] == 2


def groups_observed(bench: Bench, count: int) -> None:
    """The number of groups is exact, and the staleness is that of a sample."""
    stream = bench.filled(2 * count)
    stream.advance(1)
    held = stream.take(count, timeout=0)
    [group] = bench.run(Observe("", "-inf")).groups
    for counts in (group.waiting, group.leased):
        assert counts.groups == count
        assert counts.read == min(count, 3)
    held.ack()


def workers_observed(bench: Bench, count: int) -> None:
    """The number of workers is exact, and a page of them is reported."""
    stream = bench.filled(0)
    announcement = stream._consumer.worker.announcement()
    for number in range(count):
        bench.run(Announce(f"w{number}", ended=False), announcement)
    found = bench.run(Observe("", "-inf"))
    assert (found.workers_total, len(found.workers)) == (count, min(count, 3))


def changes_remembered(bench: Bench, count: int) -> None:
    """The newest changes of settings are remembered: a page of them."""
    stream = bench.filled(0)
    before = len(stream.settings().changes)
    for number in range(count):
        stream.configure(limit=100 + number)
    changes = stream.settings().changes
    assert len(changes) == min(before + count, 3)
    assert changes[0].new == f"{99 + count}"


def read_by_id(bench: Bench, count: int) -> None:
    """Groups are read by id, in the order of the ids."""
    stream = bench.filled(2 * count)
    ids = list(range(2 * count, 0, -1))
    assert [group and group.id for group in stream.read(ids)] == ids


def saved_and_resumed(bench: Bench, count: int) -> None:
    """A task is saved with all its groups, letters and sources, and resumed whole."""
    stream = bench.filled(2 * count)
    stream.take(count, timeout=0).reject("bad")
    for number in range(count):
        origin = f"o{number}:{LONG}"
        bench.client.execute("HSET", bench.key("sources"), origin, "f00 0 0 ")
        bench.client.execute("HSET", bench.key("sources", origin), 7, f"1 {'0' * 16}")
    path = bench.folder / f"{count}.redrb"
    stream.save(path)
    with bench.task("resumed") as other:
        other.resume(path)
        assert sorted(letter.id for letter in other.dead_letters()) == list(range(1, count + 1))
        prefix = f"{other._task.store.keys.prefix}sources"
        origins = {name.decode() for name in bench.client.execute("HKEYS", prefix)} - {SAVED}
        assert origins == {f"o{number}:{LONG}" for number in range(count)}
        for origin in origins:
            known = bench.client.execute("HGETALL", f"{prefix}:{origin}")
            assert known == [b"7", b"0 " + b"0" * 16]
        train(other, list(range(count, 2 * count)))


def found_letters(bench: Bench, count: int) -> None:
    """Every dead letter is found by its text."""
    from redrb.stream.task.dead_letters import find_letters

    stream = bench.filled(count)
    stream.take(count, timeout=0).reject("bad")
    found = find_letters(stream._store, text="bad")
    assert [letter.id for letter in found] == list(range(count, 0, -1))


def versions_trimmed(bench: Bench, count: int) -> None:
    """Versions that leave the window go at once, but those that a kept one stands on."""
    name = f"trimmed-{count}"
    state = {"a": torch.zeros(4000)}
    options = {"namespace": bench.namespace, "anchor_every": 2 * count + 2}
    with redrb.WeightPublisher(bench.client, name, keep=count + 3, **options) as publisher:
        for _ in range(count + 2):
            state["a"][0] += 1
            publisher.publish(state)  # one full version, and deltas that stand on it
    matrices = {"0.lora_A": torch.ones(2, 4), "0.lora_B": torch.ones(4, 2)}
    adapter = (matrices, {"0": LoraConfig(2, 2.0)})
    with redrb.WeightPublisher(bench.client, name, keep=1, **options) as publisher:
        publisher.publish(state)
        assert _kept(bench, name) == [count + 3]
        for _ in range(count):
            publisher.publish_lora(adapter)
            assert _kept(bench, name) == [count + 3, _newest(bench, name)]
    with redrb.WeightPublisher(bench.client, name, keep=count + 5, **options) as publisher:
        for _ in range(count):
            publisher.publish_lora(adapter)
        first = _kept(bench, name)[1]
        assert _kept(bench, name)[1:] == list(range(first, first + count + 1))
    with redrb.WeightPublisher(bench.client, name, keep=2, **options) as publisher:
        publisher.publish_lora(adapter)
        newest = _newest(bench, name)
        assert _kept(bench, name) == [count + 3, newest - 1, newest]
        publisher.publish(state)
        publisher.publish(state)
        assert _kept(bench, name) == [newest + 1, newest + 2]
        keys = WeightKeys.of(bench.namespace, name)
        assert bench.client.execute("HLEN", keys.manifests) == 2
        assert bench.client.execute("EXISTS", keys.trash) == 0


def versions_removed(bench: Bench, count: int) -> None:
    """All versions are removed, with all keys but one."""
    name = f"removed-{count}"
    with redrb.WeightPublisher(
        bench.client, name, namespace=bench.namespace, keep=count
    ) as weights:
        for _ in range(count):
            weights.publish({"a": torch.rand(8)})
    removed = remove_weights(bench.client, name, namespace=bench.namespace)
    assert removed.versions == tuple(range(1, count + 1))
    prefix = WeightKeys.of(bench.namespace, name).prefix
    assert bench.client.execute("KEYS", f"{prefix}*") == [f"{prefix}fence".encode()]


def _kept(bench: Bench, name: str) -> list[int]:
    found = versions_of(bench.client, name, bench.namespace)
    return [version.version for version in found]


def _newest(bench: Bench, name: str) -> int:
    return _kept(bench, name)[-1]


def _add_version(bench: Bench, keys: WeightKeys, version: int, kind: str) -> None:
    fields = {"kind": kind, "token": 1, "base": 0, "anchor": 1, "created_ms": 1}
    flat = [word for field in fields.items() for word in field]
    bench.client.execute("XADD", keys.versions, f"{version}-0", *flat)


def pins_removed(bench: Bench, count: int) -> None:
    """Pins of readers that died go, by the pins of living readers."""
    keys = WeightKeys.of(bench.namespace, f"pinned-{count}")
    _add_version(bench, keys, 1, "full")
    for number in range(count):
        bench.client.execute("HSET", f"{keys.prefix}pins", f"r{number}", "1 1 1 1")

    def is_over() -> bool:
        find = FindSteps("living", 0, 0, 0, 0, 60_000)
        assert find.run(bench.client, [keys.versions])
        return bool(bench.client.execute("HLEN", f"{keys.prefix}pins") == 1)

    until(is_over)


def chunks_published(bench: Bench, count: int) -> None:
    """Versions of so many chunks are published, read and deleted whole."""
    bench.patch.setattr(CHUNK_BYTES, 1024)
    name = f"chunks-{count}"
    with redrb.WeightPublisher(bench.client, name, namespace=bench.namespace, keep=1) as publisher:
        publisher.publish({"a": torch.rand(256 * count)})
        prefix = WeightKeys.of(bench.namespace, name).prefix
        assert len(bench.client.execute("KEYS", f"{prefix}chunk:*")) == count
        publisher.publish({"a": torch.rand(256 * count)})
        assert len(bench.client.execute("KEYS", f"{prefix}chunk:*")) == count
