"""Agents of a real vLLM behind the gateway: its chat template, its parsers, its weights."""

from __future__ import annotations

import atexit
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

import redrb
from redrb import BufferItem, Client, ExperienceStream, WeightPublisher
from tests.gateways import GatewayThread
from tests.real_engines.conftest import VLLM, RealVLLM

BACKEND = """--weight-transfer-config={"backend": "redrb"}"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not VLLM, reason="needs VLLM: a folder with bin/vllm and model"),
]

TOLERANCE = 0.05
"""Of a log-probability in bfloat16, computed in two ways. Those of two policies differ by 1."""

NAME = "trainer_0"
TEMPLATES = Path(str(getattr(find_spec("trl"), "origin", ""))).parent / "chat_templates"
HTTP = httpx.Client(timeout=120)
atexit.register(HTTP.close)


@pytest.fixture
def client() -> Iterator[Client]:
    with redrb.connect("embedded://") as client:
        yield client


@pytest.fixture
def vllm(client: Client, tmp_path: Path) -> Iterator[RealVLLM]:
    parsers = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--reasoning-parser=qwen3")
    template = f"--chat-template={TEMPLATES / 'qwen3.jinja'}"  # without reasoning of earlier turns
    arguments = ("--enable-scale-out", BACKEND, "--max-model-len=512", template, *parsers)
    server = RealVLLM(Path(VLLM), tmp_path / "log", *arguments, REDRB_URL=client.url)
    server.start()
    yield server
    server.close()


@torch.no_grad()
def check(items: list[BufferItem], policies: dict[int, PreTrainedModel]) -> set[int]:
    """Compare each trained token with the version that it names; returns these versions."""
    seen: set[int] = set()
    for item in items:
        assert item.sequences is not None
        assert item.action_mask is not None
        assert item.token_versions is not None
        assert item.action_log_probs is not None
        tokens, count = item.sequences, len(item.action_mask)
        for version in item.token_versions[item.action_mask].unique().tolist():
            table = policies[version](tokens[None]).logits[0].float().log_softmax(-1)
            expected = table[:-1].gather(1, tokens[1:, None])[-count:, 0]
            chosen = item.action_mask & (item.token_versions == version)
            assert (expected - item.action_log_probs)[chosen].abs().max() < TOLERANCE
            seen.add(version)
    return seen


def test_sessions_of_agents_are_what_the_policies_sample(
    vllm: RealVLLM, client: Client, namespace: str
) -> None:
    policies = {version: vllm.policy(version) for version in (1, 2, 3)}
    publisher = WeightPublisher(client, NAME, namespace=namespace)

    def publish(version: int) -> None:
        state = policies[version].state_dict()
        publisher.publish({f"actor.{name}": each for name, each in state.items()}, version=version)

    publish(1)
    choose, tokens, sessions = random.Random(5), 0, 12
    with (
        ExperienceStream(client, "agents", namespace=namespace) as stream,
        GatewayThread(client, vllm.url, namespace=namespace) as gateway,
    ):
        stream.join_group()
        for number in range(sessions):
            if number in (4, 8):
                publish(number // 4 + 1)
            opened = HTTP.post(f"{gateway.url}/sessions", json={"prompt": str(number)}).json()
            url, anthropic = opened["url"], number % 3 == 2
            history: list[dict[str, Any]] = [{"role": "user", "content": str(number)}]
            for _ in range(4):
                body: dict[str, Any] = {
                    "model": str(vllm.model),
                    "messages": history,
                    "max_tokens": 16,
                }
                if number % 3 == 1:
                    body["stop"] = ["e"]
                path = "messages" if anthropic else "chat/completions"
                reply = HTTP.post(f"{url}/{path}", json=body)
                assert reply.status_code == 200, reply.text
                found = reply.json()
                assert HTTP.post(f"{url}/{path}", json=body).json() == found  # a retry
                if anthropic:
                    message = {name: found[name] for name in ("role", "content")}
                    tokens += found["usage"]["output_tokens"]
                else:
                    message = found["choices"][0]["message"]
                    tokens += found["usage"]["completion_tokens"]
                text = {"role": "user", "content": str(choose.randrange(100))}
                history += [message, text]
            reward = HTTP.post(url.removesuffix("v1") + "reward", json={"reward": 1.0})
            assert reward.status_code == 200
        url = HTTP.post(f"{gateway.url}/sessions", json={"prompt": "text"}).json()["url"]
        text = "1 plus 2"
        for _ in range(4):
            body = {"model": str(vllm.model), "prompt": text, "max_tokens": 16, "stop": ["e"]}
            reply = HTTP.post(f"{url}/completions", json=body)
            assert reply.status_code == 200, reply.text
            [choice] = reply.json()["choices"]
            assert "e" not in choice["text"]
            text += choice["text"] + "e" * (choice["finish_reason"] == "stop") + " 7"
        HTTP.post(url.removesuffix("v1") + "reward", json={"reward": 1.0})
        *groups, texts = stream.take(sessions + 1, timeout=60).groups()
    assert check(texts, policies) == {3}
    assert [len(group) for group in groups] == [1] * sessions  # none has branched
    assert set().union(*(check(group, policies) for group in groups)) == {1, 2, 3}
    assert sum(int(item.action_mask.sum()) for [item] in groups) == tokens
