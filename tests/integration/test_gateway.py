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
