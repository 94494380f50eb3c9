"""Makers drive servers that load published weights from Redis by themselves.

The server imitates vLLM over HTTP (`tests/weight_backend.py`); `tests/real_engines/test_backend.py`
does the same with vLLM itself.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import redrb
from redrb import Client, WeightPublisher, WeightSubscriber
from redrb.errors import (
    ConfigError,
    EngineError,
    StoreUnavailable,
    WeightError,
    WeightMismatch,
    WeightsTorn,
)
from redrb.train.engines import EngineWeights, Generation, VLLMEngine
from redrb.train.engines.adapters import KEPT
from redrb.train.engines.engine import (
    Published,
    WeightsKeptError,
    WeightsMixedError,
    WeightsUnreachableError,
)
from tests.engine_server import EngineServer, log_probs_of, tiny_model
from tests.weight_backend import BackendServer

PROMPT = [1, 2, 3]
NAME = "trainer_0"
MODELS = {seed: tiny_model(seed) for seed in range(1, 6)}  # made while nothing else draws numbers
PREFIX = "redrb:{{{}:weights:trainer_0}}"


@pytest.fixture
def server(server_urls: Any) -> Iterator[BackendServer]:
    with BackendServer(server_urls("valkey-9.1")) as server:
        yield server
        assert not server.unpaused


@pytest.fixture
def client(server: BackendServer) -> Iterator[Client]:
    with redrb.connect(server.redis_url, retry_s=10) as client:
        yield client


class Policies:
    """Published policies: that of version N has the seed N."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.publisher = WeightPublisher(client, NAME, namespace=namespace)
        self._newest = WeightSubscriber(client, NAME, namespace=namespace).latest

    def publish(self, model: str = "actor") -> int:
        newest = self._newest()
        version = 1 if newest is None else newest.version + 1
        state = MODELS[version].state_dict()
        named = {f"{model}.{name}": each for name, each in state.items()}
        return self.publisher.publish(named, version=version).version


@pytest.fixture
def policies(client: Client, namespace: str) -> Policies:
    return Policies(client, namespace)


def check(done: Generation, known: dict[int, Any] = MODELS) -> set[int]:
    """Compare each token with the version that it names; returns these versions."""
    versions, found = torch.tensor(done.versions), torch.tensor(done.log_probs)
    for version in set(done.versions):
        expected = log_probs_of(known[version], [*PROMPT, *done.tokens], len(PROMPT), 1.0)
        torch.testing.assert_close(found[versions == version], expected[versions == version])
    return set(done.versions)


class Job:
    """One engine of a server, and the weights that it is given."""

    def __init__(
        self, server: EngineServer, client: Client, namespace: str, **options: Any
    ) -> None:
        self.engine = VLLMEngine(server.url, model="tiny", retry_s=20, **options)
        self.weights = EngineWeights(client, NAME, self.engine, namespace=namespace)

    async def sample(self, count: int = 6) -> Generation:
        return await self.engine.generate(PROMPT, max_new_tokens=count)


@asynccontextmanager
async def job_with_weights(
    server: EngineServer, client: Client, policies: Policies, namespace: str
) -> AsyncIterator[Job]:
    """A job whose server has loaded the first version."""
    job = Job(server, client, namespace)
    async with job.engine:
        policies.publish()
        await job.weights.update(timeout=5)
        yield job


def test_nothing_is_shared_with_the_server_but_redis(server, client, policies, namespace):
    async def run() -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            for _ in range(3):
                version = policies.publish()
                assert await job.weights.update(timeout=5) == version
                assert check(await job.sample()) == {version}
            with pytest.raises(WeightError):
                await job.weights.update(timeout=0)

    asyncio.run(run())
    assert server.loaded == [1, 2, 3]
    assert not server.paused


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_each_token_knows_its_weights_while_they_change(server, client, policies, namespace, pause):
    server.step_s = 0.01

    async def run() -> list[Generation]:
        job = Job(server, client, namespace, pause=pause)
        async with job.engine:
            policies.publish()
            await job.weights.update(timeout=5)
            sampling = [asyncio.create_task(job.sample(60)) for _ in range(8)]
            for _ in range(3):
                await asyncio.sleep(0.1)
                version = await asyncio.to_thread(policies.publish)
                assert await job.weights.update(timeout=5) == version
            return await asyncio.gather(*sampling)

    found = asyncio.run(run())
    assert server.mode == pause
    assert [len(done.tokens) for done in found] == [60] * 8
    seen = [check(done) for done in found]
    if pause == "wait":
        assert all(len(each) == 1 for each in seen)
    else:
        assert any(len(each) > 1 for each in seen)
    if pause == "keep":  # none was sent twice
        assert server.requests["/inference/v1/generate"] == 8


def test_many_makers_drive_one_server_and_each_version_is_loaded_once(
    server, client, policies, namespace
):
    async def run() -> None:
        jobs = [Job(server, client, namespace) for _ in range(4)]
        for _ in range(3):
            version = policies.publish()
            updates = (job.weights.update(timeout=5) for job in jobs)
            assert set(await asyncio.gather(*updates)) == {version}
        version = policies.publish()
        await jobs[0].weights.update(timeout=5)
        for job in jobs[1:]:  # which have not looked since
            done = await job.sample()
            assert check(done) == {version}
        for job in jobs:
            await job.engine.close()

    asyncio.run(run())
    # those that begin at the same moment may load the same once more
    assert set(server.loaded) == {1, 2, 3, 4}
    assert sorted(server.loaded) == server.loaded
    assert not server.paused
    server.unpaused = 0  # as others may resume it before the last of them has loaded


def test_a_maker_that_is_late_does_not_take_the_server_back(server, client, policies, namespace):
    async def run() -> None:
        early, late = Job(server, client, namespace), Job(server, client, namespace)
        policies.publish()
        await late.weights.update(timeout=5)
        found = late.weights._catalogue.newer_than(0)
        policies.publish()
        await early.weights.update(timeout=5)
        late.weights._given, late.weights._newest = None, lambda _: asyncio.sleep(0, found)
        await late.weights.update(timeout=5)
        assert check(await late.sample()) == {2}
        for job in (early, late):
            await job.engine.close()

    asyncio.run(run())
    assert server.loaded == [1, 2]


@pytest.mark.parametrize("number", [1, 2, 1000])
@pytest.mark.parametrize("clock_s", [-3600, 0, 3600])
def test_weights_of_a_redis_that_lost_its_data_are_older_whatever_its_clock_said(
    server, client, policies, namespace, number, clock_s
):
    async def run() -> None:
        job = Job(server, client, namespace)
        policies.publish()
        await job.weights.update(timeout=5)
        version, created_ms, family = server.label.removeprefix("version-").split("-")
        assert version == "1"
        server.label = f"version-{number}-{int(created_ms) + 1000 * clock_s + 1}-{family}"
        policies.publish()
        assert await job.weights.update(timeout=5) == 2
        assert check(await job.sample()) == {2} == {job.engine.version}
        await job.engine.close()

    asyncio.run(run())
    assert server.loaded == [1, 2]


def test_a_load_that_waited_for_that_of_a_later_version_is_refused(
    server, client, policies, namespace
):
    """Both makers have named what they load before the server loads one of them."""

    async def run() -> None:
        early, late = Job(server, client, namespace), Job(server, client, namespace)
        policies.publish()
        load, named, loaded = late.engine._load, asyncio.Event(), asyncio.Event()

        async def waits(source):
            named.set()
            await loaded.wait()
            await load(source)

        late.engine._load = waits
        updating = asyncio.create_task(late.weights.update(timeout=5))
        await named.wait()
        policies.publish()
        load_early = early.engine._load

        async def then_late(source):
            await load_early(source)
            late.engine._load = load
            loaded.set()
            while late.engine._updating.locked():
                await asyncio.sleep(0.01)

        early.engine._load = then_late
        assert await early.weights.update(timeout=5) == 2
        assert await updating == 2
        for job in (early, late):
            assert check(await job.sample()) == {2} == {job.engine.version}
            await job.engine.close()

    asyncio.run(run())
    assert server.loaded == [2]
    assert not server.paused
    server.unpaused = 0


def test_a_server_that_was_started_again_gets_the_newest_weights(
    server, client, policies, namespace
):
    async def run() -> None:
        async with job_with_weights(server, client, policies, namespace) as job:
            server.restart()
            following = asyncio.create_task(job.weights.follow())
            assert check(await job.sample()) == {1}
            following.cancel()

    asyncio.run(run())
    assert server.loaded == [1, 1]


@pytest.mark.parametrize(
    ("path", "call"),
    [
        *(("/weight_info", call) for call in (1, 2, 3)),
        ("/init_weight_transfer_engine", 1),
        ("/pause", 1),
        ("/update_weight_version", 1),  # before the second no look can tell a restart
        ("/start_weight_update", 1),
        ("/update_weights", 1),
        ("/finish_weight_update", 1),
        ("/is_paused", 1),
        ("/resume", 1),
    ],
)
def test_a_server_that_was_started_again_during_an_update_gets_the_weights_all_the_same(
    server, client, policies, namespace, path, call
):
    """Whichever request is its first after that; no token of its first model counts."""

    async def run() -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            policies.publish()
            await job.weights.update(timeout=5)
            policies.publish()
            request, calls = job.engine._client.request, []

            async def after_restart(asked, body=None, **named):
                if asked.startswith(path):
                    calls.append(asked)
                    if len(calls) == call:
                        await asyncio.to_thread(server.restart)
                return await request(asked, body, **named)

            job.engine._client.request = after_restart
            following = asyncio.create_task(job.weights.follow())
            await job.weights.reach(2)
            async with asyncio.timeout(30):
                assert check(await job.sample()) == {2}
            following.cancel()

    asyncio.run(run())
    server.unpaused = 0  # where it was started again after the pause


def test_a_label_is_not_given_back_after_an_attempt_whose_end_is_not_known(
    server, client, policies, namespace
):
    """The attempt may have changed the weights."""

    async def run() -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            policies.publish()
            await job.weights.update(timeout=5)
            policies.publish()
            load, attempts = job.engine._load, []

            async def is_cut_off(source):
                attempts.append(source)
                if len(attempts) == 1:
                    await load(source)
                    raise EngineError("the reply is lost", where=server.url)
                raise WeightsKeptError("it does not fit", where=server.url, status=200)

            job.engine._load = is_cut_off
            with pytest.raises(WeightsKeptError):
                await job.weights.update(timeout=5)
            assert len(attempts) == 2
            assert server.label.startswith("loading ")
            sampling = asyncio.create_task(job.sample())
            while not job.engine.has_lost_weights:
                await asyncio.sleep(0.01)
            job.engine._load = load
            assert policies.publish() == await job.weights.update(timeout=5) == 3
            assert check(await sampling) == {3}

    asyncio.run(run())


def test_a_maker_that_left_a_mixture_takes_back_the_pause_of_one_that_loaded_all(
    server, client, policies, namespace
):
    async def run() -> None:
        first, second = Job(server, client, namespace), Job(server, client, namespace)
        policies.publish()
        await first.weights.update(timeout=5)
        policies.publish()
        server.break_at = 3
        with pytest.raises(WeightsMixedError, match="mixture"):
            await first.weights.update(timeout=5)

        async def killed() -> None:
            raise EngineError("killed", where=server.url, status=400)

        second.engine._resume = killed
        with pytest.raises(EngineError, match="killed"):
            await second.weights.update(timeout=5)
        assert server.paused
        assert await first.weights.update(timeout=5) == 2
        assert not server.paused
        assert check(await first.sample()) == {2}
        for job in (first, second):
            await job.engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("paused", [True, False])
def test_an_update_that_somebody_began_and_never_ended_keeps_nobody(
    server, client, policies, namespace, paused
):
    async def run() -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            if paused:
                await job.engine._pause(abort=False)
            await job.engine._name("loading version-1-1-0123456789abcdef")
            await job.engine._asked("/start_weight_update", {})
            policies.publish()
            assert await job.weights.update(timeout=5) == 1
            assert check(await job.sample()) == {1}

    asyncio.run(run())


def test_what_does_not_fit_changes_nothing_and_the_next_version_is_loaded(
    server, client, policies, namespace, caplog
):
    async def run() -> None:
        async with job_with_weights(server, client, policies, namespace) as job:
            label = server.label
            policies.publish(model="critic")
            with pytest.raises(WeightsKeptError, match=r"redrb ConfigError.*give model="):
                await job.weights.update(timeout=5)
            assert (server.label, server.paused, job.engine.version) == (label, False, 1)
            assert check(await job.sample()) == {1}
            following = asyncio.create_task(job.weights.follow())
            await asyncio.sleep(2.5)
            asked = server.requests["/update_weights"]
            assert asked == 2  # it is not asked for again
            policies.publish()
            await job.weights.reach(3)
            assert check(await job.sample()) == {3}
            following.cancel()

    with caplog.at_level(logging.WARNING, "redrb"):
        asyncio.run(run())


@pytest.mark.parametrize("does", [False, True])
@pytest.mark.parametrize("lost", range(12))
def test_a_refused_load_changes_nothing_whichever_request_is_repeated(
    server, client, policies, namespace, lost, does
):
    """Of one request of the update the reply is lost, or it does not reach the server."""

    async def run() -> None:
        async with job_with_weights(server, client, policies, namespace) as job:
            label, asked = server.label, []
            request = job.engine._client.request

            async def torn(path, body=None, **more):
                asked.append(path)
                if len(asked) - 1 != lost:
                    return await request(path, body, **more)
                if does:
                    with suppress(EngineError):
                        await request(path, body)
                raise EngineError("the connection ended", where=server.url)

            policies.publish(model="critic")
            job.engine._client.request = torn
            with pytest.raises(WeightsKeptError):
                await job.weights.update(timeout=5)
            job.engine._client.request = request
            assert len(asked) > 8  # so that each request of the update is tried
            assert not server.paused
            if lost < len(asked) and asked[lost] == "/update_weights":
                assert server.label.startswith("loading ")  # it may have been loaded
                assert policies.publish() == await job.weights.update(timeout=5) == 3
                assert check(await job.sample()) == {3}
                return
            assert (server.label, job.engine.version) == (label, 1)
            assert check(await job.sample()) == {1}

    asyncio.run(run())


def test_a_server_that_was_started_again_during_a_refused_load_does_not_get_the_label_before(
    server, client, policies, namespace
):
    """Another maker has told it where the weights are, so nothing but its label tells."""

    async def run() -> None:
        async with job_with_weights(server, client, policies, namespace) as job:
            label, request, named = server.label, job.engine._client.request, []

            async def after_restart(path, body=None, **more):
                if path == "/update_weight_version" and not named:
                    named.append(path)
                    await asyncio.to_thread(server.restart)
                    await job.engine._init(job.engine._told)
                    raise EngineError("the connection ended", where=server.url)
                return await request(path, body, **more)

            policies.publish(model="critic")
            job.engine._client.request = after_restart
            with pytest.raises(WeightsKeptError):
                await job.weights.update(timeout=5)
            assert server.label != label

    asyncio.run(run())
    server.unpaused = 0  # it was started again after the pause


MESSAGES = [
    "its names do not fit.",
    """the tensor 'a' isn't {"as": "expected"}\n\\ a second line, and \u00e9.""",
    "the tensors ', please check them' are " + "many, " * 200 + "too many.",
]


@pytest.mark.parametrize("in_processes", [False, True])
@pytest.mark.parametrize("kind", [WeightMismatch, WeightsTorn, StoreUnavailable])
def test_an_error_of_the_backend_has_its_own_message_alone(
    server, client, namespace, monkeypatch, kind, in_processes
):
    server.in_processes = in_processes
    kinds = {WeightsTorn: WeightsMixedError, StoreUnavailable: WeightsUnreachableError}

    async def run() -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            for message in MESSAGES:
                more = {"where": "here"} if kind is StoreUnavailable else {}
                raising = Mock(side_effect=kind(message, **more))
                monkeypatch.setattr(server, "_fetched", raising)
                with pytest.raises(kinds.get(kind, WeightsKeptError)) as caught:
                    await job.engine._load(Published({}, 1, 0.0, ""))
                told = f"{server.url} could not load weights: redrb {kind.__name__}: {message}"
                assert str(caught.value) == told
            monkeypatch.undo()
            monkeypatch.setattr(server, "_init", Mock(side_effect=kind(message, **more)))
            with pytest.raises(EngineError) as refused:
                await job.engine.receives({"name": NAME}, "")
            assert str(refused.value) == f"{server.url}: redrb {kind.__name__}: {message}"

    asyncio.run(run())


def test_damage_is_logged_and_the_next_version_is_loaded(
    server, client, policies, namespace, caplog
):
    async def run() -> None:
        async with job_with_weights(server, client, policies, namespace) as job:
            policies.publish()
            client.execute("DEL", f"{PREFIX.format(namespace)}:delta:2:0")
            client.execute("DEL", f"{PREFIX.format(namespace)}:chunk:2:0")
            later = threading.Timer(2.0, policies.publish)
            later.start()
            assert await job.weights.update(timeout=20) == 3
            later.join()
            assert check(await job.sample()) == {3}

    with caplog.at_level(logging.WARNING, "redrb"):
        asyncio.run(run())
    assert "redrb Weight" in caplog.text
    assert server.loaded == [1, 3]


@pytest.mark.parametrize("ends", [False, True])
def test_nobody_is_answered_by_a_mixture(server, client, policies, namespace, ends):
    """A load that broke off leaves the server paused, also when the maker ends."""

    async def run() -> None:
        job = Job(server, client, namespace)
        policies.publish()
        await job.weights.update(timeout=5)
        policies.publish()
        server.break_at = 3
        with pytest.raises(WeightsMixedError, match="mixture"):
            await job.weights.update(timeout=5)
        assert server.label.startswith("loading ")
        assert (server.paused, job.engine.version) == (True, None)
        if ends:
            await job.engine.abort()
            await job.engine.close()
            assert server.paused
            job = Job(server, client, namespace)
        assert await job.weights.update(timeout=5) == 2
        assert not server.paused
        assert check(await job.sample()) == {2}
        await job.engine.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "naming", ["actor.{}", "actor.base_model.model.{}", "base_model.model.actor.{}"]
)
def test_an_adapter_is_merged_into_its_base(server, client, policies, namespace, naming):
    """As published from a plain model or one of PEFT; layers of another model are not its own."""
    layer = "model.layers.0.self_attn.q_proj"

    async def run() -> None:
        async with job_with_weights(server, client, policies, namespace) as job:
            for version in (2, 3):
                a, b = torch.randn(2, 8), torch.randn(8, 2)
                adapter, settings = {}, {}
                for name in (naming.format(layer), f"critic.{layer}"):
                    adapter |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
                    settings[name] = redrb.weights.LoraConfig(r=2, lora_alpha=4.0)
                policies.publisher.publish_lora((adapter, settings), version=version)
                assert await job.weights.update(timeout=5) == version
                expected = MODELS[1].state_dict()[f"{layer}.weight"] + b @ a * 2
                found = server.model.state_dict()[f"{layer}.weight"]
                torch.testing.assert_close(found, expected)

    asyncio.run(run())


def test_a_server_without_the_backend_needs_a_folder(client, policies, namespace):
    policies.publish()

    async def run(server: EngineServer) -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            with pytest.raises(ConfigError, match=r"weight-transfer-config.*give a folder"):
                await job.weights.update(timeout=5)

    with EngineServer() as server:
        asyncio.run(run(server))


def test_a_server_that_cannot_reach_the_weights_says_why(server, client, policies, namespace):
    policies.publish()
    server.redis_url = "redis://127.0.0.1:1"

    async def run() -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            with pytest.raises(EngineError, match="redrb StoreUnavailable"):
                await job.weights.update(timeout=5)

    asyncio.run(run())
    assert not server.paused


def test_the_url_is_sent_only_to_a_server_that_has_none(
    server, client, policies, namespace, caplog
):
    async def run() -> dict[str, Any]:
        job = Job(server, client, namespace)
        async with job.engine:
            assert await job.weights.update(timeout=5) == version
            return dict(server._info)

    version = policies.publish()
    assert "url" not in asyncio.run(run())
    server.redis_url = ""
    version = policies.publish()
    assert asyncio.run(run())["url"] == client.url
    assert "does not answer" not in caplog.text  # though it closes the connection of its refusal


def test_the_example_of_the_documents_runs_as_printed(server, client, policies, namespace):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "inference-server.md").read_text()
    [(imports, example)] = re.findall(r"```python\n(.*?)\n\nclient.*?(async def.*?)```", page, re.S)
    example = example.replace("http://localhost:8000", server.url)
    example = example.replace("engine)\n", f"engine, namespace={namespace!r})\n", 1)
    policies.publish()
    prompts = [{"input_ids": PROMPT}] * 2
    with redrb.ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.join_group()
        names = {"client": client, "stream": stream, "prompts": prompts}
        exec(f"{imports}\n{example}", names)
        with stream.take(2, timeout=5) as lease:
            for group in lease.groups():
                assert [len(item.action_mask) for item in group] == [8] * 8
                assert all(item.policy_version == 1 for item in group)


def test_a_pause_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="'keep', 'wait', 'abort'"):
        VLLMEngine("http://here", model="tiny", pause="stop")


LAYER = "model.layers.0.self_attn.q_proj"


class Adapters:
    """Published adapters of one base, whose policies join `known` by their versions."""

    def __init__(self, policies: Policies) -> None:
        self.known: dict[int, Any] = dict(MODELS)
        self._policies = policies

    def publish(self, base: int, version: int, rank: int = 2) -> int:
        a, b = torch.randn(rank, 8), torch.randn(8, rank)
        named = {f"actor.{LAYER}.lora_A": a, f"actor.{LAYER}.lora_B": b}
        settings = {f"actor.{LAYER}": redrb.weights.LoraConfig(r=rank, lora_alpha=2.0 * rank)}
        self._policies.publisher.publish_lora((named, settings), version=version)
        policy = self.known[version] = copy.deepcopy(MODELS[base])
        policy.state_dict()[f"{LAYER}.weight"].add_(b @ a * 2)
        return version

    def check(self, done: Generation) -> set[int]:
        return check(done, self.known)


@pytest.fixture
def adapters(server: BackendServer, policies: Policies) -> Adapters:
    server.lora = 4
    return Adapters(policies)


def test_an_adapter_is_loaded_beside_its_base_which_is_loaded_once(
    server, client, policies, adapters, namespace
):
    server.step_s = 0.01

    async def run() -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            base = policies.publish()
            await job.weights.update(timeout=5)
            paused = server.requests["/pause"]
            sampling = []
            for version in range(2, 2 + 2 * KEPT):
                adapters.publish(base, version)
                assert await job.weights.update(timeout=5) == version == job.engine.version
                sampling.append(asyncio.create_task(job.sample(40)))
                await asyncio.sleep(0.01)
            for version, done in enumerate(await asyncio.gather(*sampling), 2):
                assert adapters.check(done) == {version}  # it ends with the adapter it began with
            assert server.requests["/pause"] == paused
            assert len(server.usable) == KEPT

    asyncio.run(run())
    assert server.loaded == [1]


@pytest.mark.parametrize("keeps", [True, False])
def test_requests_with_an_adapter_end_before_other_weights_are_loaded(
    server, client, policies, adapters, namespace, keeps
):
    server.step_s = 0.01

    async def run() -> None:
        job, other = Job(server, client, namespace), Job(server, client, namespace)
        async with job.engine, other.engine:
            adapters.publish(policies.publish(), 2)
            await job.weights.update(timeout=5)
            following = asyncio.create_task(job.weights.follow())
            sampling = [asyncio.create_task(job.sample(60)) for _ in range(4)]
            await asyncio.to_thread(server.midway.wait, 20)
            policies.publish()
            if keeps:  # a maker that knows of no adapter keeps the requests of others
                await other.weights.update(timeout=5)
            found = [adapters.check(done) for done in await asyncio.gather(*sampling)]
            assert all(each <= {2, 3} and 3 in each for each in found)
            following.cancel()

    asyncio.run(run())
    assert server.loaded[:2] == [1, 3]
    assert 1 not in server.loaded[1:]
    server.unpaused = 0  # as the other maker may resume it before this one has loaded


def test_makers_of_one_server_each_have_the_adapter_that_they_name(
    server, client, policies, adapters, namespace
):
    async def run() -> None:
        jobs = [Job(server, client, namespace) for _ in range(3)]
        base = policies.publish()
        adapters.publish(base, 2)
        for job in jobs:
            assert await job.weights.update(timeout=5) == 2
        adapters.publish(base, 3)
        assert await jobs[0].weights.update(timeout=5) == 3
        found = [adapters.check(await job.sample()) for job in jobs]
        assert found == [{3}, {2}, {2}]  # those that have not looked since are late, and say so
        for job in jobs:
            await job.engine.close()

    asyncio.run(run())
    assert server.loaded == [1]


def test_a_server_that_was_started_again_gets_base_and_adapter(
    server, client, policies, adapters, namespace
):
    async def run() -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            adapters.publish(policies.publish(), 2)
            await job.weights.update(timeout=5)
            server.restart()
            following = asyncio.create_task(job.weights.follow())
            assert adapters.check(await job.sample()) == {2}
            assert job.engine.keeps_requests
            following.cancel()

    asyncio.run(run())
    assert server.loaded == [1, 1]


def test_a_refused_or_damaged_adapter_changes_nothing_and_the_next_one_is_loaded(
    server, client, policies, adapters, namespace, caplog
):
    async def run() -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            base = policies.publish()
            adapters.publish(base, 2)
            await job.weights.update(timeout=5)
            adapters.publish(base, 3, rank=5)
            with pytest.raises(WeightsKeptError, match="rank 5 is greater than max_lora_rank 4"):
                await job.weights.update(timeout=5)
            assert adapters.check(await job.sample()) == {2}
            adapters.publish(base, 4)
            keys = client.execute("KEYS", f"{PREFIX.format(namespace)}*")
            chunks = [key for key in keys if client.execute("TYPE", key) == b"string"]
            for key in chunks:
                client.execute("SETRANGE", key, 0, b"damage")
            updating = asyncio.create_task(job.weights.update(timeout=20))
            await asyncio.sleep(0.5)
            assert adapters.check(await job.sample()) == {2}
            assert not updating.done()
            updating.cancel()

    asyncio.run(run())
    assert server.loaded == [1]


def test_a_server_that_does_not_tell_the_weights_of_tokens_tells_versions_by_the_name(
    server, client, policies, adapters, namespace
):
    server.scales_out, server.step_s = False, 0.01

    async def run() -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            base = policies.publish()
            adapters.publish(base, 2)
            await job.weights.update(timeout=5)
            sampling = asyncio.create_task(job.sample(60))
            await asyncio.to_thread(server.midway.wait, 20)
            adapters.publish(base, 3)
            await job.weights.update(timeout=5)
            found = [adapters.check(await sampling), adapters.check(await job.sample())]
            assert found == [{2}, {3}]

    asyncio.run(run())
    assert server.requests["/v1/completions"] == 2
    assert server.loaded == [1]


def test_a_server_without_lora_merges_and_says_so_once(
    server, client, policies, adapters, namespace, caplog
):
    server.lora = 0

    async def run() -> None:
        job = Job(server, client, namespace)
        async with job.engine:
            base = policies.publish()
            for version in (2, 3):
                adapters.publish(base, version)
                assert await job.weights.update(timeout=5) == version
                assert adapters.check(await job.sample()) == {version}

    asyncio.run(run())
    assert server.loaded == [2, 3]
    assert sum("takes no adapters" in each.getMessage() for each in caplog.records) == 1


def test_a_server_into_which_another_program_merges_goes_on_so(
    server, client, policies, adapters, namespace
):
    async def run() -> None:
        job = Job(server, client, namespace)
        merging = Job(server, client, namespace, adapters=False)
        async with job.engine, merging.engine:
            base = policies.publish()
            adapters.publish(base, 2)
            await merging.weights.update(timeout=5)
            adapters.publish(base, 3)
            assert await job.weights.update(timeout=5) == 3
            assert adapters.check(await job.sample()) == {3}

    asyncio.run(run())
    assert server.loaded == [2, 3]
