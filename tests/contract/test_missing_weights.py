"""A process that waits for weights in the wrong namespace says so, and names the right ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from torch import nn

from redrb import Client, WeightPublisher, WeightSubscriber
from redrb.connection.stop import Stop
from redrb.errors import WeightTimeout
from redrb.registry import Registry
from redrb.train.broadcast import Broadcast
from redrb.train.engines import weights as engine_weights
from redrb.train.engines.weights import EngineWeights
from redrb.train.following import MakerWeights
from redrb.weights.reading import missing

Waiting = Callable[[Client, str, str], None]


def subscriber(client: Client, namespace: str, name: str) -> None:
    WeightSubscriber(client, name, namespace=namespace).wait(newer_than=0, timeout=0.3)


def follower(client: Client, namespace: str, name: str) -> None:
    place = (client, namespace, "m", {"actor": nn.Linear(1, 1)}, Stop())
    MakerWeights(*place, follow=name, first_timeout=0.3).wait_until_initialised()


def engine(client: Client, namespace: str, name: str) -> None:
    server: Any = None  # it gets nothing
    with TemporaryDirectory() as folder:
        weights = EngineWeights(client, name, server, folder, namespace=namespace)
        asyncio.run(weights.update(timeout=0.9))


WAITS: list[Waiting] = [subscriber, follower]


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(missing, "LOG_AFTER_S", 0.0)


def logged(
    caplog: pytest.LogCaptureFixture, wait: Waiting, client: Client, namespace: str, name: str
) -> str:
    with pytest.raises(WeightTimeout):
        wait(client, namespace, name)
    found: list[str] = [each for each in caplog.messages if each.startswith("waiting for weights")]
    assert len(found) == 1
    return found[0]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_in_the_wrong_namespace_names_the_right_ones(client, namespace, wait, caplog):
    state = nn.Linear(1, 1).state_dict()
    for place, name in (("-a", "sort"), ("-b", "sort"), ("-c", "sort.partial"), ("-d", "other")):
        name = f"{name}-{namespace}" if name == "sort" else name
        WeightPublisher(client, name, namespace=namespace + place).publish(state)
    text = logged(caplog, wait, client, namespace, f"sort-{namespace}")
    assert f"in namespace '{namespace}' at {client.where}, for 0 s now" in text
    assert text.endswith(f"weights of this name: '{namespace}-a', '{namespace}-b'")


def test_a_maker_of_episodes_in_the_wrong_namespace_names_the_right_one(
    client, namespace, monkeypatch, caplog
):
    monkeypatch.setattr(missing, "LOG_AFTER_S", 0.3)
    monkeypatch.setattr(engine_weights, "_WAIT_S", 0.1)  # each wait is too short for a log line
    state = nn.Linear(1, 1).state_dict()
    WeightPublisher(client, namespace, namespace="right").publish(state)
    assert "weights of this name: 'right'" in logged(caplog, engine, client, namespace, namespace)


def test_a_server_that_follows_weights_of_another_namespace_names_it(
    client, namespace, monkeypatch, caplog
):
    monkeypatch.setattr(missing, "LOG_AFTER_S", 0.3)
    monkeypatch.setattr(engine_weights, "_WAIT_S", 0.1)  # each wait is too short for a log line
    WeightPublisher(client, namespace, namespace="right").publish(nn.Linear(1, 1).state_dict())

    async def follow_until_logged(folder):
        server: Any = None  # it gets nothing
        weights = EngineWeights(client, namespace, server, folder, namespace=namespace)
        following = asyncio.create_task(weights.follow())
        async with asyncio.timeout(60):
            while not caplog.messages:
                await asyncio.sleep(0.01)
        assert not following.done()
        following.cancel()
        await asyncio.wait([following])

    with TemporaryDirectory() as folder:
        asyncio.run(follow_until_logged(folder))
    assert caplog.messages[0].startswith(f"waiting for weights {namespace!r}")
    assert caplog.messages[0].endswith("weights of this name: 'right'")


@pytest.mark.usefixtures("at_once")
def test_a_wait_for_weights_that_nobody_has_published(client, namespace, caplog):
    text = logged(caplog, follower, client, namespace, namespace)
    assert "nobody has published weights of this name in any namespace here" in text


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("others", [1, 10, 11, 1000])
def test_a_wait_for_a_mistyped_name_names_the_weights_of_the_namespace(
    client, namespace, others, caplog
):
    registry = Registry(client, namespace)
    for number in range(others):
        registry.add("weights", f"sort-{number:04}")
    text = logged(caplog, subscriber, client, namespace, f"toi-{namespace}")
    names = [f"'sort-{number:04}'" for number in range(min(others, 10))]
    assert text.endswith(f"This namespace has weights {', '.join(names)}")


@pytest.mark.usefixtures("at_once")
def test_a_wait_for_the_announcement_of_weights_that_are_there(client, namespace, caplog):
    state = nn.Linear(1, 1).state_dict()
    WeightPublisher(client, "sort", namespace=namespace).publish(state)
    text = logged(caplog, follower, client, namespace, "sort")
    assert "they are published, and no trainer has announced them" in text


@pytest.mark.parametrize("wait", [subscriber, follower])
def test_a_short_wait_says_nothing(client, namespace, wait, caplog):
    with pytest.raises(WeightTimeout):
        wait(client, namespace, "sort")
    assert not caplog.records


@pytest.mark.usefixtures("at_once")
def test_a_maker_with_weights_says_nothing(client, namespace, caplog):
    Broadcast(client, namespace, "sort", []).push({"actor": nn.Linear(1, 1)}, fully=True)
    place = (client, namespace, "m", {"actor": nn.Linear(1, 1)}, Stop())
    assert MakerWeights(*place, follow="sort").wait_until_initialised()
    with pytest.raises(WeightTimeout):
        WeightSubscriber(client, "sort", namespace=namespace).wait(newer_than=1, timeout=0.2)
    assert not caplog.records
