"""Weights that change in mid-generation: whole, and each token has the version that made it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import redrb
from redrb.algorithms import generate
from redrb.errors import (
    ConfigError,
    DecodeError,
    StoreClosed,
    WeightError,
    WeightMismatch,
    WeightTimeout,
)
from redrb.weights.reading import replica, targets
from tests.published import CHUNK_BYTES, prefix
from tests.scenes import until

pytestmark = pytest.mark.long  # the same requests as test_weights*.py

VOCABULARY = 2000


class Versioned(nn.Module):
    """A model that says the number that all its weights are; it breaks where they differ."""

    def __init__(self, number: int = 0, *, size: int = 500, parts: int = 5) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.empty(size) for _ in range(parts))
        self.register_buffer("kept", torch.empty(3))
        self.become(number)

    def become(self, number: int) -> None:
        with torch.no_grad():
            for tensor in self.state_dict(keep_vars=True).values():
                tensor.fill_(number)

    def number(self) -> int:
        numbers = {n for one in self.state_dict().values() for n in one.unique().tolist()}
        assert len(numbers) == 1, f"the weights are a mixture of {sorted(numbers)}"
        return int(numbers.pop())

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, VOCABULARY)
        logits[..., self.number()] = 50.0
        return logits


@contextmanager
def publishing(publisher: redrb.WeightPublisher, source: Versioned) -> Iterator[Callable[[], set]]:
    """Publish one version after the other in a thread; what is yielded ends it."""
    ended, kinds, failed = threading.Event(), set[str](), []

    def publish() -> None:
        number = 0
        try:
            while not ended.is_set() and number < VOCABULARY - 1:
                number += 1
                source.become(number)
                kinds.add(publisher.publish(source, version=number).kind)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=publish)
    thread.start()

    def end() -> set[str]:
        ended.set()
        thread.join()
        assert not failed
        return kinds

    try:
        yield end
    finally:
        end()


def check_tokens(done: redrb.algorithms.Completions) -> list[int]:
    """Check that each token is the version noted on it; returns the versions in their order."""
    versions = done.token_versions
    tokens = done.sequences[:, -versions.shape[1] :]
    assert torch.equal(tokens[done.action_mask], versions[done.action_mask])
    assert bool((versions[~done.action_mask] == -1).all())
    oldest = done.policy_version()
    assert oldest == [int(row[row >= 0].min()) for row in versions]
    row = versions[0].tolist()
    assert row == sorted(row)
    return row


def test_each_token_is_of_the_version_noted_on_it(publisher, subscriber):
    model, seen = Versioned(), set[int]()
    with publishing(publisher, Versioned()) as end, subscriber.standby(model) as standby:
        assert standby.wait(20) == model.number()
        for _ in range(5):
            done = generate(
                model,
                torch.ones(2, 3, dtype=torch.int64),
                max_new_tokens=60,
                do_sample=False,
                before_token=standby.swap,
            )
            seen |= set(check_tokens(done))
        end()
    assert len(seen) > 3


@pytest.mark.parametrize("host_cache", [False, True])
def test_thousands_of_swaps_are_never_torn(client, namespace, publisher, monkeypatch, host_cache):
    monkeypatch.setattr(CHUNK_BYTES, 4096)
    model, versions, calls = Versioned(size=4000), set[int | None](), 0
    subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace, host_cache=host_cache)
    with publishing(publisher, Versioned(size=4000)) as end, subscriber.standby(model) as standby:
        standby.wait(20)
        began = time.monotonic()
        while calls < 2000 or (len(versions) < 8 and time.monotonic() < began + 20):
            version = standby.swap()
            assert version == standby.version == subscriber.version == model.number()
            versions.add(version)
            calls += 1
        kinds = end()
        until(lambda: standby.swap() == publisher_version(client, namespace))
    assert model.number() == publisher_version(client, namespace)
    assert kinds == {"full", "delta"}
    assert len(versions) >= 8


def publisher_version(client: redrb.Client, namespace: str) -> int:
    newest = redrb.WeightSubscriber(client, "actor", namespace=namespace).latest()
    return newest.version


def test_a_swap_with_nothing_new_costs_nothing(publisher, subscriber):
    with subscriber.standby(Versioned()) as standby:
        assert standby.swap() is None
        publisher.publish(Versioned(1))
        assert standby.wait(10) == 1
        began = time.thread_time()  # of this thread: other processes do not count
        for _ in range(10_000):
            standby.swap()
        assert time.thread_time() - began < 2


def blocked(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Let fetches wait: returns what is set when one began, and what lets it go on."""
    began, go_on = threading.Event(), threading.Event()
    follow = replica.Replica.follow

    def slowly(self, step, transfer) -> None:
        began.set()
        assert go_on.wait(60)
        follow(self, step, transfer)

    monkeypatch.setattr(replica.Replica, "follow", slowly)
    return began, go_on


def test_a_swap_does_not_wait_for_a_fetch_and_gets_it_next(publisher, subscriber, monkeypatch):
    model = Versioned()
    with subscriber.standby(model) as standby:
        publisher.publish(Versioned(1))
        standby.wait(10)
        began, go_on = blocked(monkeypatch)
        publisher.publish(Versioned(2))
        assert began.wait(10)
        assert standby.swap() == 1  # while the fetch is blocked
        assert model.number() == 1
        publisher.publish(Versioned(3))  # is not fetched before the swap that came too early
        began.clear()
        go_on.set()
        until(lambda: standby._prepared.ready)
        time.sleep(0.1)
        assert not began.is_set()
        assert (standby.swap(), model.number()) == (2, 2)
        until(lambda: standby.swap() == 3)
        assert model.number() == 3


def test_a_ready_version_without_a_swap_is_replaced_by_the_next(publisher, subscriber):
    model = Versioned()
    with subscriber.standby(model) as standby:
        for number in (1, 2, 3):
            publisher.publish(Versioned(number))
            until(lambda number=number: standby._prepared.ready == number)
        assert model.number() == 0
        assert (standby.swap(), model.number()) == (3, 3)


def test_the_lock_may_be_held_by_the_caller(publisher, subscriber):
    model = Versioned()
    with subscriber.standby(model) as standby:
        publisher.publish(Versioned(1))
        until(lambda: standby._prepared.ready)
        with subscriber.lock:
            assert standby.swap() == 1


def test_a_swap_waits_for_the_holder_of_the_lock(client, namespace, publisher):
    lock, model = threading.Lock(), Versioned()
    subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace, lock=lock)
    swapped: list[int | None] = []
    with subscriber.standby(model) as standby:
        publisher.publish(Versioned(1))
        until(lambda: standby._prepared.ready)
        thread = threading.Thread(target=lambda: swapped.append(standby.swap()))
        with lock:
            thread.start()
            time.sleep(0.1)
            assert model.number() == 0
            publisher.publish(Versioned(2))  # is fetched nevertheless
            until(lambda: standby._prepared.ready == 2)
        thread.join(10)
        assert swapped == [2]
        publisher.publish(Versioned(3))
        until(lambda: standby._prepared.ready == 3)
        with lock:
            assert standby.swap(locked=True) == 3
        assert not lock.locked()


def test_other_loads_are_refused_until_it_is_closed(publisher, subscriber):
    model = Versioned()
    with pytest.raises(ConfigError):
        subscriber.standby(3)
    with subscriber.standby(model):
        for attempt in (
            lambda: subscriber.poll(model),
            lambda: subscriber.poll(model, in_place=True),
            lambda: subscriber.standby(model),
            lambda: subscriber.prepared_load(model),
        ):
            with pytest.raises(ConfigError, match="standby"):
                attempt()
        publisher.publish(Versioned(1))
        assert subscriber.fetch().keys() == model.state_dict().keys()
    assert subscriber.poll(model).version == 1
    assert model.number() == 1


@pytest.mark.parametrize("ready", [False, True])
def test_it_ends_within_a_second_and_polls_go_on(publisher, subscriber, ready):
    model = Versioned()
    threads = threading.active_count()
    standby = subscriber.standby(model)
    publisher.publish(Versioned(1))
    assert standby.wait(10) == 1
    if ready:
        publisher.publish(Versioned(2))
        until(lambda: standby._prepared.ready)
    time.sleep(0.2)
    began = time.monotonic()
    standby.close()
    standby.close()
    assert time.monotonic() - began < 10
    assert threading.active_count() <= threads  # one of an earlier test may have ended meanwhile
    assert (standby.swap(), model.number()) == (1, 1)
    publisher.publish(Versioned(3), version=3)
    assert subscriber.poll(model).version == 3
    assert model.number() == 3


def test_a_fetch_that_hangs_does_not_hold_up_the_end(publisher, subscriber, monkeypatch):
    model = Versioned()
    standby = subscriber.standby(model)
    began, go_on = blocked(monkeypatch)
    publisher.publish(Versioned(1))
    assert began.wait(10)
    standby.close()
    assert standby._thread.is_alive()  # in the fetch
    go_on.set()
    until(lambda: not standby._thread.is_alive())
    assert standby.swap() is None
    assert subscriber.poll(model).version == 1


def test_waiting_for_the_first_version_ends(subscriber):
    with subscriber.standby(Versioned()) as standby:
        with pytest.raises(WeightTimeout) as caught:
            standby.wait(0.2)
        assert 0.2 <= caught.value.waited_s < 9  # the client's time is ten seconds


def test_a_version_that_does_not_fit_is_raised_once(publisher, subscriber):
    model = Versioned()
    with subscriber.standby(model) as standby:
        publisher.publish(Versioned(1))
        assert standby.wait(10) == 1
        publisher.publish(Versioned(2, parts=4))
        until(lambda: standby._error)
        with pytest.raises(WeightMismatch):
            standby.swap()
        time.sleep(0.7)
        assert (standby.swap(), model.number()) == (1, 1)
        publisher.publish(Versioned(3))
        until(lambda: standby.swap() == 3)
        assert model.number() == 3


def test_a_first_version_that_does_not_fit_is_raised_by_wait(publisher, subscriber):
    with subscriber.standby(Versioned()) as standby:
        publisher.publish(Versioned(1, parts=4))
        with pytest.raises(WeightMismatch):
            standby.wait(10)


def test_damaged_versions_are_raised_once_and_the_next_is_followed(
    client, namespace, publisher, subscriber
):
    model = Versioned()
    with subscriber.standby(model) as standby:
        publisher.publish(Versioned(1))
        assert standby.wait(10) == 1
        key = prefix(namespace) + "versions"
        client.execute("XADD", key, "2-0", "kind", "nonsense")
        until(lambda: standby._error)
        with pytest.raises((DecodeError, WeightError)):
            standby.swap()
        time.sleep(1.2)  # it looks again, and finds the same
        assert standby.swap() == 1
        client.execute("XDEL", key, "2-0")
        publisher.publish(Versioned(3), version=3)
        until(lambda: standby.swap() == 3)
        assert model.number() == 3


def test_a_load_that_breaks_off_is_repeated(publisher, subscriber, monkeypatch):
    model = Versioned()
    with subscriber.standby(model) as standby:
        publisher.publish(Versioned(1))
        assert standby.wait(10) == 1
        publisher.publish(Versioned(2))
        until(lambda: standby._prepared.ready)
        calls: list[int] = []
        load = targets.load_in_place

        def breaking(*arguments):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("no memory")
            load(*arguments)

        monkeypatch.setattr(targets, "load_in_place", breaking)
        with pytest.raises(RuntimeError, match="no memory"):
            standby.swap()
        assert standby.version is None
        assert (standby.swap(), model.number()) == (2, 2)


def test_a_model_that_got_other_tensors_is_looked_up_again(publisher, subscriber):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    with subscriber.standby(model) as standby:
        publisher.publish(model)
        standby.wait(10)
        model["a"] = nn.Linear(2, 2)
        source = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        publisher.publish(source)
        until(lambda: standby.swap() == 2)
        assert torch.equal(model["a"].weight, source["a"].weight)


def test_redis_may_be_away_for_a_while(own_server, caplog):
    server = own_server("--appendonly", "yes", "--appendfsync", "always")
    model = Versioned()
    with redrb.connect(server.url, retry_s=0.3) as client:
        publisher = redrb.WeightPublisher(client, "actor")
        with redrb.WeightSubscriber(client, "actor").standby(model) as standby:
            publisher.publish(Versioned(1))
            assert standby.wait(10) == 1
            server.kill()
            until(lambda: "cannot be followed" in caplog.text)
            time.sleep(1.0)
            assert standby.swap() == 1
            server.start()
            publisher.publish(Versioned(2))
            until(lambda: standby.swap() == 2)
            assert model.number() == 2
            server.kill()
            time.sleep(0.5)
            began = time.monotonic()
        assert time.monotonic() - began < 20
        assert not standby._thread.is_alive()
        assert caplog.text.count("cannot be followed: ") <= 2


def test_versions_that_count_from_1_again_are_followed(client, namespace, publisher, subscriber):
    model = Versioned()
    with subscriber.standby(model) as standby:
        publisher.publish(Versioned(8), version=8)
        assert standby.wait(10) == 8
        publisher.publish(Versioned(9, parts=4), version=9)
        until(lambda: standby._error)
        with pytest.raises(WeightMismatch):
            standby.swap()
        client.execute("DEL", *client.execute("KEYS", prefix(namespace) + "*"))
        publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
        for number in (1, 2):
            publisher.publish(Versioned(number))
            until(lambda number=number: standby.swap() == number)
            assert model.number() == number


def test_adapters_are_merged_between_tokens(publisher, subscriber):
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    base = torch.randn(4, 4)
    config = redrb.weights.LoraConfig(2, 4.0)
    with subscriber.standby(model) as standby:
        publisher.publish({"0.weight": base})
        standby.wait(10)
        for number in (2, 3, 4):
            a, b = torch.randn(2, 4), torch.randn(4, 2)
            publisher.publish_lora(({"0.lora_A": a, "0.lora_B": b}, {"0": config}))
            until(lambda number=number: standby.swap() == number)
            assert torch.allclose(model[0].weight, base + 2.0 * (b @ a), atol=1e-5)


@pytest.mark.parametrize("answers", [[None] * 4, [None, None, 7, 9]])
def test_versions_that_are_not_known_are_not_noted(answers):
    given = iter(answers)
    prompts = torch.ones(1, 2, dtype=torch.int64)
    done = generate(Versioned(5), prompts, max_new_tokens=4, before_token=lambda: next(given))
    if answers[-1] is None:
        assert done.token_versions is None
        assert done.policy_version(3) == 3
        return
    assert done.token_versions.tolist() == [[-1, -1, 7, 9]]
    assert done.policy_version() == [None]


def test_a_standby_over_a_closed_client_says_so_each_time(real_url, namespace, caplog):
    with redrb.connect(real_url) as client:
        redrb.WeightPublisher(client, "actor", namespace=namespace).publish(Versioned(1))
        model = Versioned()
        standby = redrb.WeightSubscriber(client, "actor", namespace=namespace).standby(model)
        assert standby.wait(timeout=20) == 1
    standby._thread.join(10)
    assert not standby._thread.is_alive()
    for _ in range(3):
        with pytest.raises(StoreClosed):
            standby.swap()
    with pytest.raises(StoreClosed):
        standby.wait(timeout=5)
    standby.close()
    assert model.number() == 1
    assert "is away" not in caplog.text


def test_a_standby_for_another_model_loads_all(publisher, subscriber):
    publisher.publish(Versioned(1))
    first, second = Versioned(), Versioned()
    assert subscriber.poll(first) is not None
    with subscriber.standby(second) as standby:
        assert standby.wait(timeout=20) == 1
        assert second.number() == 1
