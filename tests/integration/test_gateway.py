"""`redrb gateway`: agents with the SDKs of OpenAI and Anthropic, on a server with a chat template."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch

import redrb
from redrb import Client, ExperienceStream, WeightPublisher
from redrb.errors import ConfigError
from tests.chat_server import MODEL, ChatBackend
from tests.engine_server import tiny_model
from tests.gateways import GatewayProcess, GatewayThread

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SESSIONS = 10
MODELS = {seed: tiny_model(seed) for seed in range(1, 4)}


@pytest.fixture
def server(server_urls: Any) -> Iterator[ChatBackend]:
    with ChatBackend(server_urls("valkey-9.1")) as server:
        yield server


@pytest.fixture
def client(server: ChatBackend) -> Iterator[Client]:
    with redrb.connect(server.redis_url, retry_s=10) as client:
        yield client


@pytest.fixture
def stream(client: Client, namespace: str) -> Iterator[ExperienceStream]:
    with ExperienceStream(client, "agents", namespace=namespace) as stream:
        stream.join_group()
        yield stream


@pytest.fixture
def publish(client: Client, namespace: str) -> Callable[[int], None]:
    publisher = WeightPublisher(client, "trainer_0", namespace=namespace)

    def publish(version: int) -> None:
        state = MODELS[version].state_dict()
        named = {f"actor.{name}": each for name, each in state.items()}
        publisher.publish(named, version=version)

    publish(1)
    return publish


@pytest.fixture
def gateway(
    server: ChatBackend, client: Client, stream: ExperienceStream, publish: Any, namespace: str
) -> Iterator[GatewayThread]:
    with GatewayThread(client, server.url, namespace=namespace) as gateway:
        yield gateway


def opened(url: str, prompt: str = "p", **options: Any) -> str:
    """Open a session; return its URL without the version of the protocol."""
    reply = httpx.post(f"{url}/sessions", json={"prompt": prompt, **options}, timeout=60)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["url"]).removesuffix("/v1")


def asked(session: str, messages: list[dict[str, Any]], path: str = "chat/completions", **more: Any):
    body = {"model": MODEL, "messages": messages, "max_tokens": 6, **more}
    reply = httpx.post(f"{session}/v1/{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def rewarded(session: str, reward: float = 1.0) -> None:
    reply = httpx.post(f"{session}/reward", json={"reward": reward}, timeout=60)
    assert reply.status_code == 200, reply.text


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_session_of_two_turns_is_a_sample_of_the_tokens_that_were_sampled(
    gateway, server, stream
):
    session = opened(gateway.url)
    history = [{"role": "system", "content": "7"}, user("12")]
    for text in ("3", "4"):
        reply = asked(session, history, tools=[TOOL])
        message = reply["choices"][0]["message"]
        history += [message]
        history += [
            {"role": "tool", "tool_call_id": call["id"], "content": "55"}
            for call in message.get("tool_calls", [])
        ]
        history += [user(text)]
    rewarded(session, 0.5)
    [[item]] = stream.take(1, timeout=20).groups()
    first, second = server.samples
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert item.sequences.tolist() == [*second.prompt, *second.tokens]
    sampled = item.sequences[-len(item.action_mask) :][item.action_mask].tolist()
    assert sampled == [*first.tokens, *second.tokens]
    torch.testing.assert_close(
        item.action_log_probs[item.action_mask], torch.tensor(first.log_probs + second.log_probs)
    )
    assert item.token_versions[item.action_mask].unique().tolist() == [1]
    assert item.reward == 0.5


def tool_results(message: dict[str, Any], text: str) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call in message.get("tool_calls") or ()
    ]


class Record:
    """What the server has sampled, by its tokens from the prompt on."""

    def __init__(self, server: ChatBackend) -> None:
        self.samples = list(server.samples)

    def check(self, items: list[Any]) -> int:
        """Check the samples of a session against the record; return the number of turns found.

        Each run of trained tokens must be what the server sampled after exactly the tokens before.
        """
        found = 0
        for item in items:
            tokens, actions = item.sequences.tolist(), len(item.action_mask)
            mask = [False] * (len(tokens) - actions) + item.action_mask.tolist()
            log_probs = [0.0] * (len(tokens) - actions) + item.action_log_probs.tolist()
            versions = [-1] * (len(tokens) - actions) + item.token_versions.tolist()
            for sample in self.samples:
                begin, end = len(sample.prompt), len(sample.prompt) + len(sample.tokens)
                whole = [*sample.prompt, *sample.tokens]
                if tokens[:end] != whole or not all(mask[begin:end]):
                    continue
                found += 1
                assert log_probs[begin:end] == pytest.approx(sample.log_probs, abs=1e-6)
                labels = [int(each.split("-")[1]) for each in sample.labels]
                assert versions[begin:end] == labels
                mask[begin:end] = [False] * (end - begin)
            assert not any(mask)
        return found


def test_two_hundred_sessions_are_what_the_server_sampled(gateway, server, stream, publish, client):
    """Random agents use tools, edit their history, go back and begin anew, while weights change."""
    choose = random.Random(7)
    sessions, turns = [], 0
    for number in range(SESSIONS):
        if number in (70, 140):
            publish(number // 70 + 1)
        size = choose.choice((1, 1, 2))
        for _ in range(size):
            session = opened(gateway.url, f"p{number}", group_size=size)
            history = [{"role": "system", "content": str(number)}]
            tools = {"tools": [TOOL]} if choose.random() < 0.5 else {}
            stop = {"stop": ["33"]} if choose.random() < 0.2 else {}
            states = []
            for _ in range(choose.randint(1, 4)):
                history = [*history, user(str(choose.randrange(1000)))]
                match choose.random():
                    case chance if chance < 0.1 and states:
                        history = [*choose.choice(states), user("77")]  # back to an earlier turn
                    case chance if chance < 0.2:
                        history = [user("a summary"), user(str(number))]
                    case chance if chance < 0.3 and len(history) > 3:
                        history = [*history[:1], *history[3:]]  # a turn left out
                        if history[-1]["role"] == "assistant":
                            history = [*history, user("1")]
                reply = asked(session, history, **tools, **stop)
                assert asked(session, history, **tools, **stop) == reply  # a retry
                message = reply["choices"][0]["message"]
                turns += 1
                message = {name: message[name] for name in message if name != "reasoning"}
                history = [*history, message, *tool_results(message, "42")]
                states.append(history)
            sessions.append(session)
            rewarded(session)
    record, found = Record(server), 0
    with stream.take(SESSIONS, timeout=60) as lease:
        for group in lease.groups():
            found += record.check(group)
        lease.ack()
    assert found == turns == len(record.samples)
    counts = stream.stats()
    assert counts.put == counts.acked == SESSIONS
