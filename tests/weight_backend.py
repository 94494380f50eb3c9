"""`EngineServer` as a vLLM 0.32 with redrb's weight transfer backend: it fetches from Redis itself.

It has `/inference/v1/generate`, which tells the weights of each token, keeps requests in flight
over a pause, and can be ended, started again at its port, or hang.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from aiohttp import web

import redrb
from redrb.errors import ConfigError, RedrbError, WeightError, WeightsTorn
from redrb.train.engines.adapters import FOLDER, place
from redrb.train.engines.labels import parsed
from redrb.train.engines.vllm import NO_LORA, NO_URL, NOT_TOLD, PASSED
from redrb.weights.lora.merging import merged
from redrb.weights.lora.names import pairs
from redrb.weights.reading.catalogue import Catalogue
from redrb.weights.reading.checkpoint import Checkpoint
from redrb.weights.reading.state_copies import Adapter, PrivateCopy
from tests.engine_server import EngineServer, tiny_model


class BackendServer(EngineServer):
    """The server; `redis_url` is its variable REDRB_URL.

    Attributes:
        loaded: The version of each load that has succeeded.
        break_at: Number of tensors after which the next load breaks off.
        hangs: Whether it answers nothing any more, until this is False.
        hangs_at: Path whose next request begins to hang.
        holds: Path whose requests wait, before they do anything, until `go` is set.
        held: Set when such a request waits.
        api_key: The key that it asks for; "": none.
        mode: That of the last pause.
        in_processes: Whether its workers are processes, which changes the messages of errors.
        paused: Whether it is paused.
        unpaused: Loads that came while it was not.
        lora: Whether it takes adapters, of this rank at most; 0: none.
        adapters: Those that it has fetched, by name.
        usable: Names of those that requests may name.
        scales_out: Whether it tells the weights of each token.
    """

    def __init__(self, redis_url: str) -> None:
        super().__init__()
        self.redis_url = redis_url
        self.loaded: list[int] = []
        self.break_at: int | None = None
        self.hangs = False
        self.hangs_at = ""
        self.holds = ""
        self.held, self.go = threading.Event(), threading.Event()
        self.mode = ""
        self.in_processes = True
        self.api_key = ""
        self.unpaused = 0
        self.lora = 0
        self.scales_out = True
        self._port = 0
        self._boot()

    def _boot(self) -> None:
        """Have what a server has that has just been started."""
        self.model, self.label = tiny_model(0), "default"
        self._info: dict[str, Any] | None = None
        self._copy, self._used = PrivateCopy(), None
        self._updating = False
        self._loading = asyncio.Lock()
        self.adapters: dict[str, Adapter] = {}
        self.usable: set[str] = set()
        self._policies: dict[tuple[str, str], Any] = {}

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    def __exit__(self, *error: object) -> None:
        self.hangs = False
        self.go.set()
        super().__exit__(*error)

    def end(self) -> None:
        """End as a killed process does: nothing listens at the port any more."""
        self._epoch += 1
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(20)

    def start(self) -> None:
        """Start again at the same port, with the model on the disk."""
        self._boot()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)

    def restart(self) -> None:
        """Do as a server that ends, and starts again with the model on its disk."""
        self._boot()
        super().restart()
        self._loop.call_soon_threadsafe(self._open.set)

    async def _start(self, port: int = 0) -> None:
        await super()._start(port or self._port)
        self._port = int(self.url.rpartition(":")[2])

    @web.middleware
    async def _count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        added: dict[str, Callable[[web.Request], Any]] = {
            "/init_weight_transfer_engine": self._init,
            "/start_weight_update": self._begin,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/inference/v1/generate": self._tokens_of,
            "/health": self._health,
            "/is_paused": self._is_paused,
            "/v1/load_lora_adapter": self._add_adapter,
            "/v1/unload_lora_adapter": self._remove_adapter,
        }
        if request.path == self.hangs_at:
            self.hangs, self.hangs_at = True, ""
        while self.hangs:
            await asyncio.sleep(0.02)
        if request.path == self.holds:
            self.held.set()
            await asyncio.to_thread(self.go.wait, 60)
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            added[request.path] = _unauthorized
        try:
            counted: Any = super()._count
            answer: web.StreamResponse = await counted(request, added.get(request.path, handler))
        except RedrbError as error:  # as `redrb.compat.vllm.transfer` and vLLM do
            text = f"redrb {type(error).__name__}: {error}"
            if self.in_processes:
                cause = "please check the stack trace above for the root cause"
                text = f"Worker failed with error '{text}', {cause}"
            answer = _failed(text)
            await answer.prepare(request)
            await answer.write_eof()
            assert request.transport is not None
            request.transport.close()  # as uvicorn does after status 500, without saying so
        return answer

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _init(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        adapter = info.pop("adapter", "")
        if not (self.redis_url or info.get("url")):
            raise ConfigError(f"{NO_URL}: start it with one, or give url in init_info.")
        if info != self._info:
            self._info, self._copy = info, PrivateCopy()
        if adapter:
            if not self.lora:
                raise ConfigError(f"{NO_LORA}: start it with --enable-lora.")
            self.adapters[adapter] = await asyncio.to_thread(self._fetched_adapter, info, adapter)
        return web.json_response({"message": "Weight transfer initialized"})

    def _fetched_adapter(self, info: dict[str, Any], label: str) -> Adapter:
        named = parsed(label)
        assert named is not None
        with redrb.connect(self.redis_url or info["url"]) as client:
            catalogue = Catalogue(client, info["name"], info["namespace"])
            found = PrivateCopy().fetch(catalogue, named.version, only_adapter=True)
        if round(found.described.created_s * 1000) != named.created_ms:
            raise WeightError(f"version {named.version} is another one than was asked for.")
        assert found.adapter is not None
        return found.adapter.of(f"{info['model']}." if info["model"] else "")

    async def _add_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["lora_name"]
        assert body["lora_path"] == str(place(name).path(FOLDER))
        if name in self.usable:
            message = f"The lora adapter '{name}' has already been loaded."
            return web.json_response({"error": {"message": message}}, status=400)
        rank = max(each.r for each in self.adapters[name].configs.values())
        if rank > self.lora:
            return _failed(f"LoRA rank {rank} is greater than max_lora_rank {self.lora}.")
        self.usable.add(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _remove_adapter(self, request: web.Request) -> web.Response:
        self.usable.remove((await request.json())["lora_name"])
        return web.Response(text="removed")

    def _policy(self, name: str) -> Any:
        adapter = self.adapters.get(name)
        if adapter is None:
            return self.model
        found = self._policies.get((name, self.label))
        if found is None:
            found = self._policies[name, self.label] = copy.deepcopy(self.model)
            state = found.state_dict()
            for layer, (a, b) in pairs(adapter.tensors).items():
                weight = state[f"{layer}.weight"]
                weight.copy_(merged(weight, a, b, adapter.configs[layer]))
        return found

    async def _begin(self, _: web.Request) -> web.Response:
        if self._updating:
            return _failed("start_weight_update called while a weight update is already active.")
        self._updating = True
        return web.json_response({"message": "Weight update started"})

    async def _finish(self, _: web.Request) -> web.Response:
        if not self._updating:
            return _failed("finish_weight_update called without a matching start_weight_update.")
        self._updating = False
        return web.json_response({"message": "Weight update finished"})

    async def _update(self, request: web.Request) -> web.Response:
        wanted = (await request.json())["update_info"]
        if not self._updating:
            return _failed("start_weight_update must be called before update_weights.")
        try:
            async with self._loading:
                tensors = await asyncio.to_thread(self._fetched, self._info, **wanted)
                self.unpaused += not self.paused
                self._change(tensors)
                self.loaded.append(wanted["version"])
        except BaseException:
            self._updating = False
            raise
        return web.json_response({"message": "Weights updated"})

    def _fetched(
        self, info: dict[str, Any] | None, version: int, created_s: float | None = None
    ) -> dict[str, torch.Tensor]:
        if info is None:
            raise ConfigError(f"{NOT_TOLD}, with the weights' name.")
        with redrb.connect(self.redis_url or info["url"]) as client:
            catalogue = Catalogue(client, info["name"], info["namespace"])
            used = self._used
            if used and used.version > version and catalogue.entry(used.version) == used:
                raise WeightError(f"{PASSED}, {used.version}.")
            found = self._copy.fetch(catalogue, version, with_base=True)
        if created_s is not None and found.described.created_s != created_s:
            raise WeightError(f"version {version} is another one than was asked for.")
        prefix = f"{info['model']}." if info["model"] else ""
        chosen = Checkpoint.of(found.described, found.state, found.adapter, prefix)
        self._used = found.described
        return {name: tensor.clone() for name, tensor in chosen.tensors()}

    def _change(self, tensors: dict[str, torch.Tensor]) -> None:
        stop, self.break_at = self.break_at, None
        if stop is not None:
            self.model.load_state_dict(dict(list(tensors.items())[:stop]), strict=False)
            raise WeightsTorn("loading broke off: the server has a mixture of two versions.")
        self.model.load_state_dict(tensors)

    async def _weight_info(self, request: web.Request) -> web.Response:
        async with self._loading:  # vLLM's engine answers between two steps
            return await super()._weight_info(request)

    async def _pause(self, request: web.Request) -> web.Response:
        self.mode = request.query.get("mode", "abort")
        self._open.clear()
        if self.mode == "abort":
            self._epoch += 1
        while self.mode == "wait" and self.running:
            await asyncio.sleep(0.01)
        return web.json_response({"status": "paused"})

    async def _stand(self, number: int, epoch: int) -> None:
        if self.stands_from is None or number < self.stands_from:
            return
        self.standing += 1
        while epoch == self._epoch and self.stands_from is not None:
            await asyncio.sleep(0.01)
        self.standing -= 1

    async def _before_token(self, labels: list[str]) -> None:
        if self.mode == "keep":
            await self._open.wait()
        await super()._before_token(labels)

    async def _tokens_of(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.scales_out:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.bodies.append(body)
        name = body["model"]
        if name.startswith("version-") and name not in self.usable:
            message = f"The model `{name}` does not exist. Valid aliases: tiny."
            return web.json_response({"error": {"message": message}}, status=404)
        given, labels = body["sampling_params"], []
        tokens, log_probs, finish = await self._sampled(
            body["token_ids"],
            given["max_tokens"],
            given.get("temperature", 1.0),
            given.get("stop_token_ids", []),
            labels,
            name,
        )
        spans: list[dict[str, Any]] = []
        for at, label in enumerate(labels[: len(tokens)]):
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": label, "start": at, "end": at + 1})
        content = [
            {"token_id": token, "logprob": number, "rank": None, "top_logprobs": []}
            for token, number in zip(tokens, log_probs, strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": finish,
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        torn, self.torn = self.torn, {}
        return web.json_response({"choices": [choice | torn]})


async def _unauthorized(_: web.Request) -> web.Response:
    return web.json_response({"error": "Unauthorized"}, status=401)


def _failed(text: str) -> web.Response:
    message = f"Call to collective_rpc method failed: {text}"
    return web.json_response({"error": {"message": message}}, status=500)
