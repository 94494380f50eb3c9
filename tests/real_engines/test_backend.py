"""A real vLLM that loads published weights from Redis by itself.

VLLM's environment needs redrb: `VLLM/bin/pip install -e .`.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

import redrb
from redrb import Client, WeightPublisher
from redrb.errors import EngineError
from redrb.train.engines import EngineWeights, Generation, VLLMEngine
from redrb.train.engines.engine import WeightsKeptError, WeightsReplacedError
from redrb.weights import WeightVersion
from tests.real_engines.conftest import PROMPT, VLLM, RealVLLM, log_probs
from tests.servers import Server, programs

BACKEND = """--weight-transfer-config={"backend": "redrb"}"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not VLLM, reason="needs VLLM: a folder with bin/vllm and model"),
]

TOLERANCE = 0.02
"""Difference of a log-probability: of bfloat16, computed in two ways. Those of two policies: 1."""

MOST = 0.05
"""The largest one among tens of thousands of tokens."""

NAME = "trainer_0"


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    server = Server(next(iter(programs().values())))
    yield server
    server.close()


@pytest.fixture(scope="module")
def vllm(redis: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVLLM]:
    known = subprocess.run([f"{VLLM}/bin/python", "-c", "import redrb"], check=False)
    if known.returncode:
        pytest.skip("needs redrb in VLLM's environment: VLLM/bin/pip install -e .")
    log = tmp_path_factory.mktemp("vllm") / "log"
    arguments = ("--enable-scale-out", BACKEND)
    server = RealVLLM(Path(VLLM), log, *arguments, REDRB_URL=redis.url)
    server.start()
    yield server
    server.close()


@pytest.fixture
def lora(redis: Server, tmp_path: Path) -> Iterator[RealVLLM]:
    flags = ("--enable-scale-out", BACKEND, "--enable-lora", "--max-lora-rank=8", "--max-loras=2")
    allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "REDRB_URL": redis.url}
    server = RealVLLM(Path(VLLM), tmp_path / "log", *flags, **allowed)
    server.start()
    yield server
    server.close()


@pytest.fixture
def client(redis: Server) -> Iterator[Client]:
    with redrb.connect(redis.url, retry_s=30) as client:
        yield client


class Policies:
    """Published policies by version, each with other weights."""

    def __init__(self, vllm: RealVLLM, client: Client, namespace: str) -> None:
        self.known: dict[int, PreTrainedModel] = {}
        self._vllm = vllm
        self._publisher = WeightPublisher(client, NAME, namespace=namespace)
        self._seeds = itertools.count(1)

    def publish(self, change: Callable[[dict[str, Any]], None] = lambda _: None) -> int:
        policy = self._vllm.policy(next(self._seeds))
        state: dict[str, Any] = {
            f"actor.{name}": each for name, each in policy.state_dict().items()
        }
        change(state)
        version = self._publisher.publish(state).version
        self.known[version] = policy
        return version

    def check(self, done: Generation, most: float = TOLERANCE) -> set[int]:
        """Compare each token with the version that it names; returns these versions."""
        versions, found = torch.tensor(done.versions), torch.tensor(done.log_probs)
        for version in set(done.versions):
            expected = log_probs(self.known[version], [*PROMPT, *done.tokens])
            difference = (expected - found)[versions == version].abs()
            assert difference.max() < most, (version, difference.max())
            assert difference.mean() < TOLERANCE, (version, difference.mean())
        return set(done.versions)


@pytest.fixture
def policies(vllm: RealVLLM, client: Client, namespace: str) -> Policies:
    return Policies(vllm, client, namespace)


def engine_of(vllm: RealVLLM, **options: Any) -> VLLMEngine:
    return VLLMEngine(vllm.url, model=str(vllm.model), **options)


def checksums(vllm: RealVLLM) -> dict[str, str]:
    reply = httpx.post(f"{vllm.url}/weight_checker", json={"action": "checksum"}, timeout=60)
    found: dict[str, str] = reply.json()["checksums"]
    return found


def label(vllm: RealVLLM) -> str:
    return str(httpx.get(f"{vllm.url}/weight_info", timeout=60).json()["weight_version"])


def test_ten_updates_are_bit_for_bit_those_that_a_folder_gives(
    vllm: RealVLLM, client: Client, policies: Policies, namespace: str, tmp_path: Path
) -> None:
    async def update() -> None:
        async with engine_of(vllm) as engine:
            weights = EngineWeights(client, NAME, engine, namespace=namespace)
            for _ in range(10):
                version = policies.publish()
                assert await weights.update(timeout=30) == version
                done = await engine.generate(PROMPT, max_new_tokens=48)
                assert policies.check(done) == {version}

    asyncio.run(update())
    received = checksums(vllm)
    newest = policies.known[max(policies.known)]
    newest.save_pretrained(tmp_path)
    for file in vllm.model.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    httpx.post(f"{vllm.url}/collective_rpc", json=body, timeout=60).raise_for_status()
    assert checksums(vllm) == received


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_requests_go_on_over_updates_and_each_token_knows_its_weights(
    vllm: RealVLLM, client: Client, policies: Policies, namespace: str, pause: Any
) -> None:
    updates, requests = (50, 200) if pause == "keep" else (5, 40)

    async def sample(engine: VLLMEngine, numbers: Iterator[int]) -> list[Generation]:
        return [await engine.generate(PROMPT, max_new_tokens=200, ignore_eos=True) for _ in numbers]

    async def run() -> list[Generation]:
        async with engine_of(vllm, pause=pause) as engine:
            weights = EngineWeights(client, NAME, engine, namespace=namespace)
            policies.publish()
            await weights.update(timeout=30)
            numbers = iter(range(requests))
            sampling = [asyncio.create_task(sample(engine, numbers)) for _ in range(8)]
            for _ in range(updates):
                version = await asyncio.to_thread(policies.publish)
                assert await weights.update(timeout=60) == version
            return [done for each in sampling for done in await each]

    found = asyncio.run(run())
    assert [len(done.tokens) for done in found] == [200] * requests
    seen = set().union(*(policies.check(done, MOST) for done in found))
    assert len(seen) > 2
    if pause == "keep":
        assert any(len(set(done.versions)) > 1 for done in found)
    if pause == "wait":
        assert all(len(set(done.versions)) == 1 for done in found)


def test_two_makers_drive_one_server_and_each_version_is_loaded_once(
    vllm: RealVLLM, client: Client, policies: Policies, namespace: str
) -> None:
    async def run() -> None:
        async with engine_of(vllm) as one, engine_of(vllm) as other:
            both = [EngineWeights(client, NAME, each, namespace=namespace) for each in (one, other)]
            for _ in range(3):
                version = policies.publish()
                assert [await each.update(timeout=30) for each in both] == [version] * 2
                after = label(vllm)
            version = policies.publish()
            await both[0].update(timeout=30)
            assert label(vllm) != after
            done = await other.generate(PROMPT, max_new_tokens=16)  # has not looked since
            assert policies.check(done) == {version}
            named = label(vllm)
            assert await both[1].update(timeout=30) == other.version == version
            assert label(vllm) == named  # it was not loaded again

    asyncio.run(run())


def test_a_server_that_was_killed_gets_the_newest_weights_again(
    vllm: RealVLLM, client: Client, policies: Policies, namespace: str
) -> None:
    async def run() -> None:
        async with engine_of(vllm) as engine:
            weights = EngineWeights(client, NAME, engine, namespace=namespace)
            for _ in range(20):
                version = policies.publish()
            await weights.update(timeout=30)
            vllm.kill()
            await asyncio.to_thread(vllm.start)
            following = asyncio.create_task(weights.follow())
            done = await engine.generate(PROMPT, max_new_tokens=16)
            following.cancel()
            assert policies.check(done) == {version}

    asyncio.run(run())


def test_an_update_that_somebody_began_and_never_ended_keeps_nobody(
    vllm: RealVLLM, client: Client, policies: Policies, namespace: str
) -> None:
    for path in ("/pause?mode=keep", "/start_weight_update"):
        httpx.post(f"{vllm.url}{path}", timeout=60).raise_for_status()

    async def run() -> None:
        async with engine_of(vllm) as engine:
            weights = EngineWeights(client, NAME, engine, namespace=namespace)
            version = policies.publish()
            assert await weights.update(timeout=30) == version
            done = await engine.generate(PROMPT, max_new_tokens=16)
            assert policies.check(done) == {version}

    asyncio.run(run())


def test_a_load_that_waited_for_that_of_a_later_version_is_refused(
    vllm: RealVLLM, client: Client, policies: Policies, namespace: str
) -> None:
    """Until Redis is emptied: then smaller numbers are later."""

    async def run() -> None:
        async with engine_of(vllm) as engine:
            weights = EngineWeights(client, NAME, engine, namespace=namespace)
            policies.publish()
            early = await weights._newest(5)
            version = policies.publish()
            assert await weights.update(timeout=30) == version
            source = await weights._source(early, "")
            for _ in range(2):  # and again, after a refusal
                with pytest.raises(WeightsReplacedError, match="has a later version"):
                    await engine._repeated(partial(engine._load, source), 30)
            await engine._take_back_pause()
            assert policies.check(await engine.generate(PROMPT, max_new_tokens=16)) == {version}
            client.execute("FLUSHALL")
            again = Policies(vllm, client, namespace)
            assert again.publish() == 1
            assert await weights.update(timeout=30) == 1
            assert again.check(await engine.generate(PROMPT, max_new_tokens=16)) == {1}

    asyncio.run(run())


def renamed(state: dict[str, Any]) -> None:
    state["actor.model.layers.7.mlp.up_proj.weight"] = state.pop("actor.lm_head.weight")


def fewer(state: dict[str, Any]) -> None:
    del state["actor.model.norm.weight"]


def reshaped(state: dict[str, Any]) -> None:
    state["actor.model.norm.weight"] = torch.zeros(64, dtype=torch.bfloat16)


def integers(state: dict[str, Any]) -> None:
    state["actor.model.norm.weight"] = torch.zeros(128, dtype=torch.int64)


def other_model(state: dict[str, Any]) -> None:
    for name in list(state):
        state[name.replace("actor.", "critic.")] = state.pop(name)


@pytest.mark.parametrize("change", [renamed, fewer, reshaped, integers, other_model])
def test_what_does_not_fit_changes_nothing(
    vllm: RealVLLM,
    client: Client,
    policies: Policies,
    namespace: str,
    change: Callable[[dict[str, Any]], None],
) -> None:
    async def run() -> None:
        async with engine_of(vllm) as engine:
            weights = EngineWeights(client, NAME, engine, namespace=namespace)
            version = policies.publish()
            await weights.update(timeout=30)
            before, named = checksums(vllm), label(vllm)
            wrong = policies.publish(change)
            with pytest.raises(EngineError, match=r"redrb (WeightMismatch|ConfigError): "):
                await weights.update(timeout=30)
            assert (checksums(vllm), label(vllm)) == (before, named), wrong
            done = await engine.generate(PROMPT, max_new_tokens=16)
            assert policies.check(done) == {version}
            mended = policies.publish()
            assert await weights.update(timeout=30) == mended
            assert policies.check(await engine.generate(PROMPT, max_new_tokens=16)) == {mended}

    asyncio.run(run())


def test_an_adapter_is_merged_into_its_base(
    vllm: RealVLLM, client: Client, policies: Policies, namespace: str
) -> None:
    """The base is loaded once; an adapter of an adapter is not merged twice."""
    peft = pytest.importorskip("peft")
    base = vllm.policy(1)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    trained = torch.nn.ModuleDict({"actor": model})

    async def run() -> None:
        async with engine_of(vllm) as engine:
            weights = EngineWeights(client, NAME, engine, namespace=namespace)
            publisher = WeightPublisher(client, NAME, namespace=namespace)
            publisher.publish(trained)
            await weights.update(timeout=30)
            for seed in range(3):
                torch.manual_seed(seed)
                with torch.no_grad():
                    for name, each in model.named_parameters():
                        if "lora_" in name:
                            each.copy_(torch.randn_like(each) * 0.1)
                version = publisher.publish_lora(trained).version
                assert await weights.update(timeout=30) == version
                done = await engine.generate(PROMPT, max_new_tokens=48)
                expected = log_probs(model, [*PROMPT, *done.tokens])
                assert (expected - torch.tensor(done.log_probs)).abs().max() < TOLERANCE

    asyncio.run(run())


def test_a_server_with_lora_loads_adapters_beside_their_base_and_the_base_once(
    lora: RealVLLM, client: Client, namespace: str
) -> None:
    peft = pytest.importorskip("peft")
    config = {"lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    model = peft.get_peft_model(lora.policy(1), peft.LoraConfig(r=4, **config))
    trained = torch.nn.ModuleDict({"actor": model})
    known: dict[int, dict[str, torch.Tensor]] = {}
    publisher = WeightPublisher(client, NAME, namespace=namespace)

    def publish() -> WeightVersion:
        torch.manual_seed(len(known))
        with torch.no_grad():
            for name, each in model.named_parameters():
                if "lora_" in name:
                    each.copy_(torch.randn_like(each) * 0.1)
        published = publisher.publish_lora(trained)
        known[published.version] = {n: each.clone() for n, each in model.state_dict().items()}
        return published

    def check(done: Generation, version: int) -> None:
        assert set(done.versions) == {version}
        model.load_state_dict(known[version])
        expected = log_probs(model, [*PROMPT, *done.tokens])
        assert (expected - torch.tensor(done.log_probs)).abs().max() < TOLERANCE

    def read_bytes() -> int:
        found = str(client.execute("INFO", "stats"))
        return int(re.findall(r"total_net_output_bytes:(\d+)", found)[0])

    async def run() -> None:
        async with engine_of(lora) as engine:
            weights = EngineWeights(client, NAME, engine, namespace=namespace)
            base = publisher.publish(trained)
            await weights.update(timeout=30)
            loaded, sampling = label(lora), []
            for _ in range(5):
                published, before = publish(), read_bytes()
                assert await weights.update(timeout=30) == published.version
                assert read_bytes() - before < published.nbytes + 20_000 < base.nbytes
                sampling.append(asyncio.create_task(engine.generate(PROMPT, max_new_tokens=48)))
                await asyncio.sleep(0)  # it is sent
            for version, each in zip(list(known), sampling, strict=True):
                check(await each, version)
            assert label(lora) == loaded
            lora.kill()
            await asyncio.to_thread(lora.start)
            following = asyncio.create_task(weights.follow())
            check(await engine.generate(PROMPT, max_new_tokens=48), published.version)
            following.cancel()
            wide = peft.get_peft_model(lora.policy(1), peft.LoraConfig(r=16, **config))
            publisher.publish_lora(torch.nn.ModuleDict({"actor": wide}))
            with pytest.raises(WeightsKeptError, match="rank 16 is greater than max_lora_rank 8"):
                await weights.update(timeout=30)
            check(await engine.generate(PROMPT, max_new_tokens=48), published.version)

    asyncio.run(run())


def test_redis_that_was_killed_and_emptied(
    vllm: RealVLLM, redis: Server, client: Client, policies: Policies, namespace: str
) -> None:
    async def run() -> None:
        async with engine_of(vllm) as engine:
            weights = EngineWeights(client, NAME, engine, namespace=namespace)
            policies.publish()
            policies.publish()
            await weights.update(timeout=30)
            redis.kill()
            done = await engine.generate(PROMPT, max_new_tokens=16)  # as if nothing had happened
            assert policies.check(done) == {2}
            redis.start()
            again = Policies(vllm, client, namespace)
            assert again.publish() == 1
            assert await weights.update(timeout=60) == 1
            assert again.check(await engine.generate(PROMPT, max_new_tokens=16)) == {1}

    asyncio.run(run())
