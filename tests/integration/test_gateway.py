"""`redrb gateway`: agents with SDKs of OpenAI and Anthropic, on a server with a chat template."""

from __future__ import annotations

import asyncio
import atexit
import json
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
import torch

import redrb
from redrb import Client, ExperienceStream, WeightPublisher
from redrb.errors import ConfigError, DecodeError, StoreDenied, StoreFull, StoreUnavailable
from redrb.stream.announcement import Announcement
from redrb.watch.state.reader import StateReader
from tests.chat_server import END, MODEL, ChatBackend, Record, text_of
from tests.engine_server import tiny_model
from tests.gateways import GatewayProcess, GatewayThread
from tests.scenes import until

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
HTTP = httpx.Client(timeout=60)
atexit.register(HTTP.close)
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


@pytest.mark.parametrize("sessions", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_stored_turns_are_what_the_server_sampled(gateway, server, stream, publish, sessions):
    """Random agents use tools, edit their history, go back and begin anew, while weights change."""
    choose = random.Random(7)
    updates, replies = {sessions // 3: 2, 2 * sessions // 3: 3}, set()
    for number in range(sessions):
        if number in updates:
            publish(updates[number])
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


def failed(status: int, url: str, body: Any, **options: Any) -> str:
    """Send a request that fails with a status; return its message."""
    reply = HTTP.post(url, json=body, **options)
    assert reply.status_code == status, reply.text
    return str(reply.json()["error"]["message"])


def test_an_edited_history_is_another_sample_whose_tokens_count_once(gateway, server, stream):
    session = opened(gateway.url)
    first = asked(session, [user("1")])["choices"][0]["message"]
    whole = [user("1"), first, *tool_results(first, "4"), user("2")]
    asked(session, whole)
    asked(session, whole, seed=5)  # a second try
    asked(session, [user("a summary")])
    rewarded(session)
    [group] = stream.take(1, timeout=20).groups()
    assert len(group) == 3
    assert Record(server).check(group) == 4
    prompts = [sample.prompt for sample in server.samples]
    assert prompts[1] == prompts[2]
    assert sum(int(item.action_mask.sum()) for item in group) == sum(
        len(sample.tokens) for sample in server.samples
    )


def test_edited_histories_are_refused_where_asked(server, client, stream, publish, namespace):
    with GatewayThread(client, server.url, namespace=namespace, on_edited="error") as gateway:
        session = opened(gateway.url)
        asked(session, [user("1")])
        url, body = f"{session}/v1/chat/completions", {"model": MODEL, "messages": [user("2")]}
        assert "--on-edited branch" in failed(409, url, body)
        assert HTTP.post(url, json=body).headers["x-should-retry"] == "false"
        assert len(server.samples) == 1
        assert asked(session, [user("1")])["usage"]["completion_tokens"] > 0  # a retry is none


def test_a_template_that_hides_a_result_begins_a_branch(gateway, server, stream):
    session = opened(gateway.url)
    first = asked(session, [user("1")])["choices"][0]["message"]
    server.refuses = "0"  # the probe's reply
    asked(session, [user("1"), first, *tool_results(first, "4"), user("2")])
    rewarded(session)
    [group] = stream.take(1, timeout=20).groups()
    assert len(group) == 2
    assert Record(server).check(group) == 2


def test_a_key_makes_a_second_try_of_the_same_request(gateway, server):
    url = f"{opened(gateway.url)}/v1/chat/completions"
    body = {"model": MODEL, "messages": [user("1")], "max_tokens": 20}
    ids = [
        HTTP.post(url, json={**body, "stream": stream}, headers={"idempotency-key": key}).text
        for stream, key in ((False, "a"), (False, "a"), (False, "b"))
    ]
    assert ids[0] == ids[1] != ids[2]
    assert len(server.samples) == 2
    streamed = HTTP.post(url, json={**body, "stream": True}, headers={"idempotency-key": "a"})
    assert len(server.samples) == 2  # how the reply is sent makes no other request
    assert json.loads(ids[0])["id"] in streamed.text


@pytest.mark.parametrize(
    ("path", "change", "status", "message"),
    [
        ("chat/completions", {"n": 2}, 400, "'n' is not supported"),
        ("chat/completions", {"logit_bias": {"5": 100}}, 400, "'logit_bias'"),
        ("chat/completions", {"tool_choice": "required"}, 400, "'tool_choice'"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, 400, "response_format"),
        ("chat/completions", {"unknown": 1}, 400, "'unknown'"),
        ("chat/completions", {"temperature": 0}, 400, "> 0"),
        ("chat/completions", {"model": "gpt-5"}, 400, f"this gateway samples '{MODEL}'"),
        ("chat/completions", {"max_tokens": -1}, 400, "max_tokens"),
        ("chat/completions", {"stop_token_ids": 5}, 400, "stop_token_ids"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "1"}]}, 400, "last"),
        ("chat/completions", {"messages": [user("1" * 9000)]}, 400, "context_length_exceeded"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "images",
        ),
        ("chat/completions", {"messages": [user("no")]}, 400, "the template says no"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, "'thinking'"),
        ("messages", {"stop": ["1"]}, 400, "'stop'"),
        ("completions", {"prompt": [1, 2], "messages": None}, 400, "prompt"),
        ("completions", {"prompt": "1", "suffix": "2", "messages": None}, 400, "'suffix'"),
        ("completions", {"prompt": "1"}, 400, "'messages'"),
    ],
)
def test_what_a_sample_cannot_tell_is_refused(gateway, server, path, change, status, message):
    server.refuses = "no"
    session = opened(gateway.url)
    body = {"model": MODEL, "messages": [user("1")], "max_tokens": 5, **change}
    assert message in failed(status, f"{session}/v1/{path}", body)
    assert not server.samples


def test_a_wrong_secret_is_as_unknown_as_a_wrong_id(gateway, stream):
    session = opened(gateway.url)
    id_, _, secret = session.rpartition("/")[2].partition(".")
    body = {"model": MODEL, "messages": [user("1")]}
    told = {
        failed(404, f"{gateway.url}/s/{key}/v1/{path}", body)
        for key in (
            f"{id_}.{secret[:-1]}{'y' if secret.endswith('x') else 'x'}",
            f"{'0' * 16}.{secret}",
            f"{id_}.%FF",
            f"{id_}.x.{secret}",
        )
        for path in ("chat/completions", "messages")
    }
    assert len(told) == 1
    assert HTTP.get(f"{gateway.url}/s/{id_}.x/v1/models").status_code == 404
    assert HTTP.delete(f"{gateway.url}/s/{id_}.x").status_code == 404
    assert HTTP.get(f"{session}/v1/models").status_code == 200
    assert HTTP.delete(session).status_code == 204
    assert failed(404, f"{session}/v1/messages", body) in told


@pytest.mark.parametrize("token", ["s3cret", "clé 鍵"])
def test_sessions_need_the_token(server, client, stream, publish, namespace, token):
    with GatewayThread(client, server.url, namespace=namespace, token=token) as gateway:
        url = f"{gateway.url}/sessions"
        for wrong in (
            {},
            {"authorization": "Bearer x"},
            {"authorization": f"Bearer {token}é".encode()},
        ):
            assert "token" in failed(401, url, {"prompt": "p"}, headers=wrong)
        right = {"authorization": f"Bearer {token}".encode()}
        assert HTTP.post(url, json={"prompt": "p"}, headers=right).status_code == 201


def test_a_request_for_a_session_with_a_key_may_be_repeated(
    server, client, stream, publish, namespace
):
    body, headers = {"prompt": "p", "group_size": 2}, {"idempotency-key": "0123456789abcdef"}
    with (
        GatewayThread(client, server.url, namespace=namespace) as one,
        GatewayThread(client, server.url, namespace=namespace, token="s3cret") as other,
    ):

        def begun(**changes: Any) -> str:
            reply = HTTP.post(f"{one.url}/sessions", json=body | changes, headers=headers)
            assert reply.status_code == 201, reply.text
            return str(reply.json()["url"])

        url = begun()
        assert begun() == url != begun(prompt="q")
        session = url.removesuffix("/v1")
        asked(session, [user("1")])
        rewarded(session)
        assert begun() == url  # until it expires: a late repetition begins nothing
        second = opened(one.url, group_size=2)
        asked(second, [user("2")])
        rewarded(second)
        assert len(stream.take(1, timeout=20).items()) == 2
        headers["authorization"] = "Bearer s3cret"  # of whom has another token, it is another one
        reply = HTTP.post(f"{other.url}/sessions", json=body, headers=headers)
        assert reply.json()["url"].rpartition("/s/")[2] != url.rpartition("/s/")[2]
        for wrong in ("short", "a" * 15, "a" * 201):
            url = f"{one.url}/sessions"
            assert "guess" in failed(400, url, body, headers={"idempotency-key": wrong})


def test_whoever_goes_after_another_request_has_found_the_session_leaves_it(
    gateway, server, stream, monkeypatch
):
    began, go = threading.Event(), threading.Event()
    dropped = threading.Event()
    store = gateway.gateway._store
    opening, dropping = store.open, store.drop

    def slow(*given: Any, **options: Any) -> Any:
        found = opening(*given, **options)
        if found.is_new:
            began.set()
            assert go.wait(30)
        return found

    def drop(name: str, **options: Any) -> None:
        dropping(name, **options)
        dropped.set()

    monkeypatch.setattr(store, "open", slow)
    monkeypatch.setattr(store, "drop", drop)
    request: dict[str, Any] = {
        "json": {"prompt": "p"},
        "headers": {"idempotency-key": "0123456789abcdef"},
    }
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(f"{gateway.url}/sessions", **request, timeout=1)
    assert began.wait(30)
    url = HTTP.post(f"{gateway.url}/sessions", **request).json()["url"]
    go.set()
    assert dropped.wait(30)
    assert HTTP.get(f"{url}/models").status_code == 200


def test_a_turn_whose_agent_has_gone_is_stored_for_its_repetition(gateway, server, stream):
    session = opened(gateway.url)
    server.step_s = 0.1
    url, body = f"{session}/v1/chat/completions", {"model": MODEL, "messages": [user("1")]}
    body |= {"max_tokens": 8, "stop_token_ids": [END]}
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(url, json=body, timeout=0.15)
    reply = HTTP.post(url, json=body)
    assert reply.status_code == 200
    rewarded(session)
    [[item]] = stream.take(1, timeout=20).groups()
    assert Record(server).check([item]) == 1
    assert reply.json()["usage"]["completion_tokens"] == int(item.action_mask.sum())


def test_of_edited_histories_that_come_together_one_is_kept_where_none_may_branch(
    server, client, stream, publish, namespace
):
    with (
        GatewayThread(client, server.url, namespace=namespace, on_edited="error") as gateway,
        ThreadPoolExecutor(2) as pool,
    ):
        session = opened(gateway.url)
        server.step_s = 0.3
        url = f"{session}/v1/chat/completions"
        bodies = [{"model": MODEL, "messages": [user(each)], "max_tokens": 2} for each in "12"]
        replies = list(pool.map(lambda body: HTTP.post(url, json=body), bodies))
        assert sorted(each.status_code for each in replies) == [200, 409]
        assert len(server.samples) == 2  # both were sampled, and no turn was there yet
        [refused] = [each for each in replies if each.status_code == 409]
        assert "--on-edited branch" in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false"
        rewarded(session)
    assert len(stream.take(1, timeout=20).items()) == 1


def test_behind_a_proxy_sessions_have_its_address(server, client, stream, publish, namespace):
    public = "https://gateway.example/agents/"
    with GatewayThread(client, server.url, namespace=namespace, public_url=public) as gateway:
        reply = HTTP.post(f"{gateway.url}/sessions", json={"prompt": "p"})
        url = str(reply.json()["url"])
        assert url.startswith("https://gateway.example/agents/s/")
        asked(f"{gateway.url}/s/{url.split('/')[-2]}", [user("1")])


def test_a_gateway_is_served_at_ipv6(server, client, stream, publish, namespace):
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        one = GatewayProcess(server.redis_url, server.url, "--host", "::1", namespace=namespace)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert one.url.startswith("http://[::1]:")
    session = opened(one.url)
    assert session.startswith(one.url)
    asked(session, [user("1")])
    evil = HTTP.post(f"{one.url}/sessions", json={"prompt": "p"}, headers={"host": "evil.example"})
    assert evil.status_code == 400
    assert resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE)[0] >= min(hard, 4096)
    assert one.end() == (0, "")


def test_pages_of_other_sites_open_nothing(gateway):
    reply = HTTP.post(f"{gateway.url}/sessions", content='{"prompt": "p"}')  # text/plain, as a form
    assert reply.status_code == 415


def test_without_weights_or_rights_a_session_is_to_be_asked_for_later(
    server, client, namespace, monkeypatch
):
    monkeypatch.setattr("redrb.gateway.limits.WAIT_S", 0.3)
    settings = {"max_staleness": 0, "groups_per_version": 1, "weights": "trainer_0"}
    with (
        ExperienceStream(client, "agents", namespace=namespace, **settings) as stream,
        GatewayThread(client, server.url, namespace=namespace) as gateway,
    ):
        stream.join_group()
        url, body = f"{gateway.url}/sessions", {"prompt": "p", "group_size": 2}
        assert "no published weights" in failed(503, url, body)
        publisher = WeightPublisher(client, "trainer_0", namespace=namespace)
        named = {f"actor.{name}": each for name, each in MODELS[1].state_dict().items()}
        publisher.publish(named, version=1)
        assert gateway.loaded()
        sessions = [opened(gateway.url, group_size=2) for _ in range(2)]
        reply = HTTP.post(url, json={"prompt": "q"})
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "0")  # it has waited
        for session in sessions:
            asked(session, [user("1")])
            rewarded(session)
        with stream.take(1, timeout=20) as lease:
            lease.ack()
        publisher.publish(named, version=2)
        opened(gateway.url, "q")


def test_bodies_of_any_form_break_nothing(gateway, server):
    """Valid bodies are changed at random places; each is answered, and none with status 500."""
    choose, session = random.Random(3), opened(gateway.url)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = {
        "model": MODEL,
        "messages": [
            user("1"),
            {"role": "assistant", "content": "2", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3"}]},
        ],
        "tools": [TOOL],
        "stop": ["4"],
        "stop_token_ids": [4],
        "max_tokens": 2,
        "stream_options": {"include_usage": True},
    }
    blocks = [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]
    messages = {
        "model": MODEL,
        "system": "1",
        "messages": [user("1"), {"role": "user", "content": blocks}],
        "tools": [LOOK],
        "max_tokens": 2,
    }
    text = {"model": MODEL, "prompt": "12", "max_tokens": 2, "stop": "4"}
    deep: Any = []
    for _ in range(70):
        deep = [deep]
    wrong = [None, True, 0, -1, 2**70, 1e300, "", "é\u2028\0", [], {}, [[]], [None], deep, {"a": 1}]

    def changed(value: Any) -> Any:
        if not isinstance(value, (dict, list)) or not value or choose.random() < 0.2:
            return choose.choice(wrong)
        keys = list(value) if isinstance(value, dict) else range(len(value))
        at = choose.choice(list(keys))
        copy = value.copy()
        copy[at] = changed(value[at])
        return copy

    statuses: dict[int, int] = {}
    for _ in range(400):
        path, body = choose.choice(
            [("chat/completions", chat), ("messages", messages), ("completions", text)]
        )
        data = json.dumps(changed(body)).encode()
        if choose.random() < 0.2:
            at = choose.randrange(len(data))
            data = data[:at] + bytes([choose.randrange(256)]) + data[at + 1 :]
        headers = {"content-type": "application/json"}
        reply = HTTP.post(f"{session}/v1/{path}", content=data, headers=headers)
        statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
        assert reply.status_code in (200, 400, 503), (data, reply.text)  # 503: the server's own
    assert statuses[400] > 100 < statuses[200] + statuses[400]
    for path in ("reward", "v1/chat/completions"):
        assert (
            HTTP.post(f"{session}/{path}", content=b"[" * 10**6, headers=headers).status_code == 400
        )
    for reward in (None, "1", 10**400, {}):
        failed(400, f"{session}/reward", {"reward": reward})
    failed(400, f"{session}/reward", {"reward": 1, "extras": {"a": 2**70}})
    for body in ({}, {"prompt": 1}, {"prompt": "p", "group_size": 0}, {"prompt": "p", "tags": [1]}):
        failed(400, f"{gateway.url}/sessions", body)
    failed(400, f"{gateway.url}/sessions", {"prompt": "p", "tags": {"a": []}})
    for url, most in ((f"{session}/v1/messages", 2**25), (f"{session}/reward", 2**20)):
        too_much = b'{"a": "' + b"1" * most + b'"}'
        assert HTTP.post(url, content=too_much, headers=headers).status_code == 413


def test_a_killed_gateway_loses_and_repeats_no_turn(server, client, stream, publish, namespace):
    openai = pytest.importorskip("openai")
    one = GatewayProcess(server.redis_url, server.url, namespace=namespace)
    session = opened(one.url)
    other = HTTP.post(f"{one.url}/sessions", json={"prompt": "p"}, headers={"host": "evil.example"})
    assert other.status_code == 400  # a page whose name was changed to this machine
    port, history = int(one.url.rpartition(":")[2]), [user("1")]
    agent = openai.OpenAI(base_url=f"{session}/v1", api_key="any", max_retries=10)
    choose, ended = random.Random(1), threading.Event()
    server.step_s = 0.02

    def talk() -> None:
        for turn in range(20):
            asked = {"model": MODEL, "messages": history, "max_tokens": 6, "seed": turn}
            message = agent.chat.completions.create(**asked).choices[0].message.model_dump()
            history.extend([message, *tool_results(message, "4"), user(str(turn))])
        ended.set()

    talking = threading.Thread(target=talk, daemon=True)
    talking.start()
    for _ in range(2):
        ended.wait(choose.uniform(0.5, 1.5))
        one.kill()
        one = GatewayProcess(server.redis_url, server.url, namespace=namespace, port=port)
    talking.join(100)
    assert ended.is_set()
    rewarded(session)
    status, errors = one.end()
    assert (status, errors) == (0, "")
    [[item]] = stream.take(1, timeout=20).groups()
    assert Record(server).check([item]) == 20
    assert len(server.samples) >= 20  # one more for each turn that was not stored


def test_a_server_without_the_calls_is_named(server, client, stream, publish, namespace):
    server.scales = False
    with pytest.raises(ConfigError, match="--enable-scale-out"):
        GatewayThread(client, server.url, namespace=namespace).__enter__()


def test_a_gateway_is_seen_as_a_maker(gateway, server, client, namespace):
    assert gateway.loaded()
    asked(opened(gateway.url), [user("1")])
    workers = StateReader(client, namespace).look().tasks[0].workers
    [worker] = [each for each in workers if each.weights_name]  # and the test's own
    assert (worker.role, worker.weights_name) == ("maker", "trainer_0")


def test_a_session_with_its_reward_samples_nothing_more(gateway, server, stream):
    session = opened(gateway.url)
    reply = asked(session, [user("1")])
    rewarded(session)
    rewarded(session)
    assert asked(session, [user("1")]) == reply  # a retry
    body = {"model": MODEL, "messages": [user("2")]}
    failed(409, f"{session}/v1/chat/completions", body)
    assert len(server.samples) == 1
    assert "no turn" in failed(400, f"{opened(gateway.url)}/reward", {"reward": 1})


def test_the_command_asks_for_a_token_where_others_reach_it(server, run):
    arguments = ("--engine", server.url, "--task", "agents", "--weights", "trainer_0")
    status, _, errors = run("gateway", *arguments, "--host", "0.0.0.0", "--port", 0)
    assert status == 2
    assert "REDRB_GATEWAY_TOKEN" in errors
    public = ("--port", 0, "--public-url")
    status, _, errors = run("gateway", *arguments, *public, "https://gateway.example")
    assert status == 2
    assert "REDRB_GATEWAY_TOKEN" in errors
    for wrong in ("gateway.example", "ftp://gateway.example", "https://", "http://[::1"):
        status, _, errors = run("gateway", *arguments, *public, wrong)
        assert status == 2
        assert "--public-url" in errors
    status, _, errors = run("gateway", *arguments, "--port", 0)
    assert status == 2
    assert "agents" in errors  # there is no such task yet


def test_a_session_lives_as_long_as_its_turn(server, client, stream, publish, namespace):
    with GatewayThread(client, server.url, namespace=namespace, timeout_s=0.6) as gateway:
        session = opened(gateway.url)
        server.step_s = 0.5
        asked(session, [user("1")], max_tokens=4, stop_token_ids=[])
        rewarded(session)
    assert len(stream.take(1, timeout=20).items()) == 1


def test_sessions_that_wait_to_begin_delay_no_reward(
    server, client, publish, namespace, monkeypatch
):
    monkeypatch.setattr("redrb.gateway.limits.MOST_CALLS", 1)
    monkeypatch.setattr("redrb.gateway.limits.WAIT_S", 3.0)
    settings = {"max_staleness": 0, "groups_per_version": 1, "weights": "trainer_0"}
    with (
        ExperienceStream(client, "agents", namespace=namespace, **settings),
        GatewayThread(client, server.url, namespace=namespace) as gateway,
        ThreadPoolExecutor() as pool,
    ):
        session = opened(gateway.url)
        asked(session, [user("1")])
        url, body = f"{gateway.url}/sessions", {"prompt": "q"}
        waiting = [pool.submit(failed, 503, url, body) for _ in range(2)]
        rewarded(session)
        assert not any(each.done() for each in waiting)
        said = [each.result(30) for each in waiting]
        assert any("cannot answer now" in each for each in said)  # it waited for a place
        assert any("no right" in each for each in said)


def test_whoever_has_gone_begins_no_session(server, client, namespace, monkeypatch):
    settings = {"max_staleness": 0, "groups_per_version": 1, "weights": "trainer_0"}
    with (
        ExperienceStream(client, "agents", namespace=namespace, **settings) as stream,
        GatewayThread(client, server.url, namespace=namespace) as gateway,
    ):
        gone = threading.Event()
        loaded = gateway.gateway._until_loaded

        async def left() -> None:
            await asyncio.to_thread(gone.wait, 30)
            await loaded()

        monkeypatch.setattr(gateway.gateway, "_until_loaded", left)
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(f"{gateway.url}/sessions", json={"prompt": "p"}, timeout=0.3)
        publisher = WeightPublisher(client, "trainer_0", namespace=namespace)
        named = {f"actor.{name}": each for name, each in MODELS[1].state_dict().items()}
        publisher.publish(named, version=1)
        assert gateway.loaded()
        gone.set()
        opened(gateway.url)  # takes the only right
        assert stream.stats().admission.granted == 1


def test_whoever_goes_while_a_right_is_waited_for_leaves_no_session(
    gateway, server, stream, monkeypatch
):
    began, gone, dropped = threading.Event(), threading.Event(), threading.Event()
    store = gateway.gateway._store
    opening, dropping = store.open, store.drop

    def left(*given: Any, **options: Any) -> Any:
        began.set()
        assert gone.wait(30)
        return opening(*given, **options)

    def drop(name: str, **options: Any) -> None:
        dropping(name, **options)
        dropped.set()

    monkeypatch.setattr(store, "open", left)
    monkeypatch.setattr(store, "drop", drop)
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(f"{gateway.url}/sessions", json={"prompt": "p"}, timeout=1)
    assert began.wait(30)
    gone.set()
    assert dropped.wait(30)


def sent(url: str, head: str, body: bytes = b"") -> socket.socket:
    """Send a part of a request of 1000 bytes."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=30)
    lines = [
        f"POST {parts.path}{head} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
    ]
    connection.sendall("\r\n".join([*lines, "content-length: 1000", "", ""]).encode() + body)
    return connection


def test_the_body_of_an_unknown_session_is_not_waited_for(gateway):
    for path in ("v1/chat/completions", "reward"):
        with sent(gateway.url, f"/s/a.b/{path}") as connection:
            assert b" 404 " in connection.recv(100)


def test_all_bodies_have_a_bound_together(gateway, server, monkeypatch):
    session = opened(gateway.url)
    monkeypatch.setattr("redrb.gateway.limits.ALL_BYTES", 1000)
    body = {"model": MODEL, "messages": [user("1" * 300)], "max_tokens": 2}
    with sent(session, "/v1/messages", b"1" * 900):
        while gateway.gateway._bodies.held != 900:
            time.sleep(0.01)
        assert "again" in failed(503, f"{session}/v1/chat/completions", body)
    while gateway.gateway._bodies.held:  # a body that breaks off holds nothing
        time.sleep(0.01)
    assert asked(session, [user("1" * 300)])


def test_a_body_that_breaks_off_is_no_error_of_the_gateway(
    server, client, stream, publish, namespace
):
    one = GatewayProcess(server.redis_url, server.url, namespace=namespace)
    session = opened(one.url)
    sent(session, "/v1/messages", b"1").close()
    assert HTTP.get(f"{session}/v1/models").status_code == 200  # the gateway has noticed it
    assert one.end() == (0, "")


def test_a_server_that_is_away_for_a_moment_is_asked_again(gateway, server, stream):
    session = opened(gateway.url)
    paths = ("/v1/chat/completions/render", "/inference/v1/generate")
    server.fails = dict.fromkeys((*paths, "/v1/chat/completions/derender"), 503)
    first = asked(session, [user("1")])["choices"][0]["message"]
    server.fails = dict.fromkeys((*paths, "/v1/chat/completions/derender"), 503)
    asked(session, [user("1"), first, *tool_results(first, "4"), user("2")])
    server.fails = dict.fromkeys(("/tokenize", "/v1/completions/derender"), 503)
    body = {"model": MODEL, "prompt": "1"}
    assert HTTP.post(f"{session}/v1/completions", json=body).status_code == 200
    assert not server.fails
    rewarded(session)
    [group] = stream.take(1, timeout=20).groups()
    assert Record(server).check(group) == len(server.samples) == 3


@pytest.mark.parametrize("status", [400, 500])
def test_a_reply_that_no_parser_takes_is_its_text(gateway, server, stream, status, caplog):
    session = opened(gateway.url)
    server.always_fails = {"/v1/chat/completions/derender": status}
    reply = asked(session, [user("1")], tools=[TOOL])["choices"][0]
    tokens = server.samples[0].tokens
    assert reply["message"]["content"] == text_of(tokens[:-1] if tokens[-1] == END else tokens)
    assert "is given as its text" in caplog.text
    assert "is away" not in caplog.text
    asked(session, [user("1"), reply["message"], user("2")], tools=[TOOL])
    rewarded(session)
    [[item]] = stream.take(1, timeout=20).groups()
    assert Record(server).check([item]) == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StoreDenied("no rights at 127.0.0.1"), 500),
        (DecodeError("damaged at 127.0.0.1"), 500),
        (StoreUnavailable("away: 127.0.0.1", where="127.0.0.1"), 503),
        (StoreFull("full: 127.0.0.1"), 503),
    ],
)
def test_only_what_passes_is_to_be_sent_again(gateway, monkeypatch, caplog, error, status):
    session = opened(gateway.url)

    def read(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(gateway.gateway._store, "read", read)
    monkeypatch.setattr(gateway.gateway._store, "use", read)
    said = failed(status, f"{session}/v1/chat/completions", {"model": MODEL, "messages": []})
    assert "127.0.0.1" not in said
    assert f"status {status}: {error}" in caplog.text


def test_no_error_names_the_server_or_redis(gateway, server, client, stream, namespace, caplog):
    session = opened(gateway.url)
    url, body = f"{session}/v1/chat/completions", {"model": MODEL, "messages": [user("1")]}
    server.fails = {"/v1/chat/completions/render": 400}
    said = [failed(400, url, body)]
    gateway.gateway._chat.engine._retry_s = 0.0
    server.fails = {"/v1/chat/completions/render": 503}
    said.append(failed(503, url, body))
    ExperienceStream(client, "agents", namespace=f"{namespace}2").close()
    stream.clear()
    said.append(failed(500, f"{gateway.url}/sessions", {"prompt": "p"}))
    assert not any("127.0.0.1" in each or namespace in each for each in said)
    assert "There is one in namespace" in caplog.text
    assert "it fails" in said[0]
    assert f"{server.url}/v1/chat/completions/render answered 503" in caplog.text


def test_a_gateway_whose_engine_is_away_says_so_to_those_who_look(gateway, server):
    session, worker = opened(gateway.url), gateway.gateway._worker
    server.end()

    def waits_for() -> tuple[str, str]:
        said = msgspec.msgpack.decode(worker.announcement(), type=Announcement)
        return said.waits_for, said.engine

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(asked, session, [user("1")])
        until(lambda: waits_for() == ("engine", server.url))
        server.start()
        asking.result(60)
    assert waits_for() == ("", server.url)


def test_the_end_of_a_gateway_waits_for_no_right_and_leaves_no_session(
    server, client, publish, namespace
):
    settings = {"max_staleness": 0, "groups_per_version": 1, "weights": "trainer_0"}
    with ExperienceStream(client, "agents", namespace=namespace, **settings) as stream:
        one = GatewayProcess(server.redis_url, server.url, namespace=namespace)
        opened(one.url)  # takes the only right
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(HTTP.post, f"{one.url}/sessions", json={"prompt": "q"})
            until(lambda: stream.stats().admission.waiting)
            began = time.monotonic()
            assert one.end() == (0, "")
            assert time.monotonic() - began < 8  # its wait lasts 10
            assert waiting.result(30).status_code == 503
        stats = stream.stats()
        assert (stats.admission.granted, stats.sessions.open) == (1, 1)


def test_a_gateway_that_ends_begins_no_session(gateway, stream):
    gateway.gateway._stop.ask("the gateway ends")
    failed(503, f"{gateway.url}/sessions", {"prompt": "p"})
    assert stream.stats().sessions is None


@pytest.mark.parametrize(("timeout_s", "looks"), [(60.0, 3), (600.0, 1)])
def test_a_session_is_looked_for_if_it_may_be_over_before_it_is_read(
    server, client, stream, publish, namespace, monkeypatch, timeout_s, looks
):
    with GatewayThread(client, server.url, namespace=namespace, timeout_s=timeout_s) as gateway:
        store, used = gateway.gateway._store, []
        use = store.use

        def noted(name: str) -> None:
            used.append(name)
            use(name)

        monkeypatch.setattr(store, "use", noted)
        session = opened(gateway.url)
        for _ in range(3):
            asked(session, [user("1")])
        assert len(used) == looks


def test_a_session_that_was_used_is_not_looked_for_before_each_body(gateway, server, monkeypatch):
    monkeypatch.setattr("redrb.gateway.app.MOST_KNOWN", 1)
    store, used = gateway.gateway._store, []
    use = store.use

    def noted(name: str) -> None:
        used.append(name)
        use(name)

    monkeypatch.setattr(store, "use", noted)
    one, other = opened(gateway.url), opened(gateway.url, "q")
    first = asked(one, [user("1")])["choices"][0]["message"]
    asked(one, [user("1"), first, *tool_results(first, "4"), user("2")])
    assert len(used) == 1
    asked(other, [user("1")])
    asked(one, [user("3")])
    assert used == [used[0], used[1], used[0]]  # of one session only it knows that it is there
    store.drop(used[0])  # as another gateway does
    body = {"model": MODEL, "messages": [user("1")]}
    failed(404, f"{one}/v1/chat/completions", body)
    failed(404, f"{one}/reward", {"reward": 1})
    assert HTTP.delete(other).status_code == 204
    failed(404, f"{other}/v1/messages", {**body, "max_tokens": 2})
    assert len(used) == 5
