"""Publishing beside training: the values that are sent, their order, and errors."""

from __future__ import annotations

import threading

import pytest
import torch

import redrb
from redrb.errors import ConfigError, EncodeError, PublisherFenced
from redrb.weights.lora import LoraConfig
from redrb.weights.publishing import staging


@pytest.fixture
def make(client, namespace):
    def make(**options):
        return redrb.WeightPublisher(client, "actor", namespace=namespace, **options)

    return make


@pytest.fixture
def subscriber(client, namespace):
    return redrb.WeightSubscriber(client, "actor", namespace=namespace)


def weights():
    torch.manual_seed(0)
    return {"a": torch.randn(4096).bfloat16()}


def nudge(state, count=40):
    state["a"].view(torch.int16)[:count] += 1


def test_submit_publishes_the_present_values(make, subscriber, monkeypatch):
    publisher, state = make(), weights() | {"same": None}
    state["same"] = state["a"]
    go_on = threading.Event()

    def stage(*arguments, original=staging.stage, **options):
        assert go_on.wait(20)
        original(*arguments, **options)

    monkeypatch.setattr(staging, "stage", stage)
    before = state["a"].clone()
    submitted = publisher.submit(state)
    state["a"].zero_()
    assert not submitted.done()
    go_on.set()
    assert submitted.result(20).kind == "full"
    assert torch.equal(subscriber.fetch()["a"], before)
    state["a"].copy_(before)
    nudge(state)
    changed = state["a"].clone()
    second = publisher.submit(state)
    state["a"].zero_()
    third = publisher.submit(state)  # waits for the second
    assert (second.result(20).version, third.result(20).version) == (2, 3)
    assert second.result().kind == "delta"
    publisher.close()
    publisher.close()
    assert torch.equal(subscriber.fetch(2)["a"], changed)
    assert not subscriber.fetch(3)["same"].any()


def test_errors_of_submit_come_through_its_future(make):
    publisher, state = make(), weights()
    publisher.submit(state).result(20)
    with pytest.raises(EncodeError):
        publisher.submit({"a": 1})  # seen at once
    stale = publisher.submit(state, version=1)
    with pytest.raises(ConfigError, match="not larger"):
        stale.result(20)
    make()
    fenced = publisher.submit(state)
    assert isinstance(fenced.exception(20), PublisherFenced)
    publisher.close()


def test_submitted_versions_are_published_in_order(make, subscriber, monkeypatch):
    """The thread is slow to start; what comes after waits all the same."""
    publisher, _state = make(), weights()
    thread = redrb.weights.publishing.publisher.ThreadPoolExecutor
    slow = threading.Event()
    monkeypatch.setattr(
        "redrb.weights.publishing.publisher.ThreadPoolExecutor",
        lambda *a, **o: thread(*a, **o, initializer=slow.wait, initargs=(0.3,)),
    )
    first = publisher.submit({"a": torch.zeros(3)})
    second = publisher.publish({"a": torch.ones(3)})
    assert first.result(20).version < second.version
    assert subscriber.fetch()["a"].all()
    publisher.close()


def test_a_submitted_version_cannot_be_cancelled(make, subscriber):
    with make() as publisher:
        for step in range(1, 20):
            submitted = publisher.submit(weights())
            assert not submitted.cancel()
            assert submitted.result(20).version == step


def test_errors_without_a_caller_are_logged_and_raised_by_close(make, subscriber, caplog):
    publisher = make()
    publisher.submit(weights()).result(20)
    make().publish(weights())  # such as somebody's `redrb weights put`
    for _ in range(3):
        publisher.submit(weights())
    with pytest.raises(PublisherFenced):
        publisher.close()
    assert caplog.text.count("is not published: another publisher") == 3
    publisher.close()
    assert subscriber.latest().version == 2


def test_a_closed_publisher_publishes_nothing_more(make, subscriber):
    publisher, state = make(), weights()
    publisher.publish(state)
    publisher.close()
    adapter = {"a.lora_A": torch.ones(2, 8), "a.lora_B": torch.ones(8, 2)}
    for call in (
        lambda: publisher.publish(state),
        lambda: publisher.submit(state),
        lambda: publisher.publish_lora((adapter, {"a": LoraConfig(2, 4.0)})),
    ):
        with pytest.raises(ConfigError, match="was closed"):
            call()
    assert subscriber.latest().version == 1
