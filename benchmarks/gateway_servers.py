"""Processes of the benchmark of gateways: a gateway, an imitated vLLM, and agents."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import redrb
from redrb.gateway.app import Gateway
from redrb.gateway.chat import ChatServer
from redrb.gateway.store import SessionStore
from redrb.http_client import Http
from redrb.stream import ExperienceStream
from redrb.train.engines import EngineWeights
from redrb.watch.page.server import bound_socket

MODEL = "imitated"
MOST_TOKENS = 2**20
END = 2
SETTLE_S = 1.0
IDLE_S = 75
"""Seconds after which an idle connection is closed, as by the command."""

TASK = "agents"


class _Loop:
    """An event loop in a thread, for objects that are asked by name."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _serve(self, app: Starlette) -> str:
        """Serve an application; return its URL."""
        listening = bound_socket("127.0.0.1", 0)
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_keep_alive=IDLE_S)
        server = uvicorn.Server(config)

        async def serve() -> None:
            self._serving = asyncio.create_task(server.serve(sockets=[listening]))

        self._run(serve())
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    def close(self) -> None:
        """End this process, whatever its loop does: nobody waits for it."""
        os._exit(0)

    def processor_s(self) -> float:
        """Return the processor time of this process."""
        return time.process_time()

    def memory(self) -> int:
        """Return the bytes of this process that it shares with no other one, in a while."""
        time.sleep(SETTLE_S)
        gc.collect()
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("RssAnon"))


class Engine(_Loop):
    """Answers at once as vLLM with --enable-scale-out does; a character is a token."""

    def __init__(self) -> None:
        super().__init__()
        calls = {
            "/v1/models": self._models,
            "/v1/chat/completions/render": self._render,
            "/v1/chat/completions/derender": self._derender,
            "/inference/v1/generate": self._generate,
        }
        methods = ["GET", "POST"]
        routes = [Route(path, call, methods=methods) for path, call in calls.items()]
        self._url = self._serve(Starlette(routes=routes))

    def url(self) -> str:
        """Return its address."""
        return self._url

    async def _models(self, _: Request) -> Response:
        return _json({"data": [{"id": MODEL, "max_model_len": MOST_TOKENS}]})

    async def _render(self, request: Request) -> Response:
        body = await request.json()
        return _json({"token_ids": _rendered(body["messages"])})

    async def _derender(self, request: Request) -> Response:
        body = await request.json()
        [choice] = body["generate_response"]["choices"]
        text = "".join(chr(each) for each in choice["token_ids"][:-1])
        return _json({"choices": [{**choice, "message": {"role": "assistant", "content": text}}]})

    async def _generate(self, request: Request) -> Response:
        count = (await request.json())["sampling_params"]["max_tokens"]
        content = [{"token": "a", "logprob": -0.693147, "bytes": [97], "top_logprobs": []}] * count
        choice = {
            "token_ids": [*(97 + at % 26 for at in range(count - 1)), END],
            "logprobs": {"content": content},
            "weight_versions": [],
            "finish_reason": "stop",
        }
        return _json({"choices": [choice]})


def _rendered(messages: list[dict[str, Any]]) -> list[int]:
    found = []
    for message in messages:
        found += [1, *map(ord, message["content"]), END]
    return [*found, 1]


def _json(body: Any) -> Response:
    return Response(json.dumps(body), media_type="application/json")


class _Unchanging:
    """Stands for the weights of a server that keeps those that it has."""

    name = "weights"

    async def update(self) -> None:
        """Do nothing."""

    async def follow(self) -> None:
        """Wait for versions that do not come."""
        await asyncio.Event().wait()


class GatewayServer(_Loop):
    """A gateway, as the command runs it, but for new weights."""

    def __init__(self, redis_url: str, engine_url: str) -> None:
        super().__init__()
        stream = ExperienceStream(redrb.connect(redis_url), TASK)
        stream.join_group()

        async def made() -> Gateway:
            chat = await ChatServer.open(engine_url)
            chat.engine.version = 1
            store = SessionStore(stream, timeout_s=600)
            weights = cast(EngineWeights, _Unchanging())
            gateway = Gateway(store, chat, weights, stream.worker)
            self._running = asyncio.create_task(gateway.run())
            return gateway

        self._url = self._serve(self._run(made()).app())

    def url(self) -> str:
        """Return its address."""
        return self._url


class Agents(_Loop):
    """Agents with a session each, one after the other, all of them at the same time."""

    def gateway_turns(self, url: str, agents: int, sessions: int, turns: int, tokens: int) -> Any:
        """Let agents have sessions at a gateway; return seconds, and those of each turn."""
        return self._run(_all(_session, url, agents, sessions, turns, tokens))

    def engine_turns(self, url: str, agents: int, sessions: int, turns: int, tokens: int) -> Any:
        """Let agents send the same tokens to the engine itself."""
        return self._run(_all(_alone, url, agents, sessions, turns, tokens))


async def _all(kind: Any, url: str, agents: int, sessions: int, turns: int, tokens: int) -> Any:
    http, model = Http(), ""
    try:
        found = await http.request("GET", f"{url}/v1/models", headers={}, timeout_s=60)
        with suppress(KeyError, ValueError):  # a gateway has none outside of a session
            model = found.json()["data"][0]["id"]
        lasted: list[float] = []

        async def agent() -> None:
            for _ in range(sessions):
                await kind(http, url, model, turns, tokens, lasted)

        began = time.monotonic()
        await asyncio.gather(*(agent() for _ in range(agents)))
        return time.monotonic() - began, lasted
    finally:
        await http.close()


async def _session(
    http: Http, url: str, _: str, turns: int, tokens: int, lasted: list[float]
) -> None:
    opened = await _post(http, f"{url}/sessions", {"prompt": "p"})
    base = opened["url"]
    found = await http.request("GET", f"{base}/models", headers={}, timeout_s=60)
    model, messages = found.json()["data"][0]["id"], []
    for _turn in range(turns):
        messages.append({"role": "user", "content": "a" * 50})
        began = time.monotonic()
        body = {"model": model, "messages": messages, "max_tokens": tokens}
        reply = await _post(http, f"{base}/chat/completions", body)
        lasted.append(time.monotonic() - began)
        messages.append(reply["choices"][0]["message"])
    await _post(http, f"{base.removesuffix('/v1')}/reward", {"reward": 1.0})


async def _alone(
    http: Http, url: str, model: str, turns: int, tokens: int, lasted: list[float]
) -> None:
    history: list[int] = []
    for _ in range(turns):
        history += [1, *[97] * 50, END, 1]
        began = time.monotonic()
        sampling = {"max_tokens": tokens, "logprobs": 0, "temperature": 1.0}
        body = {"model": model, "token_ids": history, "sampling_params": sampling}
        reply = await _post(http, f"{url}/inference/v1/generate", body)
        lasted.append(time.monotonic() - began)
        history += reply["choices"][0]["token_ids"]


async def _post(http: Http, url: str, body: Any) -> Any:
    reply = await http.request("POST", url, body, headers={}, timeout_s=120)
    if reply.status >= 300:
        raise SystemExit(f"{url} answered {reply.status}: {reply.text:.500}")
    return reply.json()
