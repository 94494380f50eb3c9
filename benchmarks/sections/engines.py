"""New weights in vLLM servers: by redrb's backend and through a folder, in full and as deltas."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import redis
from torch import nn

import redrb
from benchmarks.engine_servers import VLLM, Peak, make_model, shared_memory, vllm_servers
from benchmarks.options import Options
from benchmarks.server import private_server
from benchmarks.weights_state import Changing, state_bytes
from redrb.train.engines import EngineWeights, VLLMEngine
from redrb.train.engines.fleet import Fleet

SERVERS = 2
WIDTH, LAYERS = 1024, 6
QUICK_WIDTH, QUICK_LAYERS = 256, 2
LOADS_S = 120.0
"""Longest time for a version to reach all servers."""

WAYS, KINDS = ("backend", "folder"), ("full", "delta")


class FolderEngine(VLLMEngine):
    """Loads folders, although its server has the backend: both ways use the same servers."""

    async def receives(self, where: Mapping[str, Any], url: str) -> bool:
        """Say that the server fetches nothing."""
        return False


class Arrivals(logging.Handler):
    """Waits for the versions of which a fleet logs that servers have them."""

    def __init__(self) -> None:
        super().__init__()
        self._found: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a version that has come; raise for warnings."""
        if record.levelno > logging.INFO:
            raise SystemExit(f"a server did not load: {record.getMessage()}")
        if "has version" in record.msg and isinstance(record.args, tuple):
            where, version, _ = record.args
            self._found.put_nowait((str(where), int(str(version))))

    async def wait(self, version: int, count: int) -> None:
        """Wait until so many servers have a version."""
        have: set[str] = set()
        async with asyncio.timeout(LOADS_S):
            while len(have) < count:
                where, found = await self._found.get()
                if found == version:
                    have.add(where)


@dataclass(frozen=True)
class Update:
    """One version, from the end of its publishing until all servers have it.

    Attributes:
        seconds: Its time.
        sent: Bytes that Redis sent.
        own: Most bytes of the first server's own memory, above those before.
        shared: Bytes of the host cache of all servers afterwards.
    """

    seconds: float
    sent: int
    own: int
    shared: int


class Job:
    """A published model, its servers, and the ways to bring one to the other."""

    def __init__(
        self, client: redrb.Client, url: str, model: nn.Module, servers: list[VLLM], folder: Path
    ) -> None:
        self._client, self._url, self._servers, self._folder = client, url, servers, folder
        self._changing = Changing(model)
        self._publishers: dict[str, redrb.WeightPublisher] = {}
        self._workers = [server.worker() for server in servers]
        self._shared = shared_memory(self._workers)

    async def update(self, way: str, kind: str, count: int) -> Update:
        """Publish a version for servers that have the one before."""
        name = f"{way}-{kind}-{count}"
        if name not in self._publishers:
            made = redrb.WeightPublisher(self._client, name, deltas=kind == "delta")
            self._publishers[name] = made
        servers = self._servers[:count]
        async with self._fleet(way, name, servers) as arrivals:
            await arrivals.wait(self._publish(name), count)
            with Peak(self._workers[0]) as peak:
                before = self._sent()
                version = await asyncio.to_thread(self._publish, name)
                began = time.monotonic()
                await arrivals.wait(version, count)
                seconds = time.monotonic() - began
                sent = self._sent() - before
            return Update(seconds, sent, peak.above, shared_memory(self._workers) - self._shared)

    @asynccontextmanager
    async def _fleet(self, way: str, name: str, servers: list[VLLM]) -> AsyncIterator[Arrivals]:
        kind = VLLMEngine if way == "backend" else FolderEngine
        engines = [kind(each.url, model=str(each.model), retry_s=0.0) for each in servers]
        folder = None if way == "backend" else self._folder / name
        config = self._servers[0].model
        first = EngineWeights(self._client, name, engines[0], folder, model="", config=config)
        both = [first, *(first.beside(engine) for engine in engines[1:])]
        fleet = Fleet(self._client, name, list(zip(engines, both, strict=True)))
        log, arrivals = logging.getLogger("redrb"), Arrivals()
        level = log.level
        log.setLevel(logging.INFO)
        log.addHandler(arrivals)
        running = asyncio.create_task(fleet.run())
        try:
            yield arrivals
        finally:
            log.removeHandler(arrivals)
            log.setLevel(level)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    def _publish(self, name: str) -> int:
        state = self._changing.next().state_dict()
        return self._publishers[name].publish(state).version

    def _sent(self) -> int:
        with redis.Redis.from_url(self._url) as client:
            found = client.info("stats")
        assert isinstance(found, dict)
        return int(found["total_net_output_bytes"])


def run(options: Options) -> dict[str, Any]:
    """Return times, bytes and memory of each way."""
    if options.vllm is None:
        raise SystemExit("the section engines needs --vllm FOLDER")
    width, layers = (QUICK_WIDTH, QUICK_LAYERS) if options.quick else (WIDTH, LAYERS)
    with tempfile.TemporaryDirectory(prefix="redrb-bench-", dir="/dev/shm") as directory:
        folder = Path(directory)
        model = make_model(options.vllm, folder / "model", width=width, layers=layers)
        with (
            private_server(options.server) as server,
            vllm_servers(SERVERS, options.vllm, folder / "model", server.url, folder) as servers,
            redrb.connect(server.url) as client,
        ):
            job = Job(client, server.url, model, servers, folder)
            rounds = asyncio.run(_rounds(job, options.rounds))
        return {
            "server": server.name,
            "state_mb": round(state_bytes(model) / 1e6, 1),
            "largest_layer_mb": round(_largest_layer(model) / 1e6, 1),
            **_figures(rounds, state_bytes(model), _largest_layer(model)),
        }


async def _rounds(job: Job, count: int) -> dict[str, list[Update]]:
    """Let the ways alternate; one untimed round comes first."""
    found: dict[str, list[Update]] = {}
    for number in range(-1, count):
        for servers in range(1, SERVERS + 1):
            for kind in KINDS:
                for way in WAYS if number % 2 else WAYS[::-1]:
                    update = await job.update(way, kind, servers)
                    if number >= 0:
                        found.setdefault(f"{way}, {kind}, {servers}", []).append(update)
                    print(f"  {number} {way}, {kind}, {servers}: {update}", flush=True)
    return found


def _figures(rounds: Mapping[str, list[Update]], state: int, layer: int) -> dict[str, Any]:
    cases = {
        name: {
            "seconds": round(median(each.seconds for each in updates), 3),
            "least": round(min(each.seconds for each in updates), 3),
            "most": round(max(each.seconds for each in updates), 3),
            "sent_percent": round(100 * median(each.sent for each in updates) / state, 2),
            "own_over_layer": round(max(each.own for each in updates) / layer, 2),
        }
        for name, updates in rounds.items()
    }
    ratios = {
        f"{kind}, {servers}": round(
            median(
                a.seconds / b.seconds
                for a, b in zip(
                    rounds[f"backend, {kind}, {servers}"],
                    rounds[f"folder, {kind}, {servers}"],
                    strict=True,
                )
            ),
            3,
        )
        for kind in KINDS
        for servers in range(1, SERVERS + 1)
    }
    # only with all servers: one that takes no part keeps the cache of other weights
    caches = [each.shared for kind in KINDS for each in rounds[f"backend, {kind}, {SERVERS}"]]
    return {
        "cases": cases,
        "backend_over_folder": ratios,
        "host_cache_over_state": round(max(caches) / state, 2),
    }


def _largest_layer(model: nn.Module) -> int:
    """Return the bytes of vLLM's largest layer: gate and up of a block are one, as q, k and v."""
    sizes: Counter[str] = Counter()
    for name, tensor in model.named_parameters():
        layer, _, own = name.rpartition(".")[0].rpartition(".")
        part = {"up_proj": "gate_proj", "k_proj": "q_proj", "v_proj": "q_proj"}.get(own, own)
        sizes[f"{layer}.{part}"] += tensor.nbytes
    return max(sizes.values())
