"""`GatewayClient`: which requests it sends again, and when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from redrb.errors import ConfigError, EngineError
from redrb.gateway import client as module
from redrb.gateway.client import GatewayClient
from redrb.http_client import Http, HttpReply

URL = "http://gateway:8123"
SESSION = f"{URL}/s/1.secret"


def replied(status: int, body: Any) -> HttpReply:
    data = body if isinstance(body, str) else json.dumps(body)
    return HttpReply(status, {"retry-after": "5"} if status == 503 else {}, data.encode())


AGAIN = replied(503, "no right")
OPENED = replied(201, {"url": f"{SESSION}/v1", "weight_version": 3})
LOST = aiohttp.ServerDisconnectedError("broken off")
UNSENT = aiohttp.ConnectionTimeoutError("refused")


@dataclass
class Asked:
    method: str
    url: str
    body: Any
    headers: dict[str, str]
    timeout_s: float


class Gateway(Http):
    """Answers with the replies of a list, and keeps the requests and pauses."""

    def __init__(self, *replies: HttpReply | Exception) -> None:
        super().__init__()
        self.replies = list(replies)
        self.requests: list[Asked] = []
        self.pauses: list[float] = []

    async def request(
        self, method: str, url: str, body: Any = None, *, headers: Any, timeout_s: float
    ) -> HttpReply:
        self.requests.append(Asked(method, url, body, headers, timeout_s))
        reply = self.replies.pop(0) if self.replies else replied(200, {})
        if isinstance(reply, Exception):
            raise reply
        return reply

    @property
    def asked(self) -> list[str]:
        return [f"{each.method} {urlsplit(each.url).path}" for each in self.requests]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(gateway: Gateway, work: Callable[[GatewayClient], Any], **options: Any) -> Any:
        async def pause(seconds: float) -> None:
            gateway.pauses.append(seconds)

        async def main() -> Any:
            async with GatewayClient(URL, **options) as client:
                client._http = gateway
                return await work(client)

        with monkeypatch.context() as patch:
            patch.setattr(module.asyncio, "sleep", pause)
            return asyncio.run(main())

    return run


async def one_reward(client: GatewayClient) -> int | None:
    async with client.session("p", group_size=2) as session:
        await session.reward(1)
    return session.weight_version


def test_a_session_is_asked_for_again_after_the_pause_that_the_gateway_wants(run):
    gateway = Gateway(AGAIN, AGAIN, UNSENT, OPENED)
    assert run(gateway, one_reward) == 3
    assert gateway.asked == ["POST /sessions"] * 4 + ["POST /s/1.secret/reward"]
    assert [5 <= each <= 5.1 for each in gateway.pauses] == [True, True, False]
    body = gateway.requests[0].body
    assert (body["prompt"], body["group_size"], body["least"]) == ("p", 2, None)


def test_a_session_that_may_have_been_opened_is_asked_for_with_the_same_key(run):
    async def work(client: GatewayClient) -> None:
        await one_reward(client)
        await one_reward(client)

    reward = replied(200, {})
    gateway = Gateway(LOST, AGAIN, OPENED, reward, LOST, OPENED)
    run(gateway, work)
    one, two = ["POST /sessions"] * 3, ["POST /sessions"] * 2
    assert gateway.asked == [*one, "POST /s/1.secret/reward", *two, "POST /s/1.secret/reward"]
    keys = [each.headers.get("idempotency-key") for each in gateway.requests]
    assert keys == [*keys[:1] * 3, None, *keys[4:5] * 2, None]
    assert len(set(keys)) == 3
    assert all(len(each) >= 32 for each in keys if each)


@pytest.mark.parametrize(
    ("replies", "asked"),
    [
        ((OPENED,), ["POST /sessions", "DELETE /s/1.secret"]),
        ((AGAIN, OPENED), ["POST /sessions"] * 2 + ["DELETE /s/1.secret"]),
        ((OPENED, replied(404, "")), ["POST /sessions", "DELETE /s/1.secret"]),
        ((replied(400, "no"),), ["POST /sessions"]),
        ((AGAIN, replied(400, "no")), ["POST /sessions"] * 2),
    ],
    ids=["opened", "opened later", "and gone", "refused", "refused later"],
)
def test_a_session_whose_opener_is_cancelled_meanwhile_is_dropped(run, replies, asked):
    class Cancels(Gateway):
        """The opener is cancelled while the first reply is on its way."""

        async def request(self, method: str, *given: Any, **options: Any) -> HttpReply:
            reply = await super().request(method, *given, **options)
            if method == "POST":
                if len(self.requests) == 1:
                    opener.cancel()
                event = asyncio.Event()
                asyncio.get_running_loop().call_later(0.01, event.set)
                await event.wait()
            return reply

    opener: asyncio.Task[int | None]

    async def work(client: GatewayClient) -> None:
        nonlocal opener
        opener = asyncio.create_task(one_reward(client))
        with pytest.raises(asyncio.CancelledError):
            await opener

    gateway = Cancels(*replies)
    run(gateway, work)
    assert gateway.asked == asked


def test_an_opener_that_is_cancelled_waits_a_moment_only(run, monkeypatch):
    monkeypatch.setattr(module, "LATE_S", 0.05)
    ended: list[bool] = []

    class Waits(Gateway):
        async def request(self, *given: Any, **options: Any) -> HttpReply:
            await super().request(*given, **options)
            opener.cancel()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)
            raise AssertionError

    opener: asyncio.Task[int | None]

    async def work(client: GatewayClient) -> None:
        nonlocal opener
        opener = asyncio.create_task(one_reward(client))
        with pytest.raises(asyncio.CancelledError):
            await opener

    gateway = Waits()
    run(gateway, work)
    assert (gateway.asked, ended) == (["POST /sessions"], [True])


def test_a_reward_and_a_turn_are_sent_again(run):
    async def work(client: GatewayClient) -> Any:
        async with client.session("p") as session:
            message = await session.chat([{"role": "user", "content": "1"}])
            await session.reward(1)
        return message

    models = replied(200, {"data": [{"id": "tiny"}]})
    turn = replied(200, {"choices": [{"message": {"content": "2"}}]})
    gateway = Gateway(OPENED, LOST, models, LOST, AGAIN, turn, LOST, UNSENT)
    assert run(gateway, work) == {"content": "2"}
    assert gateway.asked == [
        "POST /sessions",
        *["GET /s/1.secret/v1/models"] * 2,
        *["POST /s/1.secret/v1/chat/completions"] * 3,
        *["POST /s/1.secret/reward"] * 3,
    ]
    assert gateway.requests[5].body["model"] == "tiny"


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_what_a_busy_gateway_or_its_balancer_answers_is_sent_again(run, status):
    gateway = Gateway(replied(status, "no"), OPENED, replied(status, "no"))
    run(gateway, one_reward)
    assert gateway.asked == ["POST /sessions"] * 2 + ["POST /s/1.secret/reward"] * 2


@pytest.mark.parametrize("status", [400, 401, 404, 409, 500])
def test_a_refusal_is_not_sent_again(run, status):
    gateway = Gateway(OPENED, replied(status, "no"))
    with pytest.raises(EngineError, match=f"{status}: no") as caught:
        run(gateway, one_reward)
    assert caught.value.status == status
    assert gateway.asked[1:] == ["POST /s/1.secret/reward", "DELETE /s/1.secret"]
    assert "secret" not in str(caught.value)


def test_the_time_to_send_again_ends(run):
    gateway = Gateway(*[AGAIN] * 3)
    with pytest.raises(EngineError, match="503"):
        run(gateway, one_reward, wait_s=0)
    assert gateway.asked == ["POST /sessions"]


def test_the_agents_error_is_raised_although_the_session_cannot_be_dropped(run):
    async def work(client: GatewayClient) -> None:
        async with client.session("p"):
            raise ZeroDivisionError("the agent's")

    gateway = Gateway(OPENED, replied(500, "no"))
    with pytest.raises(ZeroDivisionError) as caught:
        run(gateway, work)
    assert gateway.asked == ["POST /sessions", "DELETE /s/1.secret"]
    assert "500: no" in caught.value.__notes__[0]
    most = [each.timeout_s for each in gateway.requests]
    assert most == [module.TURN_S, module.DROP_S]  # a silent gateway holds up no agent's end


def test_only_the_request_for_a_session_has_the_token(run):
    gateway = Gateway(OPENED)
    run(gateway, one_reward, token="t0ken")
    found = [each.headers.get("authorization") for each in gateway.requests]
    assert found == ["Bearer t0ken", None]


@pytest.mark.parametrize("text", ["", "-1", "1e9", "soon", "²", "99999999999"])
def test_a_pause_that_a_gateway_asks_for_is_bounded(text):
    assert 0 <= module._seconds(text) <= module.MOST_PAUSE_S


@pytest.mark.parametrize(
    "reply",
    [{}, {"url": 3}, {"url": None}, {"url": "ftp://x/v1"}, {"url": f"{SESSION}/v1", "x": 1}],
)
def test_a_session_without_a_url_is_an_error(run, reply):
    gateway = Gateway(replied(201, reply))
    if "x" in reply:
        assert run(gateway, one_reward) is None
    else:
        with pytest.raises(EngineError, match="session"):
            run(gateway, one_reward)


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [{}]}, {"data": 1}])
def test_a_gateway_without_a_model_is_an_error(run, models):
    async def work(client: GatewayClient) -> None:
        await client.model(f"{SESSION}/v1")

    with pytest.raises(EngineError, match="model"):
        run(Gateway(replied(200, models)), work)


def test_addresses_and_rewards_are_checked(run):
    with pytest.raises(ConfigError, match="address"):
        GatewayClient("localhost:8123")

    async def work(client: GatewayClient) -> None:
        async with client.session("p") as session:
            await session.reward(float("nan"))

    gateway = Gateway(OPENED)
    with pytest.raises(ConfigError, match="reward"):
        run(gateway, work)
    assert gateway.asked == ["POST /sessions", "DELETE /s/1.secret"]
