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
HTTP = httpx.Client(timeout=60)
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
    reply = HTTP.post(f"{url}/sessions", json={"prompt": prompt, **options})
    assert reply.status_code == 201, reply.text
    return str(reply.json()["url"]).removesuffix("/v1")


def asked(
    session: str, messages: list[dict[str, Any]], path: str = "chat/completions", **more: Any
) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": 6, **more}
    reply = HTTP.post(f"{session}/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def rewarded(session: str, reward: float = 1.0) -> None:
    reply = HTTP.post(f"{session}/reward", json={"reward": reward})
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


@pytest.mark.parametrize("sessions", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_stored_turns_are_what_the_server_sampled(gateway, server, stream, publish, sessions):
    """Random agents use tools, edit their history, go back and begin anew, while weights change."""
    choose = random.Random(7)
    replies = set()
    for number in range(sessions):
        if number in (sessions // 3, 2 * sessions // 3):
            publish(number * 3 // sessions + 1)
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
                replies.add(reply["id"])
                message = {name: message[name] for name in message if name != "reasoning"}
                history = [*history, message, *tool_results(message, "42")]
                states.append(history)
            rewarded(session)
    record, found = Record(server), 0
    with stream.take(sessions, timeout=60) as lease:
        for group in lease.groups():
            found += record.check(group)
        lease.ack()
    assert found == len(replies) == len(record.samples)
    ledger = stream.stats().ledger
    assert ledger.put == ledger.acked == sessions


LOOK = {"name": "look", "input_schema": {"type": "object"}}


def test_the_sdk_of_openai_streams_and_uses_tools(gateway, server, stream):
    openai = pytest.importorskip("openai")
    session = opened(gateway.url)
    agent = openai.OpenAI(base_url=f"{session}/v1", api_key="any", max_retries=0)
    assert [each.id for each in agent.models.list()] == [MODEL]
    history: list[Any] = [user("1")]
    with_calls = 0
    for turn in range(12):
        asked = {"model": MODEL, "messages": history, "tools": [TOOL], "max_tokens": 20}
        if turn % 2:
            reply = agent.chat.completions.create(**asked)
            assert reply.usage.completion_tokens == len(server.samples[-1].tokens)
            message = reply.choices[0].message.model_dump()
        else:
            streamed = agent.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            calls, text, usage = [], "", None
            for chunk in streamed:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    calls += [each.model_dump() for each in choice.delta.tool_calls or ()]
            assert usage.completion_tokens == len(server.samples[-1].tokens)
            message = {"role": "assistant", "content": text, "tool_calls": calls}
        with_calls += bool(message.get("tool_calls"))
        history += [message, *tool_results(message, "42"), user(str(turn))]
    assert with_calls > 2
    rewarded(session)
    [[item]] = stream.take(1, timeout=20).groups()  # no turn has branched
    assert Record(server).check([item]) == 12


def test_the_sdk_of_anthropic_streams_and_uses_tools(gateway, server, stream):
    anthropic = pytest.importorskip("anthropic")
    session = opened(gateway.url)
    agent = anthropic.Anthropic(base_url=session, api_key="any", max_retries=0)
    assert [each.id for each in agent.models.list()] == [MODEL]
    history: list[Any] = [user("1")]
    with_calls = 0
    for turn in range(12):
        asked = {"model": MODEL, "messages": history, "tools": [LOOK], "max_tokens": 20}
        asked["system"] = [{"type": "text", "text": "7", "cache_control": {"type": "ephemeral"}}]
        if turn % 2:
            reply = agent.messages.create(**asked)
        else:
            with agent.messages.stream(**asked) as streamed:
                reply = streamed.get_final_message()
        assert reply.usage.output_tokens == len(server.samples[-1].tokens)
        calls = [each for each in reply.content if each.type == "tool_use"]
        with_calls += bool(calls)
        assert reply.stop_reason in ("end_turn", "max_tokens", "tool_use")
        results = [
            {"type": "tool_result", "tool_use_id": each.id, "content": "42"} for each in calls
        ]
        blocks = [each.model_dump() for each in reply.content if each.type != "thinking"]
        history += [{"role": "assistant", "content": blocks}]
        history += [{"role": "user", "content": [*results, {"type": "text", "text": str(turn)}]}]
    assert with_calls > 2
    rewarded(session)
    [[item]] = stream.take(1, timeout=20).groups()
    assert Record(server).check([item]) == 12


def test_a_text_goes_on_while_it_begins_with_the_text_before(gateway, server, stream):
    session = opened(gateway.url)
    server.most = 4096

    def completed(prompt: str, **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 5, **more}
        reply = HTTP.post(f"{session}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    text = "123"
    for number in range(30):
        choice = completed(text, stop=["7"])
        text += choice["text"] + "7" + str(number)
        if choice["finish_reason"] == "length":
            text = text.replace("7" + str(number), str(number))
    rewarded(session)
    [group] = stream.take(1, timeout=20).groups()
    assert Record(server).check(group) == 30
    ended = [sample.tokens[-1] for sample in server.samples[:-1]].count(14)
    assert len(group) == 1 + ended  # a text does not show the token that ends it
