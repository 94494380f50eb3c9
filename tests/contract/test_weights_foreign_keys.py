"""Keys of weights that another program has written: publishers and readers name them."""

from __future__ import annotations

import pytest
import torch

import redrb
from redrb.connection import Client
from redrb.errors import StoreError
from redrb.keys import WeightKeys
from redrb.weights.inspection.removal import remove_weights

KEYS = ["versions", "manifests", "fence", "pins", "attempts", "loads", "fulls", "trash"]


def publisher(client: Client, namespace: str) -> redrb.WeightPublisher:
    return redrb.WeightPublisher(client, "policy", namespace=namespace, keep=1, deltas=False)


def state(value: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((8,), float(value))}


def key_of(namespace: str, name: str) -> str:
    return f"{WeightKeys.of(namespace, 'policy').prefix}{name}"


@pytest.mark.parametrize(
    ("name", "published"),
    [(name, count) for name in KEYS for count in (0, 2) if (name, count) != ("fulls", 0)],
)  # the first version removes `fulls`
def test_a_key_of_another_type_is_named(
    client: Client, namespace: str, name: str, published: int
) -> None:
    for value in range(published):
        publisher(client, namespace).publish(state(value))
    key = key_of(namespace, name)
    client.execute("DEL", key)
    client.execute("SET", key, "x")
    with pytest.raises(StoreError) as caught:
        for value in (7, 8):  # the second one finds something to delete
            publisher(client, namespace).publish(state(value))
    assert f"{key} holds a string" in str(caught.value)
    assert f"redis-cli DEL '{key}'" in str(caught.value)
    client.execute("DEL", key)
    last = publisher(client, namespace).publish(state(9))
    reader = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    assert torch.equal(reader.fetch()["a"], state(9)["a"])
    assert reader.versions()[-1].version == last.version
    remove_weights(client, "policy", namespace=namespace)
    left = client.execute("KEYS", f"{WeightKeys.of(namespace, 'policy').prefix}*")
    assert left == [key_of(namespace, "fence").encode()]


@pytest.mark.parametrize("name", ["versions", "pins"])
def test_a_reader_names_a_key_of_another_type(client: Client, namespace: str, name: str) -> None:
    publisher(client, namespace).publish(state(1))
    key = key_of(namespace, name)
    client.execute("DEL", key)
    client.execute("SET", key, "x")
    reader = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    with pytest.raises(StoreError) as caught:
        reader.poll(state(0))
    assert f"{key} holds a string" in str(caught.value)


@pytest.mark.parametrize("token", ["nan", "1.5", "0x10", "x", "", "-3", str(2**63 - 1), "9" * 40])
def test_a_token_that_is_no_number_is_replaced(client: Client, namespace: str, token: str) -> None:
    writer = publisher(client, namespace)
    writer.publish(state(1))
    client.execute("HSET", key_of(namespace, "fence"), "token", token)
    assert publisher(client, namespace).publish(state(2)).version == 2
    reader = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    assert torch.equal(reader.fetch()["a"], state(2)["a"])


@pytest.mark.parametrize("number", [2**53, 2**63, 2**64 - 1])
def test_an_entry_whose_number_no_version_may_have_is_named(
    client: Client, namespace: str, number: int
) -> None:
    writer = publisher(client, namespace)
    writer.publish(state(1))
    key = key_of(namespace, "versions")
    client.execute("XADD", key, f"{number}-0", "x", "y")
    with pytest.raises(StoreError) as caught:
        writer.publish(state(2))
    assert f"redis-cli XDEL '{key}' {number}-0" in str(caught.value)
    client.execute("XDEL", key, f"{number}-0")
    if client.execute("XINFO", "STREAM", key):  # Redis gives no smaller ids after a deleted one
        client.execute("DEL", key)
    assert publisher(client, namespace).publish(state(3)).version >= 1
