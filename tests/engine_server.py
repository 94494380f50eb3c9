"""A small inference server over HTTP, in a thread: it answers as vLLM and SGLang do.

A tiny causal model of transformers samples each token, so that log-probabilities are real.
"""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from aiohttp import web

from redrb.weights.files.safetensors import load_safetensors

VOCABULARY = 16


def tiny_model(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # it takes seconds

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def log_probs_of(model: Any, tokens: list[int], start: int, temperature: float) -> Any:
    """Return the log-probabilities of all tokens from `start` on."""
    logits = model(torch.tensor([tokens])).logits[0] / temperature
    table = logits.log_softmax(-1)
    return torch.stack([table[at - 1, tokens[at]] for at in range(start, len(tokens))])


def experts_of(tokens: list[int], dtype: str) -> np.ndarray:
    """Return the experts that tokens are routed to: three in each of two layers."""
    first = np.array([100 + 8 * token + place for place, token in enumerate(tokens)])
    return (first[:, None, None] + np.arange(6).reshape(2, 3)).astype(dtype)


def as_npy(array: np.ndarray) -> str:
    """Return an array as vLLM sends it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


class EngineServer:
    """The server; `requests` counts its calls by path, `running` its completions in flight."""

    def __init__(self) -> None:
        self.model = tiny_model(0)
        self.requests: dict[str, int] = {}
        self.bodies: list[dict[str, Any]] = []
        self.failing: list[int] = []  # statuses that answer the next requests
        self.broken_load: str | None = None  # a part of the paths that cannot be loaded
        self.aborts = False  # completions, as if somebody else had paused the server
        self.torn: dict[str, Any] = {}  # replaces parts of the next completion
        self.experts: str | None = None  # dtype of the experts that completions tell
        self.label = "default"
        self.step_s = 0.0  # time of one token
        self.running = self.peak = 0
        self.midway = threading.Event()  # some completion has three tokens
        self.stands_from: int | None = None  # completions from this number on stop at three tokens
        self.standing = 0  # completions that stopped there, until the server is paused or restarts
        self._begun = 0
        self._epoch = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._epoch += 1  # whatever stands goes on
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _end(self) -> None:
        server = self._runner.server
        for site in list(self._runner.sites):  # accept nothing more
            await site.stop()
        for _ in range(10):  # what was accepted last is made some turns of the loop later
            for connection in [] if server is None else server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await asyncio.sleep(0.005)  # the sockets are closed
        await self._runner.cleanup()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    async def _start(self, port: int = 0) -> None:
        app = web.Application(middlewares=[self._count])
        routes = {
            "/v1/completions": self._completions,
            "/generate": self._generate,
            "/pause": self._pause,
            "/pause_generation": self._pause,
            "/resume": self._resume,
            "/continue_generation": self._resume,
            "/collective_rpc": self._reload,
            "/update_weight_version": self._name,
            "/update_weights_from_disk": self._from_disk,
        }
        for path, handler in routes.items():
            app.router.add_post(path, handler)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/get_model_info", self._weight_info)
        self._open = asyncio.Event()
        self._open.set()
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()

    def restart(self) -> None:
        """Do as a server that ends, and starts again with the model on its disk."""
        self.model, self.label = tiny_model(0), "default"
        self._epoch += 1
        ended = threading.Event()

        def end() -> None:
            for connection in list(self._runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            self._loop.call_soon(ended.set)  # after the sockets are closed

        self._loop.call_soon_threadsafe(end)
        assert ended.wait(30)  # else the next request might go to a connection that ends

    @web.middleware
    async def _count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests[request.path] = self.requests.get(request.path, 0) + 1
        if self.failing:
            return web.Response(status=self.failing.pop(), text="starting")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _sampled(
        self,
        prompt: list[int],
        most: int,
        temperature: float,
        ends: list[int],
        labels: list[str] | None = None,
        name: str = "",
    ) -> tuple[list[int], list[float], str]:
        await self._open.wait()
        if self.aborts:
            return [], [], "abort"
        epoch, tokens, found = self._epoch, list(prompt), []
        number, self._begun = self._begun, self._begun + 1
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            for _ in range(most):
                await self._before_token([] if labels is None else labels)
                with torch.no_grad():
                    logits = self._policy(name)(torch.tensor([tokens])).logits[0, -1] / temperature
                table = logits.log_softmax(-1)
                chosen = int(torch.multinomial(table.exp(), 1))
                tokens.append(chosen)
                found.append(float(table[chosen]))
                if len(found) == 3:
                    self.midway.set()
                    await self._stand(number, epoch)
                await asyncio.sleep(self.step_s)
                if chosen in ends:
                    return tokens[len(prompt) :], found, "stop"
                if epoch != self._epoch:
                    return tokens[len(prompt) :], found, "abort"
            return tokens[len(prompt) :], found, "length"
        finally:
            self.running -= 1

    def _policy(self, name: str) -> Any:
        """Return the model that a request has named."""
        return self.model

    async def _before_token(self, labels: list[str]) -> None:
        labels.append(self.label)

    async def _stand(self, number: int, epoch: int) -> None:
        if self.stands_from is None or number < self.stands_from:
            return
        self.standing += 1
        while epoch == self._epoch:
            await asyncio.sleep(0.01)
        self.standing -= 1

    def until_standing(self, count: int) -> None:
        """Wait until so many completions stand at their third token."""
        deadline = time.monotonic() + 60
        while self.standing < count:
            assert time.monotonic() < deadline, f"{self.standing} of {count} completions stand"
            time.sleep(0.01)

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        assert body["logprobs"] == 1
        if not isinstance(body["prompt"][0], int):
            return web.json_response({"error": "no tokens"}, status=400)
        tokens, log_probs, finish = await self._sampled(
            body["prompt"],
            body["max_tokens"],
            body["temperature"],
            body["stop_token_ids"],
            name=body["model"],
        )
        logprobs = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": log_probs,
        }
        choice = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": finish}
        if body["return_token_ids"] and body["model"] != "older":
            choice["token_ids"] = tokens
        if self.experts is not None and tokens:
            rows = experts_of([*body["prompt"], *tokens], self.experts)
            choice["routed_experts"] = as_npy(rows[body.get("routed_experts_prompt_start", 0) : -1])
        torn, self.torn = self.torn, {}
        if torn.get("logprobs"):
            torn["logprobs"] = logprobs | torn["logprobs"]
        choice |= torn
        return web.json_response({"choices": [choice]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        assert body["return_logprob"]
        sampling = body["sampling_params"]
        tokens, log_probs, finish = await self._sampled(
            body["input_ids"],
            sampling["max_new_tokens"],
            sampling["temperature"],
            sampling["stop_token_ids"],
        )
        found = [[number, token, None] for number, token in zip(log_probs, tokens, strict=True)]
        meta = {
            "output_token_logprobs": found,
            "finish_reason": {"type": finish},
            "weight_version": self.label,
        }
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": meta})

    async def _pause(self, _: web.Request) -> web.Response:
        self._open.clear()
        self._epoch += 1
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self._open.set()
        return web.Response(text="resumed")

    def _load(self, path: str) -> None:
        assert not self._open.is_set(), "weights change while the server samples"
        self.model.load_state_dict(load_safetensors(Path(path)))

    async def _reload(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        path = body["kwargs"]["weights_path"]
        if self.broken_load is not None and self.broken_load in path:
            return web.json_response({"error": "no such file"}, status=500)
        self._load(path)
        return web.json_response({"results": [None]})

    async def _name(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.broken_load is not None and self.broken_load in body["model_path"]:
            refusal = {"success": False, "message": "no such file"}
            return web.json_response(refusal, status=400)
        self._load(body["model_path"])
        return web.json_response({"success": True, "message": "Succeeded"})
