"""Versions that are damaged in Redis: readers ask for a full one, and go on with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgpack
import pytest
import torch
from torch import nn

import redrb
from redrb.connection import Client
from redrb.connection.stop import Stop
from redrb.errors import DecodeError, WeightCorrupt, WeightError
from redrb.train.broadcast import Broadcast
from redrb.train.following import MakerWeights
from redrb.watch.state.findings import findings_of
from redrb.watch.state.reader import StateReader
from tests.published import check_nothing_left, keys_of, prefix, same_bits, weights, zeros

pytestmark = pytest.mark.usefixtures("small_chunks")

KEPT = 4


class Damage:
    """Damages a key of the weights, in one of the ways in which it may be damaged."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client, self.prefix = client, prefix(namespace)

    def value(self, key: str, how: str) -> str:
        key = self.prefix + key
        stored = self.client.execute("GET", key)
        assert stored
        if how in ("gone", "of another type"):
            self.client.execute("DEL", key)
        if how == "of another type":
            self.client.execute("LPUSH", key, "a")
        elif how != "gone":
            new = stored[:-1] + (b"" if how == "cut" else bytes([stored[-1] ^ 1]))
            self.client.execute("SET", key, new)
        return key

    def manifest(self, version: int, how: str) -> str:
        key = self.prefix + "manifests"
        stored = self.client.execute("HGET", key, version)
        if how == "gone":
            self.client.execute("HDEL", key, version)
        else:
            self.client.execute("HSET", key, version, stored[:-3] if how == "cut" else b"\xc1")
        return key

    def entry(self, version: int) -> str:
        key = self.prefix + "versions"
        assert self.client.execute("XDEL", key, f"{version}-0") == 1
        return key


@pytest.fixture
def damage(client: Client, namespace: str) -> Damage:
    return Damage(client, namespace)


WAYS: dict[str, tuple[int, Callable[[Damage], str]]] = {
    f"{kind} {how}": (version, way)
    for how in ("flipped", "cut", "gone")
    for kind, version, way in (
        ("delta", 3, lambda damage, how=how: damage.value("delta:3:0", how)),
        ("newest delta", 4, lambda damage, how=how: damage.value("delta:4:0", how)),
        ("anchor's chunk", 1, lambda damage, how=how: damage.value("chunk:1:2", how)),
        ("manifest", 3, lambda damage, how=how: damage.manifest(3, how)),
        ("anchor's manifest", 1, lambda damage, how=how: damage.manifest(1, how)),
    )
}
WAYS["delta of another type"] = (3, lambda damage: damage.value("delta:3:0", "of another type"))
WAYS["chunk of another type"] = (1, lambda damage: damage.value("chunk:1:2", "of another type"))
WAYS["anchor's entry"] = (1, lambda damage: damage.entry(1))
WAYS["delta's entry"] = (3, lambda damage: damage.entry(3))
"""The damaged version of four, of which the first is full; and what returns the damaged key."""

READERS: dict[str, Callable[[redrb.WeightSubscriber, dict[str, torch.Tensor]], object]] = {
    "poll": lambda subscriber, target: subscriber.poll(target),
    "in place": lambda subscriber, target: subscriber.poll(target, in_place=True),
    "fetch": lambda subscriber, _: subscriber.fetch(),
    "host cache": lambda subscriber, target: subscriber.poll(target),
}


def findings(client: Client, namespace: str) -> list[str]:
    found = findings_of(StateReader(client, namespace).look())
    return [each.summary for each in found if each.code == "damaged-weights"]


def test_an_old_version_that_is_damaged_asks_for_nothing(
    client: Client, namespace: str, damage: Damage
) -> None:
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, keep=9, anchor_every=2)
    kinds = [publisher.publish(weights(version)).kind for version in range(6)]
    assert "full" in kinds[2:]
    damage.value("delta:2:0", "flipped")
    with pytest.raises(WeightCorrupt, match=r"no way around it: .* A later version can be loaded"):
        redrb.WeightSubscriber(client, "actor", namespace=namespace).fetch(2)
    assert findings(client, namespace) == []
    assert publisher.republish() is None


PAIRS = [
    (way, reader) for i, way in enumerate(WAYS) for k, reader in enumerate(READERS) if i + k & 1
]
"""Each reader meets each damaged thing and each damage, but not each of both together."""


@pytest.mark.long
@pytest.mark.parametrize(("way", "reader"), PAIRS)
@pytest.mark.parametrize("joins", [True, False])
def test_the_version_after_damage_is_full(
    client: Client, namespace: str, damage: Damage, way: str, reader: str, joins: bool
) -> None:
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, keep=KEPT)
    subscriber = redrb.WeightSubscriber(
        client, "actor", namespace=namespace, host_cache=reader == "host cache"
    )
    for version in range(1, 3):
        publisher.publish(weights(version))
    target = zeros()
    if not joins:
        READERS[reader](subscriber, target)
    for version in range(3, 5):
        assert publisher.publish(weights(version)).kind == "delta"
    number, harm = WAYS[way]
    key = harm(damage)
    if number == 1 and not joins and reader != "fetch":  # it has the version that others lack
        assert READERS[reader](subscriber, target) is not None
        assert findings(client, namespace) == []
        return
    with pytest.raises((WeightError, DecodeError)) as caught:
        READERS[reader](subscriber, target)
    assert "The publisher's next version is a full one" in str(caught.value)
    assert key in str(caught.value)
    if isinstance(caught.value, WeightCorrupt):
        assert (caught.value.version, caught.value.key) == (number, key)
    assert findings(client, namespace) == [f"A reader found version {number} damaged, in {key}."]
    for version, kind in ((5, "full"), (6, "delta")):
        assert publisher.publish(weights(version)).kind == kind
        assert findings(client, namespace) == []
        assert READERS[reader](subscriber, target) is not None
        other = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        assert same_bits(other.fetch(), weights(version))
        if reader != "fetch":
            assert same_bits(target, weights(version))
    for version in range(7, 8 + KEPT):
        publisher.publish(weights(version))
    if "entry" not in way:  # which names the keys of its version
        check_nothing_left(client, namespace)


def test_a_way_around_the_damage_asks_for_nothing(
    client: Client, namespace: str, damage: Damage
) -> None:
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, anchor_every=2)
    subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    target = zeros()
    for version in (1, 2):
        publisher.publish(weights(version))
        subscriber.poll(target)
    assert publisher.publish(weights(3)).kind == "full"
    damage.value("delta:3:0", "flipped")
    assert subscriber.poll(target).version == 3
    assert "asked" not in keys_of(client, namespace)


def test_one_who_finds_damage_after_a_full_version_came_asks_for_nothing(
    client: Client, namespace: str, damage: Damage
) -> None:
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, keep=9)
    publisher.publish(weights(1))
    publisher.publish(weights(2))
    damage.value("delta:2:0", "flipped")
    publisher._baseline.forget()
    assert publisher.publish(weights(3)).kind == "full"
    with pytest.raises(WeightCorrupt):
        redrb.WeightSubscriber(client, "actor", namespace=namespace).fetch(2)
    assert "asked" not in keys_of(client, namespace)
    assert publisher.publish(weights(4)).kind == "delta"


@pytest.mark.parametrize("deltas", [True, False])
def test_the_base_of_an_adapter_is_published_again(
    client: Client, namespace: str, damage: Damage, deltas: bool
) -> None:
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, deltas=deltas)
    model = nn.Linear(30, 30, bias=False)
    adapter = {"layer.lora_A": torch.ones(1, 30), "layer.lora_B": torch.ones(30, 1)}
    config = {"layer": redrb.weights.LoraConfig(r=1, lora_alpha=1)}
    publisher.publish({"layer.weight": model.weight})
    publisher.publish_lora((adapter, config))
    damage.value("chunk:1:0", "flipped")

    def load() -> nn.Module:
        whole = nn.ModuleDict({"layer": nn.Linear(30, 30, bias=False)})
        redrb.WeightSubscriber(client, "actor", namespace=namespace).poll(whole)
        return whole

    with pytest.raises(WeightCorrupt):
        load()
    assert publisher.publish_lora((adapter, config)).version == (4 if deltas else 3)
    if not deltas:  # nobody has the base: the state must be published
        publisher.publish({"layer.weight": model.weight})
        publisher.publish_lora((adapter, config))
    assert torch.equal(load()["layer"].weight, model.weight + 1)
    assert findings(client, namespace) == []


def test_a_damaged_adapter_ends_with_the_next(
    client: Client, namespace: str, damage: Damage
) -> None:
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
    adapter = {"layer.lora_A": torch.ones(1, 30), "layer.lora_B": torch.ones(30, 1)}
    config = {"layer": redrb.weights.LoraConfig(r=1, lora_alpha=1)}
    subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    publisher.publish_lora((adapter, config))
    key = damage.value("chunk:1:0", "gone")
    with pytest.raises(WeightCorrupt):
        subscriber.fetch()
    assert findings(client, namespace) == [f"A reader found version 1 damaged, in {key}."]
    assert publisher.publish_lora((adapter, config)).version == 2
    assert findings(client, namespace) == []
    assert same_bits(subscriber.fetch(), adapter)


def test_a_standby_fetches_a_damaged_version_once(
    client: Client, namespace: str, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
    publisher.publish(weights(1))
    damage.value("chunk:1:0", "flipped")
    target = zeros()
    subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    found: list[int] = []
    fetch = subscriber._loader.fetch
    monkeypatch.setattr(
        subscriber._loader, "fetch", lambda chosen: (found.append(1), fetch(chosen))[1]
    )
    with subscriber.standby(target) as standby:
        with pytest.raises(WeightCorrupt):
            standby.wait(20)
        with pytest.raises(redrb.errors.WeightTimeout):
            standby.wait(1.5)
        assert len(found) == 1
        publisher.publish(weights(2))
        assert standby.wait(20) == 2
    assert same_bits(target, weights(2))


@pytest.fixture
def job(client: Client, namespace: str) -> Iterator[Callable[..., tuple[Broadcast, Any]]]:
    """A trainer's and a maker's side of the same weights."""
    with ExitStack() as scope:

        def begin(**options: Any) -> tuple[Broadcast, MakerWeights]:
            trainer = scope.enter_context(Broadcast(client, namespace, "actor", ["m"]))
            maker = MakerWeights(
                client, namespace, "m", {"actor": model(0)}, Stop(0.0), follow="actor", **options
            )
            return trainer, maker

        yield begin


def model(value: int) -> nn.Module:
    module = nn.Linear(40, 40)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
        module.bias[:3] = value
    return module


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("joins", [False, True])
def test_a_trainer_that_waits_publishes_at_once_what_its_makers_cannot_load(
    job: Any, client: Client, damage: Damage, in_flight: bool, joins: bool
) -> None:
    """With a small bound of staleness each would wait for the other."""
    trainer, maker = job(in_flight=in_flight, first_timeout=20)
    trainer.push({"actor": model(1)}, fully=False)
    if not joins:
        assert maker.wait_until_initialised()
    trainer.push({"actor": model(2)}, fully=False)
    damage.value("delta:2:0", "flipped")
    with maker.prefetching():
        if joins:
            assert maker.wait_until_initialised()
        over = threading.Event()
        for _ in range(200):
            maker.refresh()
            version, _ = maker.begin_batch()
            if version == 3:
                break
            over.wait(0.1)
    assert version == trainer.version == 3
    assert maker.models.models["actor"].bias[0] == 2
    trainer.push({"actor": model(3)}, fully=False)
    assert trainer.published[-1].kind == "delta"
    trainer.close()


def test_damage_that_comes_back_is_published_once_for_each_publish(
    client: Client, namespace: str, damage: Damage
) -> None:
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
    subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    assert publisher.republish() is None
    for first in (1, 3, 5):
        assert publisher.publish(weights(first)).version == first
        assert publisher.republish() is None
        for token in (first, first + 1):
            damage.value(f"chunk:{token}:0", "flipped")
            with pytest.raises(WeightCorrupt):
                subscriber.fetch()
            again = publisher.republish()
            if token == first:
                assert again is not None
                assert (again.version, again.kind) == (first + 1, "full")
            else:
                assert again is None
    publisher.publish(weights(9), version=70)
    damage.value("chunk:7:0", "flipped")
    with pytest.raises(WeightCorrupt):
        subscriber.fetch()
    assert publisher.republish() is None  # the caller counts versions itself
    assert publisher.publish(weights(9), version=71).kind == "full"


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_that_takes_over_damaged_weights_starts_over(
    client: Client, namespace: str, damage: Damage, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Broadcast(client, namespace, "actor", []) as first:
        for version in range(1, 5):
            first.push({"actor": model(version)}, fully=False)
    WAYS[way][1](damage)
    with Broadcast(client, namespace, "actor", []) as second:
        own = model(77)
        before = [parameter.clone() for parameter in own.parameters()]
        assert second.take_over({"actor": own}) == 0
        assert "starts over" in caplog.text
        assert all(map(torch.equal, before, own.parameters()))
        assert second.push({"actor": own}, fully=False) == 5
    fetched = redrb.WeightSubscriber(client, "actor", namespace=namespace).fetch()
    assert fetched["actor.bias"][0] == 77
    assert "asked" not in keys_of(client, namespace)


def test_manifests_of_another_format_are_no_reason_to_load_something(
    client: Client, namespace: str, publisher: redrb.WeightPublisher
) -> None:
    publisher.publish(weights(1))
    key = prefix(namespace) + "manifests"
    stored = msgpack.unpackb(client.execute("HGET", key, 1))
    client.execute("HSET", key, 1, msgpack.packb(stored | {"format": 4}))
    with pytest.raises(DecodeError, match="another version of redrb"):
        redrb.WeightSubscriber(client, "actor", namespace=namespace).fetch()
