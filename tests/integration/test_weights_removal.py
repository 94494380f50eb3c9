"""`redrb weights rm`: no key is left but the fence, and the old publisher is fenced."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

import redrb
from redrb import WeightPublisher, WeightSubscriber
from redrb.cli.__main__ import main
from redrb.errors import ConfigError, PublisherFenced, StoreUnavailable, WeightTimeout
from redrb.weights.inspection.listing import remove_weights
from redrb.weights.publishing import committer
from redrb.weights.wire import stored_keys
from tests.conftest import REAL


@pytest.fixture(params=["server", "cluster"])
def place(request, server_urls, clusters):
    """URL of one server, then of a cluster."""
    name = [*REAL][-1]
    return clusters(name).url if request.param == "cluster" else server_urls(name)


@pytest.fixture
def store(place):
    with redrb.connect(place, retry_s=20) as client:
        yield client


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("redrb.weights.publishing.publisher.CHUNK_BYTES", 1024)


@pytest.fixture
def keys(store, namespace):
    """All keys of the weights `policy`, of their spread parts as well, without the namespace."""

    def found():
        return sorted(
            key.decode().partition(":weights:")[2]
            for node in store.primaries()
            for key in node.execute("KEYS", f"redrb:{{{namespace}:weights:policy[:}}]*")
        )

    return found


def publish(publisher: WeightPublisher, versions: int, *, more: float = 0.0) -> None:
    """Publish versions of which the first is full and the others are deltas."""
    state = {"a": torch.arange(5000.0) + more}
    for _ in range(versions):
        publisher.publish(state)
        state["a"][7] += 1


def test_nothing_is_left_and_the_publisher_is_fenced(place, store, namespace, keys, capsys):
    publisher = WeightPublisher(store, "policy", namespace=namespace, keep=9)
    other = WeightPublisher(store, "policy2", namespace=namespace)
    publish(publisher, 3)
    publish(other, 1)
    with redrb.ExperienceStream(store, "math", namespace=namespace, weights="policy"):
        assert any(":chunk:" in key for key in keys())
        assert any(":delta:" in key for key in keys())
        assert "policy}:followers" in keys()
    subscriber = WeightSubscriber(store, "policy", namespace=namespace)
    assert subscriber.poll({"a": torch.zeros(5000)}) is not None

    words = ["weights", "rm", "policy", "--namespace", namespace, "--url", place]
    assert main([*words, "--json"]) == 0
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert (printed["name"], printed["versions"]) == ("policy", [1, 2, 3])
    assert printed["stored_bytes"] > 20_000
    assert said.err == ""
    assert keys() == ["policy}:fence"]
    with pytest.raises(PublisherFenced):
        publish(publisher, 1)
    with pytest.raises(WeightTimeout):
        subscriber.wait(3, timeout=0.2)
    assert subscriber.poll({"a": torch.zeros(5000)}) is None
    assert keys() == ["policy}:fence"]

    assert main(words) == 2
    assert "there are policy2" in capsys.readouterr().err
    assert WeightSubscriber(store, "policy2", namespace=namespace).fetch()["a"][7] == 7
    publish(other, 1)
    assert main([*words[:2], "policy2", *words[3:]]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in printed[:2]] == ["policy2", "1, 2"]
    assert "PublisherFenced" in printed[-1]


def test_a_publisher_that_paused_before_its_commit_commits_nothing(
    store, namespace, keys, monkeypatch
):
    publisher = WeightPublisher(store, "policy", namespace=namespace)
    publish(publisher, 1)
    commit = committer.Committer.commit

    def late(self, *arguments):
        staged = [key for key in keys() if ":chunk:2:" in key or ":delta:2:" in key]
        assert staged
        assert remove_weights(store, "policy", namespace=namespace).versions == (1,)
        assert keys() == ["policy}:fence"]
        return commit(self, *arguments)

    monkeypatch.setattr(committer.Committer, "commit", late)
    with pytest.raises(PublisherFenced):
        publish(publisher, 1, more=0.5)
    assert set(keys()) == {"policy}:fence"}
    with pytest.raises(PublisherFenced):
        publish(publisher, 1)


def test_a_removed_name_is_published_again_with_new_tokens(store, namespace, keys, monkeypatch):
    """A publisher that begins while the last keys are looked for keeps what it sends."""
    old = WeightPublisher(store, "policy", namespace=namespace)
    publish(old, 2)
    delete, new = stored_keys.delete, list[WeightPublisher]()

    def meanwhile(client, names):
        if not new:
            new.append(WeightPublisher(store, "policy", namespace=namespace))
            publish(new[0], 1)
        delete(client, names)

    monkeypatch.setattr("redrb.weights.inspection.listing.stored_keys.delete", meanwhile)
    assert remove_weights(store, "policy", namespace=namespace).versions == (1, 2)
    subscriber = WeightSubscriber(store, "policy", namespace=namespace)
    assert [version.version for version in subscriber.versions()] == [1]
    assert subscriber.fetch()["a"][7] == 7
    assert not any(":chunk:1:" in key for key in keys())
    with pytest.raises(PublisherFenced):
        publish(old, 1)
    publish(new[0], 1)


def test_an_interrupted_removal_is_resumed(store, namespace, keys, monkeypatch):
    publish(WeightPublisher(store, "policy", namespace=namespace), 2)
    clean = stored_keys.delete

    def breaks(*_):
        raise StoreUnavailable("gone", where="here")

    monkeypatch.setattr(stored_keys, "delete", breaks)
    with pytest.raises(StoreUnavailable):
        remove_weights(store, "policy", namespace=namespace)
    monkeypatch.setattr(stored_keys, "delete", clean)
    if len(keys()) > 1:  # on a cluster, where deleting takes several requests
        remove_weights(store, "policy", namespace=namespace)
    assert keys() == ["policy}:fence"]
    with pytest.raises(ConfigError, match="there are no weights 'policy'"):
        remove_weights(store, "policy", namespace=namespace)


def test_a_reader_that_waits_hears_nothing_of_it(store, namespace):
    publisher = WeightPublisher(store, "policy", namespace=namespace)
    publish(publisher, 2)
    subscriber = WeightSubscriber(store, "policy", namespace=namespace)
    found: list[object] = []

    def wait():
        try:
            found.append(subscriber.wait(2, timeout=1.0))
        except WeightTimeout as error:
            found.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)  # the reader is blocked by then
    remove_weights(store, "policy", namespace=namespace)
    waiting.join()
    assert isinstance(found[0], WeightTimeout)
