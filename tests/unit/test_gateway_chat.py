"""A gateway's server: limits of what is sampled hold, and what broke off leaves nothing open."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from redrb.errors import ConfigError
from redrb.gateway.chat import ChatServer
from redrb.gateway.messages import ask_of
from redrb.recipe import agent_maker
from redrb.recipe.agent_maker import AgentRecipeMaker
from redrb.train.engines.http import JsonClient

USER = {"model": "m", "messages": [{"role": "user", "content": "1"}]}


@pytest.mark.parametrize(
    ("asked", "limit", "given", "most"),
    [
        (None, None, 1, 99),
        (None, 50, 1, 50),
        (32000, 50, 1, 50),
        (20, 50, 1, 20),
        (20, None, 1, 20),
        (20, 50, 90, 10),
        (None, 50, 99, 1),
    ],
)
def test_a_turn_has_the_least_of_its_limits(asked, limit, given, most):
    found: list[int] = []

    async def generate(_: Any, *, max_new_tokens: int, **_sampling: Any) -> None:
        found.append(max_new_tokens)

    unused: Any = None
    engine: Any = SimpleNamespace(generate=generate)
    chat = ChatServer(unused, engine, "m", 100)
    chat.max_tokens = limit
    body = USER | ({"max_tokens": asked} if asked else {})
    asyncio.run(chat.sample(ask_of("messages", json.dumps(body).encode()), [1] * given))
    assert found == [most]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of clients that were closed."""
    found: list[str] = []
    close = JsonClient.close

    async def noted(client: JsonClient) -> None:
        found.append(client.where)
        await close(client)

    monkeypatch.setattr(JsonClient, "close", noted)
    return found


def test_a_server_whose_opening_breaks_off_leaves_no_client(monkeypatch, closed):
    async def main() -> None:
        asked = asyncio.Event()

        async def request(*_: Any) -> None:
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(JsonClient, "request", request)
        opening = asyncio.create_task(ChatServer.open("http://127.0.0.1:9"))
        await asked.wait()
        opening.cancel()
        await asyncio.wait((opening,))
        assert opening.cancelled()

    asyncio.run(main())
    assert closed == ["http://127.0.0.1:9"]


def test_a_maker_whose_server_cannot_be_opened_leaves_no_client(monkeypatch, closed):
    async def refuses(*_: Any) -> None:
        raise ConfigError("it cannot do it")

    monkeypatch.setattr(ChatServer, "open", refuses)
    maker: Any = object.__new__(AgentRecipeMaker)
    maker._worker = SimpleNamespace()
    maker._recipe = SimpleNamespace(
        engine="vllm", engine_url="http://127.0.0.1:9", model=lambda: "m"
    )
    with pytest.raises(ConfigError):
        asyncio.run(maker._opened())
    assert closed == ["http://127.0.0.1:9"]


def test_a_maker_that_ends_while_its_server_was_just_opened_leaves_no_client(monkeypatch):
    closed: list[str] = []

    class Opened:
        async def close(self) -> None:
            closed.append("chat")

    class Server:
        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: object) -> None:
            closed.append("engine")
            raise asyncio.CancelledError

        async def repeated(self, _: Any) -> Opened:
            return Opened()

    monkeypatch.setattr(agent_maker, "engine_of", lambda _: Server())
    maker: Any = object.__new__(AgentRecipeMaker)
    maker._worker = SimpleNamespace()
    maker._recipe = SimpleNamespace(engine_url="http://127.0.0.1:9", model=lambda: "m")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(maker._opened())
    assert closed == ["engine", "chat"]
