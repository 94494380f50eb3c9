"""Keys of weights that another program has written: publishers and readers name them."""

from __future__ import annotations

import pytest
import torch

import redrb
from redrb.connection import Client
from redrb.errors import StoreError, StoreUnavailable
from redrb.keys import WeightKeys
from redrb.weights.inspection.listing import remove_weights
from redrb.weights.publishing import committer
from redrb.weights.wire import stored_keys
from redrb.weights.wire.calls import Trim

KEYS = ["versions", "manifests", "fence", "pins", "attempts", "loads", "fulls", "trash"]


def publisher(client: Client, namespace: str) -> redrb.WeightPublisher:
    return redrb.WeightPublisher(client, "policy", namespace=namespace, keep=1, deltas=False)


def state(value: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((8,), float(value))}


def key_of(namespace: str, name: str) -> str:
    return f"{WeightKeys.of(namespace, 'policy').prefix}{name}"


@pytest.mark.every_server
@pytest.mark.parametrize(
    ("name", "published"),
    [(name, count) for name in KEYS for count in (0, 2) if (name, count) != ("fulls", 0)],
)  # the first version removes `fulls`
def test_a_key_of_another_type_is_named(client, namespace, name, published):
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


@pytest.mark.every_server
@pytest.mark.parametrize("name", ["versions", "pins"])
def test_a_reader_names_a_key_of_another_type(client, namespace, name):
    publisher(client, namespace).publish(state(1))
    key = key_of(namespace, name)
    client.execute("DEL", key)
    client.execute("SET", key, "x")
    reader = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    with pytest.raises(StoreError) as caught:
        reader.poll(state(0))
    assert f"{key} holds a string" in str(caught.value)


@pytest.mark.parametrize("token", ["nan", "1.5", "0x10", "x", "", "-3", str(2**63 - 1), "9" * 40])
def test_a_token_that_is_no_number_is_replaced(client, namespace, token):
    writer = publisher(client, namespace)
    writer.publish(state(1))
    client.execute("HSET", key_of(namespace, "fence"), "token", token)
    assert publisher(client, namespace).publish(state(2)).version == 2
    reader = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    assert torch.equal(reader.fetch()["a"], state(2)["a"])


@pytest.mark.every_server
@pytest.mark.parametrize("number", [2**53, 2**63, 2**64 - 1])
def test_an_entry_whose_number_no_version_may_have_is_named(client, namespace, number):
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


@pytest.mark.parametrize("count", [3, 10])
def test_entries_of_another_program_between_versions_end_with_these(
    client, namespace, pages, count
):
    """They are no versions, and are deleted as the versions before them."""
    pages(versions=3)
    writer = publisher(client, namespace)
    writer.publish(state(1))
    key = key_of(namespace, "versions")
    for number in range(1, count + 1):
        client.execute("XADD", key, f"1-{number}", "x", "y")
    for value in (2, 3):
        writer.publish(state(value))
    assert client.execute("XRANGE", key, "-", "+")[0][0] == b"3-0"
    assert client.execute("XLEN", key) == 1
    for number in range(1, count + 1):
        client.execute("XADD", key, f"3-{number}", "x", "y")
    assert remove_weights(client, "policy", namespace=namespace).versions == (3,)
    left = client.execute("KEYS", f"{WeightKeys.of(namespace, 'policy').prefix}*")
    assert left == [key_of(namespace, "fence").encode()]


@pytest.mark.parametrize("number", [2**53, 2**64 - 1])
@pytest.mark.parametrize("token", ["7", "x", "nan", str(2**63 - 1)])
def test_weights_with_damaged_numbers_are_removed(client, namespace, number, token):
    publisher(client, namespace).publish(state(1))
    client.execute("XADD", key_of(namespace, "versions"), f"{number}-0", "token", "1e300")
    client.execute("HSET", key_of(namespace, "fence"), "token", token)
    assert 1 in remove_weights(client, "policy", namespace=namespace).versions
    left = client.execute("KEYS", f"{WeightKeys.of(namespace, 'policy').prefix}*")
    assert left == [key_of(namespace, "fence").encode()]
    assert publisher(client, namespace).publish(state(2)).version == 1


def test_a_key_of_another_type_changes_nothing_of_a_version_that_is_being_committed(
    client, namespace, monkeypatch
):
    """Else the version would be there, and its keys deleted with those of a failed attempt."""
    writer = publisher(client, namespace)
    writer.publish(state(1))
    key, keep = key_of(namespace, "fulls"), stored_keys.keep

    def meanwhile(*arguments):
        found = keep(*arguments)
        client.execute("DEL", key)
        client.execute("SET", key, "x")
        return found

    monkeypatch.setattr(stored_keys, "keep", meanwhile)
    with pytest.raises(StoreError, match="fulls holds a string"):
        writer.publish(state(2))
    client.execute("DEL", key)
    reader = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    assert [version.version for version in reader.versions()] == [1]
    assert torch.equal(reader.fetch()["a"], state(1)["a"])
    monkeypatch.undo()
    assert writer.publish(state(3)).version == 2
    assert torch.equal(reader.fetch()["a"], state(3)["a"])


@pytest.mark.parametrize("deletion", ["trim", "remove"])
@pytest.mark.parametrize("name", KEYS)
def test_a_key_of_another_type_ends_a_deletion_before_it_has_begun(
    client, namespace, name, deletion
):
    """Else half of a version would be left, without what says which chunks others need."""
    writer = redrb.WeightPublisher(client, "policy", namespace=namespace, keep=9, deltas=False)
    for value in range(3):
        writer.publish(state(value))
    client.execute("DEL", key_of(namespace, name))
    client.execute("SET", key_of(namespace, name), "x")

    def stored():
        keys = client.execute("KEYS", f"{WeightKeys.of(namespace, 'policy').prefix}*")
        return {key: client.execute("DUMP", key) for key in keys}

    before = stored()
    with pytest.raises(StoreError, match=f"{name} holds a string"):
        if deletion == "remove":
            remove_weights(client, "policy", namespace=namespace)
        else:
            trim = Trim(writer._committer._owner, 1, 0, "0-0")
            committer.run(client, WeightKeys.of(namespace, "policy"), trim)
    assert stored() == before


def test_an_attempt_of_a_publisher_that_died_is_removed(client, namespace, monkeypatch):
    """Its keys do not expire any more, and no version names them."""
    writer = publisher(client, namespace)
    monkeypatch.setattr(writer._committer, "discard", lambda *_: None)  # it is dead
    monkeypatch.setattr(stored_keys, "keep", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.publish(state(1))
    assert remove_weights(client, "policy", namespace=namespace).versions == ()
    left = client.execute("KEYS", f"{WeightKeys.of(namespace, 'policy').prefix}*")
    assert left == [key_of(namespace, "fence").encode()]


def test_versions_that_could_not_be_trimmed_go_with_the_next_one(
    client, namespace, pages, monkeypatch
):
    pages(versions=3)
    with redrb.WeightPublisher(
        client, "policy", namespace=namespace, keep=20, deltas=False
    ) as writer:
        for value in range(12):
            writer.publish(state(value))
    last = publisher(client, namespace)

    def fails(*arguments, run=committer.run):
        if isinstance(arguments[2], Trim):
            raise StoreUnavailable("away", where="there")
        return run(*arguments)

    monkeypatch.setattr(committer, "run", fails)
    assert last.publish(state(12)).version == 13  # it is published all the same
    reader = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    assert len(reader.versions()) > 1
    monkeypatch.undo()
    pages(versions=3)
    last.publish(state(13))
    assert [version.version for version in reader.versions()] == [14]
    assert torch.equal(reader.fetch()["a"], state(13)["a"])
