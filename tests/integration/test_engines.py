"""Inference servers over HTTP, and episodes on them: a real server with a tiny causal model."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import redrb
from redrb import BufferItem, Client, ExperienceStream, Lease
from redrb.errors import ConfigError, EngineError, RecordError, SendFailed, WeightError
from redrb.train.broadcast import Broadcast
from redrb.train.engines import (
    Engine,
    EngineWeights,
    Generation,
    SGLangEngine,
    Trajectory,
    VLLMEngine,
)
from redrb.train.episodes import EpisodeMaker, running
from redrb.weights.files.safetensors import load_safetensors, save_safetensors
from redrb.weights.reading.catalogue import Pin, Step
from redrb.weights.reading.replica import Replica
from redrb.weights.reading.state_copies import PrivateCopy
from tests.engine_server import EngineServer, experts_of, log_probs_of, tiny_model

PROMPT = [1, 2, 3]


def vllm(url: str, **options: Any) -> Engine:
    return VLLMEngine(url, model="tiny", **options)


@pytest.fixture
def server():
    with EngineServer() as server:
        yield server


@pytest.fixture
def client():
    with redrb.connect("fake://engines") as client:
        yield client


@pytest.fixture
def stream(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace, on_bad_group="drop") as stream:
        stream.join_group()
        yield stream


def saved(model: torch.nn.Module, folder: Path) -> Path:
    folder.mkdir()
    save_safetensors(folder / "model.safetensors", model.state_dict())
    return folder


@pytest.mark.parametrize("kind", [vllm, SGLangEngine])
def test_log_probs_are_those_of_the_model(server, kind):
    async def sample():
        async with kind(server.url) as engine:
            return await engine.generate(
                PROMPT, max_new_tokens=6, temperature=0.7, stop_token_ids=[5], top_p=0.9
            )

    done = asyncio.run(sample())
    assert done.finish in ("stop", "length")
    assert done.versions == [-1] * len(done.tokens)
    expected = log_probs_of(server.model, PROMPT + done.tokens, 3, 0.7)
    torch.testing.assert_close(torch.tensor(done.log_probs), expected)
    body = server.bodies[0]
    assert body.get("sampling_params", body)["top_p"] == 0.9


@pytest.mark.parametrize("kind", [vllm, SGLangEngine])
def test_weights_change_between_two_tokens_and_versions_tell_where(server, kind, tmp_path):
    old, new = tiny_model(0), tiny_model(1)
    server.stands_from = 0

    async def sample():
        async with kind(server.url) as engine:
            engine.version = 1
            task = asyncio.create_task(engine.generate(PROMPT, max_new_tokens=12))
            await asyncio.to_thread(server.until_standing, 1)
            server.stands_from = None
            await engine.update(saved(new, tmp_path / "2"), 2)
            return await task

    done = asyncio.run(sample())
    split = done.versions.index(2)
    assert done.versions == [1] * split + [2] * (12 - split)
    assert 3 <= split < 12
    tokens = PROMPT + done.tokens
    before = log_probs_of(old, tokens, 3, 1.0)[:split]
    after = log_probs_of(new, tokens, 3, 1.0)[split:]
    torch.testing.assert_close(torch.tensor(done.log_probs), torch.cat([before, after]))


def test_routed_experts_of_two_turns_and_an_update_come_in_batches(server, stream, tmp_path):
    server.experts, server.stands_from = "<u2", 0

    async def sample(prompt):
        async with vllm(server.url, pause="abort") as engine:
            trajectory = Trajectory(prompt)
            task = asyncio.create_task(engine.generate(prompt, max_new_tokens=8))
            await asyncio.to_thread(server.until_standing, 1)
            server.stands_from = None
            await engine.update(saved(tiny_model(1), tmp_path / "2"), 2)
            trajectory.sampled(await task)
            trajectory.given([7, 7])
            more = {"routed_tokens": trajectory.routed_tokens}
            done = await engine.generate(trajectory.tokens, max_new_tokens=2, **more)
            assert len(done.routed_experts) == 4  # of the last sampled token, the tool's, one more
            trajectory.sampled(done)
            trajectory.given([9])
            return trajectory.item(reward=1.0)

    item = asyncio.run(sample(PROMPT))
    starts = [body.get("routed_experts_prompt_start", 0) for body in server.bodies]
    assert starts[0] == 0 < starts[1] < 8 + len(PROMPT)
    assert starts[2:] == [10]
    wanted = torch.from_numpy(experts_of(item.sequences.tolist(), "<u2"))
    wanted[-2:] = 0  # the last sampled token, and those after it, have not passed the model
    assert torch.equal(item.tensors["routed_experts"], wanted)
    short = Trajectory([5])
    short.sampled(Generation([6], [-1.0], [0], "stop", experts_of([5], "<u2")))
    stream.put_many([[item], [short.item(reward=0.0)]])
    with stream.take(2, timeout=0) as lease:
        batch = lease.batch(tensors=["sequences", "routed_experts"])
    found = batch.tensors["routed_experts"]
    assert found.dtype == torch.uint16
    assert found.shape == (2, len(item.sequences), 2, 3)
    assert torch.equal(found[0], wanted)
    assert not found[1, :-2].any()  # padding, as that of `sequences`
    assert torch.equal(found[1, -2], torch.from_numpy(experts_of([5], "<u2"))[0])
    assert batch.action_log_probs is None


@pytest.mark.parametrize("kind", [vllm, SGLangEngine])
def test_requests_wait_after_weights_that_cannot_be_loaded(server, kind, tmp_path):
    server.broken_load = ""

    async def update():
        async with kind(server.url, retry_s=0.3) as engine:
            with pytest.raises(EngineError, match="no such file") as caught:
                await engine.update(tmp_path, 2)
            assert caught.value.where == server.url
            assert (engine.version, engine.has_lost_weights) == (None, True)
            with pytest.raises(EngineError, match="has lost its weights, and nobody"):
                await engine.generate(PROMPT, max_new_tokens=2)
            waiting = asyncio.create_task(engine.generate(PROMPT, max_new_tokens=2))
            server.broken_load = None
            await engine.update(saved(tiny_model(1), tmp_path / "3"), 3)
            assert (await waiting).versions == [3, 3]

    asyncio.run(update())


def test_a_server_that_is_away_is_asked_again(server):
    async def sample(url, **options):
        async with vllm(url, **options) as engine:
            return len((await engine.generate(PROMPT, max_new_tokens=2)).tokens)

    server.failing = [503, 500, 502, 429]
    assert asyncio.run(sample(server.url)) == 2
    assert (server.requests["/inference/v1/generate"], server.requests["/v1/completions"]) == (5, 1)
    server.failing = [500] * 100
    with pytest.raises(EngineError, match="answered 500: starting"):
        asyncio.run(sample(server.url, retry_s=1.0))
    assert 98 > len(server.failing) > 90, "a pause between requests"
    for status, is_refusal in ((400, True), (404, False)):
        server.failing = [status] * 2  # of both ways to ask
        with pytest.raises(EngineError, match=f"answered {status}") as caught:
            asyncio.run(sample(server.url))
        server.failing = []
        assert (caught.value.is_refusal, caught.value.is_outage) == (is_refusal, False)
    server.step_s = 5.0
    with pytest.raises(EngineError, match="SocketTimeoutError"):
        asyncio.run(sample(server.url, timeout=0.2, retry_s=0))
    with pytest.raises(EngineError, match="ClientConnectorError"):
        asyncio.run(sample("http://127.0.0.1:1", retry_s=0.1))
    with pytest.raises(ConfigError, match="http://host:port"):
        asyncio.run(sample("localhost:8000"))


def test_a_request_is_given_up_by_its_failures_and_not_by_those_of_others(server, monkeypatch):
    sampled = server._sampled

    async def poisoned(prompt, *rest, **named):
        if prompt[0] == 9:
            raise RuntimeError("this prompt cannot be computed")
        return await sampled(prompt, *rest, **named)

    monkeypatch.setattr(server, "_sampled", poisoned)

    async def sample():
        async with vllm(server.url, retry_s=0.3) as engine:
            server.failing = [503] * 10_000
            assert engine.away_s == 0
            with pytest.raises(TimeoutError):
                waiting = asyncio.ensure_future(engine.generate(PROMPT, max_new_tokens=2))
                while not engine.away_s:
                    await asyncio.sleep(0.01)
                await asyncio.wait_for(waiting, 0.1)
            assert engine.away_s == 0  # nobody waits for it
            await asyncio.sleep(0.4)  # longer than a request may fail
            server.failing = [503]
            assert len((await engine.generate(PROMPT, max_new_tokens=2)).tokens) == 2
            failing = asyncio.create_task(engine.generate([9, 2], max_new_tokens=2))
            ends = time.monotonic() + 20
            while not failing.done() and time.monotonic() < ends:
                await engine.generate(PROMPT, max_new_tokens=2)
            with pytest.raises(EngineError, match="answered 500"):
                await asyncio.wait_for(failing, 0)

    asyncio.run(sample())


TORN: list[tuple[dict[str, Any], str]] = [
    ({"finish_reason": "error"}, "finish reason is 'error'"),
    ({"finish_reason": None}, "finish reason is None"),
    ({"finish_reason": "length", "token_ids": [], "logprobs": {"token_logprobs": []}}, "0"),
    ({"token_ids": [1, 2, 3], "logprobs": {"token_logprobs": [-1.0] * 3}}, "at most 2 tokens"),
    ({"finish_reason": "stop", "token_ids": [], "logprobs": {"token_logprobs": []}}, "0"),
    ({"token_ids": [1, -2]}, "whole numbers"),
    ({"token_ids": [1, 2**31]}, "whole numbers"),
    ({"token_ids": [1, 2.5]}, "whole numbers"),
    ({"token_ids": [1]}, "for each token"),
    ({"logprobs": {"token_logprobs": [-1.0, 0.5]}}, "numbers up to 0"),
    ({"logprobs": {"token_logprobs": [-1.0, float("nan")]}}, "numbers up to 0"),
    ({"logprobs": {"token_logprobs": [-1.0, None]}}, "numbers up to 0"),
    ({"logprobs": {"token_logprobs": [-1.0, -1e300]}}, "numbers up to 0"),
    ({"logprobs": None}, "token ids and log-probabilities"),
]


def test_a_torn_completion_is_none(server):
    async def sample():
        async with vllm(server.url, retry_s=0) as engine:
            for torn, match in TORN:
                server.torn = torn
                with pytest.raises(EngineError, match=match):
                    await engine.generate(PROMPT, max_new_tokens=2)

    asyncio.run(sample())


def test_each_connection_is_probed_so_that_a_vanished_machine_is_noticed(server):
    server.stands_from = 0

    def connected() -> list[socket.socket]:
        sockets = [each for each in gc.get_objects() if type(each) is socket.socket]
        alive = [each for each in sockets if each.fileno() >= 0]
        port = int(server.url.rpartition(":")[2])
        return [each for each in alive if peer_of(each) == ("127.0.0.1", port)]

    def peer_of(each: socket.socket) -> Any:
        with suppress(OSError):
            return each.getpeername()

    async def sample():
        async with vllm(server.url) as engine:
            asked = [
                asyncio.create_task(engine.generate(PROMPT, max_new_tokens=4)) for _ in range(3)
            ]
            await asyncio.to_thread(server.until_standing, 3)
            found = connected()
            assert len(found) == 3
            for each in found:
                assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                if sys.platform == "linux":
                    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
                    numbers = [getattr(socket, name) for name in names]
                    idle, between, count, most_ms = (
                        each.getsockopt(socket.IPPROTO_TCP, number) for number in numbers
                    )
                    assert idle + between * count <= 60
                    assert 0 < most_ms <= 60_000
            server.stands_from = None
            await asyncio.to_thread(server.restart)
            await asyncio.gather(*asked)

    asyncio.run(sample())


def test_a_completion_that_a_server_breaks_off_is_sampled_again(server):
    async def sample():
        async with vllm(server.url) as engine:
            assert len((await engine.generate(PROMPT, max_new_tokens=2)).tokens) == 2

    server.torn = {"finish_reason": "error"}
    asyncio.run(sample())


def test_a_server_that_aborts_all_requests_is_not_flooded(server):
    async def sample():
        async with vllm(server.url, retry_s=0.5) as engine:
            with pytest.raises(EngineError, match="aborts requests"):
                await engine.generate(PROMPT, max_new_tokens=2)

    server.aborts = True
    asyncio.run(sample())
    assert server.requests["/v1/completions"] < 8


@pytest.mark.parametrize("kind", [vllm, SGLangEngine])
def test_a_pause_that_is_cancelled_is_taken_back(server, kind):
    async def sample():
        async with kind(server.url) as engine:
            reached = asyncio.Event()
            pause = engine._pause

            async def slow(**how: bool) -> None:
                await pause(**how)
                reached.set()
                await asyncio.sleep(60)  # the reply is late

            engine._pause = slow
            ending = asyncio.create_task(engine.abort())
            await reached.wait()
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending
        async with kind(server.url) as other:
            assert len((await other.generate(PROMPT, max_new_tokens=2)).tokens) == 2

    asyncio.run(sample())


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": [1, 2, 3 + number % 4], "number": number} for number in range(count)]


async def episode(prompt: Any, engine: Engine, partial: BufferItem | None = None) -> BufferItem:
    """Two turns with the answer of a tool between them."""
    trajectory = Trajectory(prompt["input_ids"], partial)
    if not trajectory.actions:
        trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=3))
        if not trajectory.aborted:
            trajectory.given([7, 7])
    if not trajectory.aborted:
        missing = 8 - len(trajectory.actions)
        trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=missing))
    reward = None if trajectory.aborted else float(trajectory.tokens[-1])
    return trajectory.item(reward=reward, extras={"number": prompt["number"]})


def test_a_hundred_episodes_run_at_the_same_time(server, stream):
    running, all_began = [0], asyncio.Event()

    async def one(prompt, engine):
        running[0] += 1
        if running[0] == 104:
            all_began.set()
        await all_began.wait()
        trajectory = Trajectory(prompt["input_ids"])
        trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=1))
        return trajectory.item(reward=1.0, extras={"number": prompt["number"]})

    EpisodeMaker(stream, one, vllm(server.url), group_size=8, groups=13).run(prompts(13))
    groups = _all(stream)
    assert {len(group) for group in groups} == {8}
    assert sorted(group[0].extras["number"] for group in groups) == list(range(13))
    for group in groups:
        assert len({item.extras["number"] for item in group}) == 1


def test_a_group_has_what_training_needs(server, stream):
    EpisodeMaker(stream, episode, vllm(server.url), group_size=4).run(prompts(1))
    [group] = _all(stream)
    advantages = torch.stack([item.advantages for item in group if item.advantages is not None])
    assert len(advantages) == 4
    torch.testing.assert_close(advantages.sum(), torch.tensor(0.0), atol=1e-4, rtol=0)
    for item in group:
        assert item.action_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 3
        expected = log_probs_of(server.model, item.sequences.tolist(), 3, 1.0)
        known = torch.where(item.action_mask, expected, 0.0)
        torch.testing.assert_close(item.action_log_probs, known, rtol=1e-4, atol=1e-4)


def test_an_episode_that_blocks_the_others_is_named_once(server, stream, monkeypatch, caplog):
    monkeypatch.setattr(running, "_LOOK_S", 0.05)
    monkeypatch.setattr(running, "_LATE_S", 0.2)

    async def blocking(prompt, engine):
        for _ in range(15):
            time.sleep(0.05)
            await asyncio.sleep(0)
        return await episode(prompt, engine)

    EpisodeMaker(stream, blocking, vllm(server.url), group_size=4).run(prompts(1))
    assert len(_all(stream)[0]) == 4
    assert caplog.text.count(".blocking blocks its event loop") == 1


def test_an_episode_that_raises_costs_its_group(server, client, namespace, caplog):
    async def failing(prompt, engine):
        if prompt["number"] == 1:
            raise ValueError("no verdict")
        return await episode(prompt, engine)

    settings: dict[str, Any] = {"max_staleness": 1, "groups_per_version": 8}
    with ExperienceStream(client, "bounded", namespace=namespace, **settings) as stream:
        stream.join_group()
        stream.advance(0)
        engine = vllm(server.url)
        engine.version = 0
        EpisodeMaker(stream, failing, engine, group_size=2).run(prompts(4))
        stats = stream.stats()
    assert (stats.ledger.put, stats.ledger.filtered) == (4, 1)
    assert (stats.admission.held, stats.admission.used) == (0, 3)
    assert "an episode raised ValueError: no verdict (test_engines.py, line " in caplog.text


def test_a_maker_that_waits_for_a_right_or_weights_ends_when_it_must(
    server, client, namespace, tmp_path
):
    async def odd(prompt, engine):
        item = await episode(prompt, engine)
        item.extras["prompt"] = object()  # nothing that can be stored
        return item

    settings: dict[str, Any] = {"max_staleness": 0, "groups_per_version": 1}
    with ExperienceStream(client, "bounded", namespace=namespace, **settings) as stream:
        stream.advance(0)
        engine = vllm(server.url)
        engine.version = 0
        with pytest.raises(SendFailed, match="extra 'prompt' cannot be stored"):
            EpisodeMaker(stream, odd, engine, group_size=1, groups=2).run(prompts(3))
        waiting = vllm(server.url)
        weights = EngineWeights(client, "nobody", waiting, tmp_path, namespace=namespace)
        maker = EpisodeMaker(stream, episode, waiting, weights=weights)
        threading.Timer(0.2, maker.stop, ["enough"]).start()
        maker.run(prompts(1))
        assert maker.stopped == "enough"


def test_groups_may_be_sent_in_parts(server, stream):
    EpisodeMaker(stream, episode, vllm(server.url), group_size=3, parts=True).run(prompts(2))
    with stream.take(2, timeout=0) as lease:
        assert [len(group) for group in lease.groups()] == [3, 3]


@pytest.mark.parametrize("goes_on", [True, False])
def test_aborted_groups_are_finished_by_a_later_maker_exactly_once(server, stream, goes_on):
    async def anew(prompt, engine):
        return await episode(prompt, engine)

    server.stands_from = 0
    first = EpisodeMaker(stream, episode, vllm(server.url), group_size=2, groups=3)

    def stop():
        server.until_standing(6)
        server.stands_from = None
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    first.run(prompts(3))
    stopper.join()
    assert first.stopped == "SIGTERM"
    assert (stream.count("aborted"), stream.count()) == (3, 0)
    with stream.take(3, timeout=0, status="aborted") as lease:
        unfinished = [item for group in lease.groups() for item in group]
        lease.release()
    assert all(item.extras["prompt"]["number"] == item.extras["number"] for item in unfinished)
    second = EpisodeMaker(
        stream, episode if goes_on else anew, vllm(server.url), group_size=2, groups=3
    )
    second.run([])
    assert (stream.count("aborted"), stream.count()) == (0, 3)
    with stream.take(3, timeout=0) as lease:
        groups = lease.groups()
    for group in groups:
        assert len(group) == 2
        for item in group:
            assert len(item.sequences) == 11
            assert item.reward is not None
            assert "prompt" not in item.extras
    if goes_on:
        made = [item.sequences.tolist() for group in groups for item in group]
        for item in unfinished:
            begun = item.sequences.tolist()
            assert any(tokens[: len(begun)] == begun for tokens in made)
    ledger = stream.stats().ledger
    assert (ledger.put, ledger.acked, ledger.waiting) == (6, 6, 0)


def test_unfinished_groups_that_nobody_can_finish_return_their_rights(server, client, namespace):
    settings: dict[str, Any] = {"max_staleness": 1, "groups_per_version": 8, "order": "admission"}
    with ExperienceStream(client, "ordered", namespace=namespace, **settings) as stream:
        stream.join_group()
        stream.advance(0)
        server.stands_from = 0
        engine = vllm(server.url)
        engine.version = 0
        maker = EpisodeMaker(stream, episode, engine, group_size=1, groups=2, resume=False)
        stopper = threading.Thread(target=lambda: (server.until_standing(2), maker.stop()))
        stopper.start()
        maker.run(prompts(2))
        stopper.join()
        stats = stream.stats()
        assert (stream.count("aborted"), stats.ledger.filtered) == (0, 2)
        assert (stats.admission.held, stats.admission.used) == (0, 0)


def test_a_continuation_whose_acknowledgement_is_lost_is_put_once(server, stream, monkeypatch):
    begun = Trajectory([1, 2, 3])
    begun.sampled(Generation([4], [-1.0], [0], "abort"))
    item = begun.item(extras={"prompt": prompts(1)[0]})
    stream.put([item, begun.item(extras=dict(item.extras))])
    end_parts = Lease._end_parts

    def dying(lease, outcome, *arguments):
        if outcome == "ack":
            raise RuntimeError("the process dies here")
        end_parts(lease, outcome, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Lease, "_end_parts", dying)
        with pytest.raises(RuntimeError, match="dies here"):
            EpisodeMaker(stream, episode, vllm(server.url)).run([])
    assert (stream.count("aborted"), stream.count()) == (1, 1)
    EpisodeMaker(stream, episode, vllm(server.url)).run([])
    assert (stream.count("aborted"), stream.count()) == (0, 1)


def test_episodes_end_with_the_job(server, client, stream, namespace, tmp_path):
    broadcast = Broadcast(client, namespace, "trainer_0", [])
    broadcast.push({"actor": tiny_model(1)}, fully=True)
    engine = vllm(server.url)
    weights = EngineWeights(client, "trainer_0", engine, tmp_path, namespace=namespace)
    maker = EpisodeMaker(stream, episode, engine, weights=weights, group_size=1, groups=2)

    def endless():
        yield from prompts(1)
        broadcast.end_job("enough")
        while True:
            yield from prompts(1)

    maker.run(endless())
    assert maker.stopped == "trainer 'trainer_0' has ended the job: enough"
    assert stream.count() + stream.count("aborted") > 0


def test_unfinished_groups_of_others_are_left_alone(server, stream, caplog):
    begun = Trajectory([1, 2, 3])
    begun.sampled(Generation([4], [-1.0], [0], "abort"))
    stream.put([begun.item()])
    EpisodeMaker(stream, episode, vllm(server.url), group_size=1).run(prompts(2))
    assert (stream.count("aborted"), stream.count()) == (1, 2)
    assert "another kind of maker" in caplog.text


def test_new_versions_reach_the_server_while_episodes_run(
    server, client, stream, namespace, tmp_path
):
    models = {version: tiny_model(version) for version in (1, 2)}
    publisher = redrb.WeightPublisher(client, "trainer_0", namespace=namespace)

    def publish(version):
        state = {f"actor.{name}": each for name, each in models[version].state_dict().items()}
        publisher.publish({**state, "critic.weight": torch.zeros(1)}, version=version)

    server.stands_from = 0
    publish(1)
    engine = SGLangEngine(server.url)
    weights = EngineWeights(client, "trainer_0", engine, tmp_path, namespace=namespace)
    maker = EpisodeMaker(stream, episode, engine, weights=weights, group_size=4, groups=2)

    def publish_midway():
        server.until_standing(8)
        server.stands_from = None
        publish(2)

    timer = threading.Thread(target=publish_midway)
    timer.start()

    def until_new():
        deadline = time.monotonic() + 30
        while engine.version != 2 and time.monotonic() < deadline:
            yield from prompts(1)

    maker.run(until_new())
    timer.join()
    assert engine.version == 2
    assert stream.worker.weights_name == "trainer_0"
    items = [item for group in _all(stream) for item in group]
    mixed = 0
    for item in items:
        assert item.token_versions is not None
        assert item.action_mask is not None
        versions, mask = item.token_versions, item.action_mask
        assert set(versions[mask].tolist()) <= {1, 2}
        assert item.policy_version == int(versions[mask].min())
        mixed += len(set(versions[mask].tolist())) == 2
        for version, model in models.items():
            chosen = versions == version
            expected = log_probs_of(model, item.sequences.tolist(), 3, 1.0)
            torch.testing.assert_close(
                item.action_log_probs[chosen],
                expected[chosen],
                rtol=1e-4,
                atol=1e-4,
            )
    assert mixed
    assert ["version-2-" in path.name for path in tmp_path.glob("*") if path.is_dir()] == [True]


@pytest.mark.parametrize(
    ("staleness", "groups", "kind"), [(0, 2, vllm), (0, 5, SGLangEngine), (2, 5, vllm)]
)
def test_a_group_is_not_older_than_its_right_while_the_server_loads_slowly(
    server, client, namespace, tmp_path, staleness, groups, kind
):
    class Slow(EngineWeights):
        def _write(self, *version: Any) -> None:
            time.sleep(0.15)  # longer than the trainer needs for a version
            super()._write(*version)

    each, versions = 2, 12
    publish = publisher(client, namespace)
    engine = kind(server.url)
    weights = Slow(client, "trainer_0", engine, tmp_path, namespace=namespace)
    options = {
        "max_staleness": staleness,
        "groups_per_version": each,
        "weights": "trainer_0",
        "on_bad_group": "drop",
        "namespace": namespace,
    }
    with (
        ExperienceStream(client, "math", **options) as stream,
        ExperienceStream(client, "math", **options) as training,
    ):
        training.join_group()
        maker = EpisodeMaker(stream, episode, engine, weights=weights, group_size=2, groups=groups)

        def train() -> None:
            try:
                publish(1, 1)
                for version in range(2, versions + 2):
                    with training.take(each, timeout=30):
                        publish(version, version)
            finally:
                maker.stop()

        trainer = threading.Thread(target=train)
        trainer.start()
        maker.run(iter(lambda: prompts(1)[0], None))
        trainer.join()
        ledger = training.stats().ledger
        assert (ledger.acked, ledger.expired) == (versions * each, 0)


def publisher(client: Client, namespace: str) -> Callable[[int, int], None]:
    """Return a function that publishes the model of a seed as a version."""
    publisher = redrb.WeightPublisher(client, "trainer_0", namespace=namespace)

    def publish(version: int, seed: int) -> None:
        state = {f"actor.{name}": each for name, each in tiny_model(seed).state_dict().items()}
        publisher.publish(state, version=version)

    return publish


@pytest.mark.parametrize("kind", [vllm, SGLangEngine])
@pytest.mark.parametrize("while_idle", [False, True])
def test_no_sample_of_a_server_that_was_started_again_counts_before_it_has_the_weights(
    server, client, stream, namespace, tmp_path, kind, while_idle
):
    publisher(client, namespace)(3, 1)
    engine = kind(server.url)
    weights = EngineWeights(client, "trainer_0", engine, tmp_path, namespace=namespace)
    server.step_s = 0.02

    async def one(prompt, engine):
        if prompt["number"] == 5 and while_idle:
            server.restart()
        return await episode(prompt, engine)

    maker = EpisodeMaker(stream, one, engine, weights=weights, group_size=1, groups=2)
    if not while_idle:
        restarting = threading.Thread(target=lambda: (server.midway.wait(20), server.restart()))
        restarting.start()
    maker.run(prompts(10))
    groups = _all(stream)
    assert sorted(item.extras["number"] for [item] in groups) == list(range(10)), "none is filtered"
    assert stream.stats().ledger.filtered == 0
    right = tiny_model(1)
    for [item] in groups:
        assert item.token_versions is not None
        chosen = item.token_versions == 3
        assert chosen.tolist() == item.action_mask.tolist()
        expected = log_probs_of(right, item.sequences.tolist(), 3, 1.0)
        found = item.action_log_probs[chosen]
        torch.testing.assert_close(found, expected[chosen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [vllm, SGLangEngine])
@pytest.mark.parametrize("breaks", ["load", "label"])
def test_weights_that_another_maker_has_loaded_in_part_are_not_those_before(
    server, kind, breaks, tmp_path
):
    """Two makers use one server; the update of one is broken off, and the server goes on."""
    old, new = saved(tiny_model(1), tmp_path / "1"), saved(tiny_model(2), tmp_path / "2")

    async def sample():
        async with kind(server.url, retry_s=0.3) as engine, kind(server.url) as other:
            await engine.update(old, 1)
            assert (await engine.generate(PROMPT, max_new_tokens=2)).versions == [1, 1]
            reached = asyncio.Event()
            load, name = other._load, other._name

            async def broken_load(path):
                await load(path)
                reached.set()
                await asyncio.sleep(60)

            async def broken_name(label):
                if not label.startswith("loading"):
                    reached.set()
                    await asyncio.sleep(60)
                await name(label)

            if breaks == "load":
                other._load = broken_load
            else:
                other._name = broken_name
            updating = asyncio.create_task(other.update(new, 2))
            await reached.wait()
            updating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await updating
            with pytest.raises(EngineError, match="has lost its weights"):
                await engine.generate(PROMPT, max_new_tokens=2)
            await engine.update(new, 2)
            assert (await engine.generate(PROMPT, max_new_tokens=2)).versions == [2, 2]

    asyncio.run(sample())


def test_a_completion_before_another_maker_has_loaded_the_weights_again_does_not_count(
    server, tmp_path
):
    """Two makers use one server that was started again; one looks late at the label."""
    path, server.step_s = saved(tiny_model(1), tmp_path / "1"), 0.02

    async def sample():
        async with vllm(server.url) as first, vllm(server.url) as second:
            await first.update(path, 1)
            await second.update(path, 1)
            server.restart()
            looking, loaded = asyncio.Event(), asyncio.Event()
            look = second._weights_label_below

            async def late():
                looking.set()
                await loaded.wait()
                return await look()

            second._weights_label_below = late
            asking = asyncio.create_task(second.generate(PROMPT, max_new_tokens=12))
            assert await asyncio.to_thread(server.midway.wait, 20)
            await first.update(path, 1)  # this aborts the other's completion
            await asyncio.wait_for(looking.wait(), 20)
            loaded.set()
            done = await asking
            assert (second.version, second.has_lost_weights) == (1, False)
            return done

    done = asyncio.run(sample())
    assert done.versions == [1] * 12
    expected = log_probs_of(tiny_model(1), PROMPT + done.tokens, 3, 1.0)
    torch.testing.assert_close(torch.tensor(done.log_probs), expected)
    assert server.requests["/collective_rpc"] == 2


@pytest.mark.parametrize("kind", [vllm, SGLangEngine])
def test_a_server_that_was_started_again_after_it_has_loaded_weights_does_not_get_their_label(
    server, client, namespace, tmp_path, kind
):
    publisher(client, namespace)(3, 1)
    restarts = [2]

    async def sample():
        async with kind(server.url) as engine:
            load = engine._load

            async def slow(path):
                await load(path)
                if restarts[0]:
                    restarts[0] -= 1
                    server.restart()

            engine._load = slow
            with pytest.raises(EngineError, match="has the weights 'default' after it has loaded"):
                await engine.update(saved(tiny_model(2), tmp_path / "2"), 2)
            assert (engine.version, engine.has_lost_weights) == (None, True)
            weights = EngineWeights(client, "trainer_0", engine, tmp_path, namespace=namespace)
            assert await weights.update(timeout=5) == 3
            return await engine.generate(PROMPT, max_new_tokens=6)

    done = asyncio.run(sample())
    assert restarts == [0]
    assert done.versions == [3] * 6
    expected = log_probs_of(tiny_model(1), PROMPT + done.tokens, 3, 1.0)
    torch.testing.assert_close(torch.tensor(done.log_probs), expected)


@pytest.mark.parametrize("kind", [vllm, SGLangEngine])
def test_a_server_with_two_makers_gets_the_label_of_what_it_has(
    server, client, namespace, tmp_path, kind
):
    """One of two makers has another version still; both have named what they load."""
    publish = publisher(client, namespace)

    async def sample():
        async with kind(server.url) as early, kind(server.url) as late:
            found = []
            for engine, folder in ((late, "late"), (early, "early")):
                publish(1 + len(found), 1 + len(found))
                path = tmp_path / folder
                weights = EngineWeights(client, "trainer_0", engine, path, namespace=namespace)
                found.append((weights, engine, engine._load))
            (slow, _, load_slow), (quick, _, load_quick) = found
            named, loaded = asyncio.Event(), asyncio.Event()

            async def waits(source):
                named.set()
                await loaded.wait()
                await load_slow(source)
                late._load = load_slow
                loaded.clear()
                await loaded.wait()  # for the end of the other one's update

            async def beside(source):
                early._load = load_quick
                await load_quick(source)
                loaded.set()
                while late._load == waits:
                    await asyncio.sleep(0)

            late._load, early._load = waits, beside
            first = slow._catalogue.entry(1)
            look, slow._newest = slow._newest, lambda _: asyncio.sleep(0, first)
            updating = asyncio.create_task(slow.update(timeout=5))
            await named.wait()
            slow._newest = look
            assert await quick.update(timeout=5) == 2
            loaded.set()
            assert await updating == 2
            return [await engine.generate(PROMPT, max_new_tokens=4) for engine in (early, late)]

    for done in asyncio.run(sample()):
        assert done.versions == [2] * 4
        expected = log_probs_of(tiny_model(2), PROMPT + done.tokens, 3, 1.0)
        torch.testing.assert_close(torch.tensor(done.log_probs), expected)


@pytest.mark.parametrize("kind", [vllm, SGLangEngine])
def test_weights_that_another_maker_has_loaded_are_not_loaded_again(server, tmp_path, kind):
    """The other maker was killed before it took its pause back."""
    path = saved(tiny_model(1), tmp_path / "1")

    async def sample():
        async with kind(server.url) as killed, kind(server.url) as engine:
            await killed.update(path, 1)
            loaded = dict(server.requests)
            await killed._pause(abort=True)
            await engine.update(path, 1)
            for request in ("/collective_rpc", "/update_weights_from_disk"):
                assert server.requests.get(request) == loaded.get(request)
            return await asyncio.wait_for(engine.generate(PROMPT, max_new_tokens=4), 20)

    done = asyncio.run(sample())
    assert done.versions == [1] * 4
    expected = log_probs_of(tiny_model(1), PROMPT + done.tokens, 3, 1.0)
    torch.testing.assert_close(torch.tensor(done.log_probs), expected)


@pytest.mark.parametrize("kind", [vllm, SGLangEngine])
def test_a_version_that_cannot_be_loaded_does_not_keep_the_server_from_the_next(
    server, client, namespace, tmp_path, kind
):
    publish = publisher(client, namespace)
    server.broken_load = "version-2"

    async def follow():
        async with kind(server.url) as engine:
            weights = EngineWeights(client, "trainer_0", engine, tmp_path, namespace=namespace)
            publish(1, 1)
            await weights.update(timeout=5)
            publish(2, 2)
            with pytest.raises(EngineError, match="no such file"):
                await asyncio.wait_for(weights.update(timeout=5), 20)
            publish(3, 3)
            assert await weights.update(timeout=5) == 3

    asyncio.run(follow())


@pytest.mark.parametrize("joins", [True, False])
def test_a_damaged_version_is_fetched_once_and_the_next_one_is_loaded(
    client, namespace, tmp_path, monkeypatch, joins
):
    publish, fetched, loaded = publisher(client, namespace), [], []
    fetch = PrivateCopy.fetch

    def noted(self, catalogue, version, **options):
        fetched.append(version)
        return fetch(self, catalogue, version, **options)

    class Server(SGLangEngine):
        async def update(self, path, version, label=None, **_):
            loaded.append(version)

    monkeypatch.setattr(PrivateCopy, "fetch", noted)
    weights = EngineWeights(client, "trainer_0", Server("http://h"), tmp_path, namespace=namespace)
    first = 1 if joins else 2
    for version in range(1, first + 1):
        publish(version, version)
        if version < first:
            assert asyncio.run(weights.update(timeout=5)) == version
    client.execute("DEL", f"redrb:{{{namespace}:weights:trainer_0}}:chunk:{first}:0")
    timer = threading.Timer(2.5, publish, [first + 1, 9])
    timer.start()
    assert asyncio.run(weights.update(timeout=20)) == first + 1
    timer.join()
    assert fetched == list(range(1, first + 2))
    assert loaded == [version for version in range(1, first + 2) if version != first]


def test_makers_of_one_machine_share_their_folder(client, namespace, tmp_path):
    """A version is written once, and stays until no maker's server may read it any more."""
    publish = publisher(client, namespace)
    loaded: list[Path] = []

    class Server(SGLangEngine):
        async def update(self, path, version, label=None, **_):
            loaded.append(path)

    one, other = (
        EngineWeights(client, "trainer_0", Server("http://h"), tmp_path, namespace=namespace)
        for _ in range(2)
    )

    def folders_after(*makers):
        for maker in makers:
            asyncio.run(maker.update(timeout=5))
        return {path for path in tmp_path.iterdir() if path.is_dir()}

    publish(1, 1)
    assert folders_after(one, other) == {loaded[0]} == {loaded[1]}
    publish(2, 2)
    assert folders_after(one) == {loaded[0], loaded[2]}
    assert folders_after(other) == {loaded[2]} == {loaded[3]}


def test_a_version_costs_its_delta(
    client: Client, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maker that has written a version has it as the base of the next one."""
    ways: list[str] = []
    follow = Replica.follow

    def noted(self: Replica, step: Step, pin: Pin) -> None:
        ways.append(step.how)
        follow(self, step, pin)

    monkeypatch.setattr(Replica, "follow", noted)
    loaded: list[Path] = []

    class Server(SGLangEngine):
        async def update(
            self, path: Path, version: int, label: str | None = None, **_: Any
        ) -> None:
            loaded.append(path)

    state = {"actor.weight": torch.arange(100_000.0), "critic.weight": torch.zeros(1)}
    publisher = redrb.WeightPublisher(client, "trainer_0", namespace=namespace)
    weights = EngineWeights(client, "trainer_0", Server("http://h"), tmp_path, namespace=namespace)
    for number in (1, 2, 3):
        state["actor.weight"][number] = -1.0
        publisher.publish(state)
        assert asyncio.run(weights.update(timeout=5)) == number
        written = load_safetensors(loaded[-1])
        assert written.keys() == {"weight"}
        assert torch.equal(written["weight"], state["actor.weight"])
    assert ways == ["full", "delta", "delta"]


def test_an_adapter_whose_weights_are_not_published_is_refused(server, client, namespace, tmp_path):
    settings = {"layer": redrb.weights.LoraConfig(r=2, lora_alpha=2.0)}
    pair = {"layer.lora_A": torch.ones(2, 8), "layer.lora_B": torch.ones(8, 2)}
    redrb.WeightPublisher(client, "t", namespace=namespace).publish_lora((pair, settings))

    async def update():
        async with vllm(server.url) as engine:
            weights = EngineWeights(client, "t", engine, tmp_path, namespace=namespace, model="")
            message = "version 1 of weights 't' is an adapter whose weights are not published"
            with pytest.raises(WeightError, match=message):
                await weights.update(timeout=5)

    asyncio.run(update())
    assert set(server.requests) == {"/init_weight_transfer_engine"}


def test_weights_of_a_redis_that_has_lost_its_data_replace_larger_numbers(
    server, client, namespace, tmp_path
):
    async def follow():
        engine = vllm(server.url)
        async with engine:
            weights = EngineWeights(client, "trainer_0", engine, tmp_path, namespace=namespace)
            assert await weights.update(timeout=5) == 7
            client.execute("FLUSHALL")
            publisher(client, namespace)(1, 2)
            assert await weights.update(timeout=5) == 1
            done = await engine.generate(PROMPT, max_new_tokens=4)
            expected = log_probs_of(tiny_model(2), PROMPT + done.tokens, 3, 1.0)
            torch.testing.assert_close(torch.tensor(done.log_probs), expected)

    publisher(client, namespace)(7, 1)
    asyncio.run(follow())


def test_a_server_that_stays_broken_ends_the_maker_and_keeps_the_prompts(server, stream):
    begun = []

    def some():
        for prompt in prompts(200):
            begun.append(prompt)
            yield prompt

    server.failing = [500] * 10**5
    engine = vllm(server.url, retry_s=0.5)
    with pytest.raises(EngineError, match="answered 500"):
        EpisodeMaker(stream, episode, engine, group_size=2, groups=3).run(some())
    assert len(begun) <= 4
    assert stream.stats().ledger.filtered == 0


def test_a_prompt_that_a_server_refuses_costs_its_group_only(server, stream):
    server.failing = [400]
    EpisodeMaker(stream, episode, vllm(server.url), group_size=1, groups=1).run(prompts(3))
    assert (stream.count(), stream.stats().ledger.filtered) == (2, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a task is given up
@pytest.mark.parametrize("hangs", ["thread", "finish"])
def test_what_the_user_runs_cannot_keep_a_maker(server, stream, hangs):
    hanging, free = threading.Event(), threading.Event()

    async def in_thread(prompt, engine):
        hanging.set()
        await asyncio.to_thread(free.wait, 60)
        return await episode(prompt, engine)

    async def finish(items):
        hanging.set()
        while not free.is_set():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
        return items

    maker = EpisodeMaker(
        stream,
        in_thread if hangs == "thread" else episode,
        vllm(server.url),
        finish=finish,
        group_size=1,
        drain_timeout=0.5,
        stop_timeout=0.5,
    )
    stopping = threading.Thread(target=lambda: (hanging.wait(20), maker.stop("enough")))
    stopping.start()
    began = time.monotonic()
    try:
        maker.run(prompts(1))
        assert time.monotonic() - began < 10
    finally:
        free.set()
    assert maker.stopped == "enough"
    gc.collect()


def _all(stream: ExperienceStream) -> list[list[BufferItem]]:
    with stream.take(stream.count(), timeout=0) as lease:
        return lease.groups()


def test_what_cannot_be_used_is_said(stream, client):
    engine = vllm("http://localhost:1")
    with pytest.raises(ConfigError, match="async def episode"):
        EpisodeMaker(stream, print, engine)
    with ExperienceStream(client, "ordered", order="admission", max_staleness=1) as ordered:
        with pytest.raises(ConfigError, match="resume=False"):
            EpisodeMaker(ordered, episode, engine)
        EpisodeMaker(ordered, episode, engine, resume=False)
    with pytest.raises(RecordError, match="does not begin with its prompt"):
        Trajectory([1, 2], Trajectory([2, 2]).item())
