"""Hostile entries, manifests, chunks and deltas: nothing of them is loaded."""

from __future__ import annotations

import tracemalloc

import msgpack
import numpy as np
import pytest
import torch

import redrb
from redrb.connection import Client
from redrb.errors import ConfigError, DecodeError, WeightCorrupt, WeightError
from redrb.watch.state.reader import StateReader
from redrb.weights.publishing import upload
from redrb.weights.wire.chunks import checksum_of
from tests.published import bits, keys_of, prefix


@pytest.fixture
def keys(client, namespace):
    return lambda: keys_of(client, namespace)


def full_key(namespace, key):
    return prefix(namespace) + key


ENTRY = {
    "kind": "full", "token": 1, "base": 0, "anchor": 7, "nbytes": 64, "stored": 64, "delta": "",
    "names": 1, "created_ms": 1, "full": "1 0 1", "pieces": "",
}  # fmt: skip


def add_entry(client, namespace, version, changes, manifest=None):
    fields = {name: value for name, value in (ENTRY | changes).items() if value is not None}
    flat = [part for field in fields.items() for part in field]
    client.execute("XADD", full_key(namespace, "versions"), f"{version}-0", *flat)
    if manifest is not None:
        client.execute("HSET", full_key(namespace, "manifests"), version, manifest)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": None},
        {"kind": "quantized"},
        {"created_ms": "never"},
        {"created_ms": None},
        {"nbytes": -1},
        {"nbytes": "9" * 17},
        {"stored": None},
        {"delta": "some"},
        {"names": "x"},
        {"base": "x", "kind": "delta"},
    ],
    ids=str,
)
def test_hostile_entries_load_nothing(client, namespace, publisher, subscriber, changes):
    publisher.publish({"a": torch.zeros(1)})
    stored = msgpack.unpackb(client.execute("HGET", full_key(namespace, "manifests"), 1))
    add_entry(client, namespace, 7, changes, msgpack.packb(stored | {"version": 7}))
    live = {"a": torch.ones(1)}
    for call in (subscriber.latest, subscriber.versions, subscriber.wait):
        with pytest.raises(DecodeError):
            call()
    try:
        subscriber.poll(live)
    except (DecodeError, WeightError):
        assert live["a"].all()


def test_an_entry_of_other_fields_is_refused(client, namespace, subscriber):
    client.execute("XADD", full_key(namespace, "versions"), "7-0", "other", "1")
    for call in (subscriber.latest, subscriber.wait):
        with pytest.raises(DecodeError):
            call()
    with pytest.raises((DecodeError, WeightError)):
        subscriber.fetch()


@pytest.mark.parametrize(
    "manifest", [None, b"", b"\xc1", msgpack.packb({"format": 3, "kind": "full", "nbytes": 2**60})]
)
def test_hostile_manifests_load_nothing(client, namespace, subscriber, manifest):
    add_entry(client, namespace, 7, {}, manifest)
    live = {"a": torch.ones(1)}
    for call in (lambda: subscriber.poll(live), subscriber.fetch, subscriber.adapter):
        with pytest.raises(DecodeError):
            call()
    assert live["a"].all()
    assert "pins" not in keys_of(client, namespace)


def test_a_manifest_under_another_number_is_refused(client, namespace, publisher, subscriber):
    publisher.publish({"a": torch.zeros(1)})
    stored = client.execute("HGET", full_key(namespace, "manifests"), 1)
    add_entry(client, namespace, 2, {}, stored)
    with pytest.raises(DecodeError, match="holds version 1"):
        subscriber.fetch()


def test_a_manifest_of_another_kind_is_refused(client, namespace, publisher, subscriber):
    publisher.publish({"a": torch.zeros(1)})
    stored = msgpack.unpackb(client.execute("HGET", full_key(namespace, "manifests"), 1))
    manifest = msgpack.packb(stored | {"version": 2, "kind": "lora", "base": 1, "lora": {}})
    add_entry(client, namespace, 2, {}, manifest)
    with pytest.raises(DecodeError, match="kind 'lora'"):
        subscriber.fetch()


def test_a_checksum_over_fewer_bytes_than_expected_is_refused(
    client, namespace, publisher, subscriber
):
    publisher.publish({"a": torch.zeros(16)})
    stored = msgpack.unpackb(client.execute("HGET", full_key(namespace, "manifests"), 1))
    checksum = checksum_of([np.frombuffer(b"short", np.uint8)])
    stored |= {"version": 2, "checksums": checksum.to_bytes(8, "big"), "sources": [[9, 0, 1]]}
    client.execute("SET", full_key(namespace, "chunk:9:0"), b"short")
    add_entry(client, namespace, 2, {"full": "9 0 1"}, msgpack.packb(stored))
    live = {"a": torch.ones(16)}
    with pytest.raises(WeightCorrupt):
        subscriber.poll(live)
    assert live["a"].all()


def test_a_version_added_behind_the_publishers_back_is_not_overtaken(
    client, namespace, publisher, keys, monkeypatch
):
    def send(*arguments, original=upload.upload, **options):
        original(*arguments, **options)
        add_entry(client, namespace, 5, {"full": ""})

    monkeypatch.setattr(upload, "upload", send)
    with pytest.raises(ConfigError, match="not larger than 5"):
        publisher.publish({"a": torch.zeros(1)})
    assert keys() == ["fence", "versions"]


GARBAGE = {
    "random": np.random.default_rng(0).bytes(300),
    "zeros": bytes(300),
    "our format": b"\1" + bytes(299),
    "frames of gigabytes": b"\1" + b"\xff" * 299,
    "short": b"\1",
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("in_place", [False, True])
def test_a_delta_of_garbage_with_the_right_checksums(
    client, namespace, publisher, subscriber, content, in_place
):
    """Whoever writes to the server may write manifests that fit."""
    state = {"a": torch.arange(4000, dtype=torch.int16)}
    publisher.publish(state)
    target = {"a": torch.zeros(4000, dtype=torch.int16)}
    subscriber.poll(target, in_place=in_place)
    state["a"][:9] += 1
    publisher.publish(state)
    manifests, piece = full_key(namespace, "manifests"), full_key(namespace, "delta:2:0")
    fields = msgpack.unpackb(client.execute("HGET", manifests, 2))
    checksum = checksum_of([np.frombuffer(content, np.uint8)]).to_bytes(8, "big")
    fields["delta"] |= {
        "sizes": len(content).to_bytes(4, "big"),
        "checksums": checksum,
    }
    client.execute("HSET", manifests, 2, msgpack.packb(fields))
    client.execute("SET", piece, content)
    with pytest.raises(WeightError):
        subscriber.poll(target, in_place=in_place)
    if in_place:
        assert subscriber.version is None
    else:
        assert bits(target["a"]) == bits(torch.arange(4000, dtype=torch.int16))


def test_a_value_of_another_type(client, namespace, publisher, subscriber):
    publisher.publish({"a": torch.zeros(9)})
    client.execute("DEL", full_key(namespace, "chunk:1:0"))
    client.execute("RPUSH", full_key(namespace, "chunk:1:0"), "x")
    with pytest.raises(redrb.errors.WeightCorrupt, match="chunk:1:0 has another type"):
        subscriber.fetch()
    client.execute("DEL", full_key(namespace, "manifests"))
    client.execute("SET", full_key(namespace, "manifests"), "x")
    with pytest.raises(redrb.errors.StoreError):
        subscriber.fetch()


def test_keys_of_other_programs_are_not_listed(client: Client, namespace: str) -> None:
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
    publisher.publish({"a": torch.ones(3)})
    for foreign in (b"act\xffor", b"an actor"):
        key = b"redrb:{%b:weights:%b}:versions" % (namespace.encode(), foreign)
        client.execute("XADD", key, "*", "v", 1)
    assert [weights.name for weights in StateReader(client, namespace).look().weights] == ["actor"]


def test_a_short_entry_does_not_take_gigabytes_to_list(client, namespace, publisher):
    publisher.publish({"a": torch.zeros(8)})
    ranges = " ".join(f"{token} 0 1048576" for token in range(90, 94))
    shared = "1 0 1 1 0 1 1 5 0"
    add_entry(client, namespace, 7, {"full": f"{shared} {ranges}", "nbytes": 2**40, "delta": 5})
    tracemalloc.start()
    (listed,) = StateReader(client, namespace).look().weights
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert (listed.versions, listed.version) == (2, 7)
    assert listed.stored_bytes == 64 + 5 + 4 * 2**40
