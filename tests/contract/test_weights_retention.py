"""Kept versions: those of `keep`, those that readers fetch, and no other keys."""

import random
import threading

import pytest
import torch

import redrb
from redrb.errors import WeightError
from redrb.weights.reading import catalogue
from redrb.weights.reading.catalogue import Pin
from tests.published import (
    check_nothing_left,
    keys_of,
    prefix,
    scribble,
    stored_keys,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


def state_of(value):
    """8 chunks; of two values few elements differ."""
    state = {"a": torch.arange(4096, dtype=torch.int16)}
    state["a"][:9] = value
    return state


def numbers(subscriber):
    return [version.version for version in subscriber.versions()]


def publish(publisher, *values):
    for value in values:
        publisher.publish(state_of(value))


@pytest.mark.parametrize(
    ("keep", "stay"), [(1, [5, 6, 7]), (3, [5, 6, 7]), (4, [1, 2, 3, 4, 5, 6, 7])]
)
def test_keep_counts_fetchable_versions_and_their_base_stays(
    make, subscriber, client, namespace, keep, stay
):
    publish(make(keep=keep, anchor_every=4), *range(1, 8))  # 1 and 5 are full
    assert numbers(subscriber) == stay
    for version in stay:
        assert torch.equal(subscriber.fetch(version)["a"], state_of(version)["a"])
    if stay[0] > 1:
        with pytest.raises(WeightError, match="no version 4 of"):
            subscriber.fetch(4)
    check_nothing_left(client, namespace)


@pytest.mark.parametrize(
    ("max_bytes", "stay"),
    [(1, [5]), (8192, [5]), (16384, [4, 5]), (3 * 8192 - 1, [4, 5]), (10**9, [2, 3, 4, 5])],
)
def test_max_bytes_keeps_fewer_but_never_none(make, subscriber, client, namespace, max_bytes, stay):
    publisher = make(keep=4, max_bytes=max_bytes, deltas=False)
    publish(publisher, *range(1, 6))
    assert numbers(subscriber) == stay
    check_nothing_left(client, namespace)


def test_max_bytes_counts_the_base_of_deltas_once(make, subscriber, client, namespace):
    publish(make(keep=9, max_bytes=8192 + 4 * 200, anchor_every=4), *range(1, 9))
    assert numbers(subscriber) == [5, 6, 7, 8]
    check_nothing_left(client, namespace)


class Reader:
    """Fetches in a thread, and stops before the value number `at` until it may go on."""

    def __init__(self, monkeypatch, subscriber, *, at=1):
        self.target = {"a": torch.zeros(4096, dtype=torch.int16)}
        self.stopped, self.go_on = threading.Event(), threading.Event()
        self.found = []
        waited = []

        def fetch(client, values, *, original=catalogue.fetch):
            if threading.current_thread() is not self.thread or len(waited) >= at:
                original(client, values)
                return
            waited.append(1)
            if len(waited) == at:
                self.stopped.set()
                assert self.go_on.wait(20)
            original(client, values)

        monkeypatch.setattr(catalogue, "fetch", fetch)
        self.thread = threading.Thread(
            target=lambda: self.found.append(subscriber.poll(self.target))
        )
        self.thread.start()
        assert self.stopped.wait(20)

    def end(self):
        self.go_on.set()
        self.thread.join(20)
        return self.found[0]


@pytest.mark.parametrize("deltas", [False, True])
def test_versions_that_a_reader_fetches_are_kept(
    make, subscriber, client, namespace, monkeypatch, deltas
):
    publisher = make(keep=1, anchor_every=3, deltas=deltas)
    publish(publisher, *range(1, 6))  # 1 and 4 are full
    reader = Reader(monkeypatch, subscriber, at=2 if deltas else 1)
    publish(publisher, *range(6, 12))
    other = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    pinned = [4, 5] if deltas else [5]
    assert numbers(other) == pinned + [version for version in numbers(other) if version > 9]
    assert reader.end().version == 5
    assert torch.equal(reader.target["a"], state_of(5)["a"])
    assert "pins" not in keys_of(client, namespace)
    publish(publisher, 12)
    assert not set(numbers(other)) & {4, 5}
    check_nothing_left(client, namespace)


def test_a_reader_on_its_way_by_deltas_is_spared(make, subscriber, client, namespace, monkeypatch):
    publisher = make(keep=1, anchor_every=5)
    publish(publisher, 1)
    subscriber.poll(state_of(0))
    publish(publisher, 2, 3, 4)
    reader = Reader(monkeypatch, subscriber)
    publish(publisher, *range(5, 13))  # 6 and 11 are full
    assert reader.end().version == 4
    assert torch.equal(reader.target["a"], state_of(4)["a"])
    publish(publisher, 13)
    assert numbers(subscriber) == [11, 12, 13]
    check_nothing_left(client, namespace)


def test_shared_chunks_of_a_pinned_version_are_spared(
    make, subscriber, client, namespace, monkeypatch
):
    publisher = make(keep=1, deltas=False)
    publish(publisher, 1, 2)  # 2 has 7 chunks of 1
    reader = Reader(monkeypatch, subscriber)
    for seed in range(3):
        torch.manual_seed(seed)
        publisher.publish({"a": torch.randint(0, 99, (4096,), dtype=torch.int16)})
    assert reader.end().version == 2
    assert torch.equal(reader.target["a"], state_of(2)["a"])
    publish(publisher, 3)
    assert len(stored_keys(client, namespace)) == 8
    check_nothing_left(client, namespace)


def test_a_pin_of_a_dead_reader_ends(make, subscriber, client, namespace, monkeypatch):
    publisher = make(keep=1, deltas=False)
    publish(publisher, 1)
    monkeypatch.setattr("redrb.weights.reading.catalogue.PIN_S", 0.2)
    Pin(subscriber._catalogue).route(have=0)
    publish(publisher, 2)
    assert numbers(subscriber) == [1, 2]
    assert not threading.Event().wait(0.25)
    publish(publisher, 3)
    assert numbers(subscriber) == [3]
    check_nothing_left(client, namespace)


def test_versions_without_their_base_are_not_listed(make, subscriber, client, namespace):
    publisher = make(keep=1, anchor_every=100)
    publish(publisher, 1, 2, 3)
    reader = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    Pin(reader._catalogue).route(have=2, wanted=3, used=2)  # the delta from 2 to 3
    fresh = make(keep=1, deltas=False)
    publish(fresh, 4)
    entries = client.execute("XRANGE", prefix(namespace) + "versions", "-", "+")
    assert [entry[0] for entry in entries] == [b"3-0", b"4-0"]
    assert numbers(subscriber) == [4]


@pytest.mark.long
def test_a_long_fetch_renews_its_pin(make, subscriber, client, namespace, monkeypatch):
    publisher = make(keep=1, deltas=False)
    publisher.publish({"a": torch.zeros(20_000)})  # several batches
    monkeypatch.setattr("redrb.weights.reading.catalogue.PIN_S", 0.4)
    slow = []

    def fetch(client, values, *, original=catalogue.fetch):
        original(client, values)
        slow.append(threading.Event().wait(0.12))
        publisher.publish({"a": torch.full((20_000,), float(len(slow)))})

    monkeypatch.setattr(catalogue, "fetch", fetch)
    target = {"a": torch.ones(20_000)}
    assert subscriber.poll(target).version == 1
    assert not target["a"].any()
    assert len(slow) == 5
    publisher.publish({"a": torch.zeros(1)})
    check_nothing_left(client, namespace)


@pytest.mark.parametrize("broken", ["unreadable", "1 2", "", "1 2 x"])
def test_an_unreadable_pin_is_forgotten(make, subscriber, client, namespace, broken):
    publisher = make(keep=1, deltas=False)
    publish(publisher, 1)
    client.execute("HSET", prefix(namespace) + "pins", "someone", broken)
    publish(publisher, 2)
    assert numbers(subscriber) == [2]
    check_nothing_left(client, namespace)


def whole_state(number):
    state = {"number": torch.tensor([number]), "a": torch.arange(3000, dtype=torch.int32)}
    places = range(5, 3000, 61) if number % 7 else range(0, 3000, 2)
    state["a"][list(places)] += number
    return state


@pytest.mark.long
def test_readers_in_threads_have_whole_versions_while_others_are_published(make, client, namespace):
    """One version is kept; what readers are at is never taken from them."""
    done, wrong = threading.Event(), []

    def check(found):
        wanted = whole_state(int(found["number"]))
        if not torch.equal(found["a"], wanted["a"]):
            wrong.append(int(found["number"]))

    def reading(once):
        try:
            while not done.is_set():
                once()
            once()
        except BaseException as error:
            wrong.append(error)
            raise

    def reader(**options):
        own = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        target = whole_state(0)

        def once():
            if own.poll(target, **options) is not None:
                check(target)

        return once

    def fetcher():
        own = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        return lambda: check(own.fetch())

    publisher = make(keep=1, anchor_every=3)
    publisher.publish(whole_state(0))
    onces = [reader(), reader(in_place=True), fetcher()]
    threads = [threading.Thread(target=reading, args=[once]) for once in onces]
    for thread in threads:
        thread.start()
    for number in range(1, 40):
        publisher.publish(whole_state(number))
    done.set()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    publisher.publish(whole_state(0))
    check_nothing_left(client, namespace)


def test_any_mixture_of_kinds_leaves_nothing(make, subscriber, client, namespace):
    dice = random.Random(5)
    publisher = make(keep=2, anchor_every=5, max_bytes=30_000)
    state = {"frozen": torch.randn(700), "a": torch.randn(3000).bfloat16(), "m": torch.zeros(1)}
    lora = ({"m.lora_A": torch.randn(2, 3), "m.lora_B": torch.randn(4, 2)},)
    configs = {"m": redrb.weights.LoraConfig(2, 4.0)}
    for _ in range(60):
        what = dice.random()
        if what < 0.2:
            publisher.publish_lora((lora[0], configs))
        elif what < 0.3:
            state["a"] = torch.randn(dice.choice([3000, 2000])).bfloat16()
            publisher.publish(state)
        elif what < 0.35:
            publisher = make(keep=dice.randint(1, 3), anchor_every=5)
        else:
            scribble(state, dice, ["a"])
            publisher.publish(state)
            fetched = subscriber.fetch()
            assert all(
                torch.equal(fetched[n].view(torch.uint8), t.view(torch.uint8))
                for n, t in state.items()
            )
        check_nothing_left(client, namespace)


def test_versions_of_thousands_of_chunks_are_kept_and_deleted_whole(
    make, subscriber, client, namespace
):
    """More chunks than one request names, of which full versions share some in many places."""
    publisher = make(keep=1, deltas=False)
    values = torch.rand(256 * 2500)
    for step in range(4):
        values[::512] += 1 + step  # every second chunk
        publisher.publish({"a": values})
        assert torch.equal(subscriber.fetch()["a"], values)
        assert len(stored_keys(client, namespace)) == 2500
        check_nothing_left(client, namespace)
