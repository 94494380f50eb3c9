"""`redrb engine-weights`: fleets of servers that imitate vLLM, which come, go, hang and restart."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import redrb
from redrb import Client, WeightPublisher
from redrb.cli.__main__ import main
from redrb.connection import fake
from redrb.environment import PREFIX, child_environment
from redrb.errors import ConfigError
from redrb.train.engines import EngineWeights, VLLMEngine, fleet
from redrb.train.engines.fleet import Fleet
from tests.engine_server import EngineServer, tiny_model
from tests.weight_backend import BackendServer

NAME = "policy"
URL = "fake://fleets"


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for something that a server or another thread does."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def state(seed: int) -> dict[str, torch.Tensor]:
    return {f"actor.{name}": each for name, each in tiny_model(seed).state_dict().items()}


class Trainer:
    """Publishes the model of a seed, which is the version's number unless it is given."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._publisher = WeightPublisher(client, NAME, namespace=namespace, keep=100)

    def publish(self, version: int, seed: int | None = None) -> None:
        self._publisher.publish(state(seed or version), version=version)


def has(server: EngineServer, version: int, seed: int | None = None) -> bool:
    """Whether a server has a version, answers, and says so."""
    expected = tiny_model(seed or version).state_dict()
    return (
        server.label.startswith(f"version-{version}-")
        and server._open.is_set()
        and all(torch.equal(each, expected[n]) for n, each in server.model.state_dict().items())
    )


def have(servers: Sequence[EngineServer], version: int) -> bool:
    return all(has(server, version) for server in servers)


@pytest.fixture
def client() -> Iterator[Client]:
    with redrb.connect(URL) as client:
        yield client
    fake._servers.pop("fleets", None)


@pytest.fixture
def trainer(client: Client, namespace: str) -> Trainer:
    return Trainer(client, namespace)


@pytest.fixture
def start() -> Iterator[Callable[..., list[BackendServer]]]:
    """Start so many servers."""
    with ExitStack() as running:

        def start(count: int, url: str = URL) -> list[BackendServer]:
            return [running.enter_context(BackendServer(url)) for _ in range(count)]

        yield start


@pytest.fixture
def follow(client: Client, namespace: str) -> Iterator[Callable[..., Any]]:
    """Let a fleet of servers follow the versions in this block."""

    @contextmanager
    def following(
        servers: Sequence[EngineServer],
        *,
        at_once: int = 1,
        folder: Path | None = None,
        client: Client = client,
    ) -> Iterator[None]:
        engines = [VLLMEngine(each.url, model="", retry_s=0.0) for each in servers]
        first = EngineWeights(client, NAME, engines[0], folder, namespace=namespace)
        weights = [first, *map(first.beside, engines[1:])]
        pairs = list(zip(engines, weights, strict=True))
        made = Fleet(client, NAME, pairs, namespace=namespace, at_once=at_once)
        tasks: list[asyncio.Task[None]] = []
        loop = asyncio.new_event_loop()

        async def run() -> None:
            tasks.append(asyncio.ensure_future(made.run()))
            await asyncio.wait(tasks)

        thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
        thread.start()
        try:
            yield
        finally:
            until(lambda: tasks)
            loop.call_soon_threadsafe(tasks[0].cancel)
            thread.join(30)
            assert not thread.is_alive()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
        if not tasks[0].cancelled():
            tasks[0].result()

    return following


@pytest.mark.parametrize("count", [1, 3])
def test_each_server_gets_the_newest_of_fifty_versions_in_a_row(start, follow, trainer, count):
    servers = start(count)
    with follow(servers):
        for version in range(1, 51):
            trainer.publish(version)
        until(lambda: have(servers, 50))
    for server in servers:
        assert server.loaded == sorted(set(server.loaded)), "no version twice, none after a newer"
        assert len(server.loaded) < 50, "versions that were replaced meanwhile are left out"
        assert server.mode == "keep"


@pytest.mark.parametrize("count", [1, 3])
def test_servers_that_end_and_start_again_get_the_newest_version(
    start, follow, trainer, count, caplog
):
    caplog.set_level(logging.INFO, "redrb")
    servers = start(count)
    gone, others = servers[0], servers[1:]
    with follow(servers):
        trainer.publish(1)
        until(lambda: have(servers, 1))
        gone.end()
        until(lambda: f"{gone.url} is away" in caplog.text)
        trainer.publish(2)
        until(lambda: have(others, 2))
        gone.start()
        until(lambda: has(gone, 2), seconds=20)
        gone.restart()  # no look has failed: only the label tells
        until(lambda: gone.loaded[2:] == [2] and has(gone, 2), seconds=20)
    assert gone.loaded == [1, 2, 2]
    assert all(server.loaded == [1, 2] for server in others)
    assert f"{gone.url} is back, with the weights 'default'" in caplog.text
    assert f"{gone.url} has the weights 'default' and not 'version-2-" in caplog.text


def test_a_server_that_starts_when_version_20_is_there_gets_that_one(start, follow, trainer):
    early, late = start(2)
    late.end()
    with follow([early, late]):
        for version in range(1, 21):
            trainer.publish(version)
        until(lambda: has(early, 20))
        late.start()
        until(lambda: has(late, 20), seconds=20)
    assert late.loaded == [20]


@pytest.mark.parametrize("at_once", [1, 2])
def test_so_many_servers_load_at_once_and_the_others_answer(start, follow, trainer, at_once):
    servers = start(4)
    for server in servers:
        server.holds = "/update_weights"
    with follow(servers, at_once=at_once):
        trainer.publish(1)
        for loaded in range(0, 4, at_once):
            until(lambda: sum(server.paused for server in servers) == at_once)
            held = [server for server in servers if server.paused]
            until(lambda: all(server.held.is_set() for server in held))  # noqa: B023
            assert sum(has(server, 1) for server in servers) == loaded
            assert sum(server.paused for server in servers) == at_once
            for server in held:
                server.go.set()
            until(lambda: have(held, 1))  # noqa: B023


@pytest.mark.parametrize("hangs_at", ["", "/weight_info", "/pause", "/update_weights", "/resume"])
def test_a_server_that_hangs_does_not_keep_the_others(
    start, follow, trainer, hangs_at, monkeypatch, caplog
):
    monkeypatch.setattr(fleet, "SLOT_S", 0.5)
    monkeypatch.setattr("redrb.train.engines.engine.LOOK_S", 0.5)
    servers = start(3)
    hanging, *others = servers
    with follow(servers):
        trainer.publish(1)
        until(lambda: have(servers, 1))
        hanging.hangs, hanging.hangs_at = not hangs_at, hangs_at
        if not hangs_at or hangs_at == "/weight_info":
            until(lambda: f"{hanging.url} is away" in caplog.text)
        trainer.publish(2)
        until(lambda: have(others, 2), seconds=20)
        trainer.publish(3)
        until(lambda: have(others, 3), seconds=20)
        hanging.hangs, hanging.hangs_at = False, ""
        until(lambda: have(servers, 3))


def test_a_damaged_version_is_tried_once_and_the_next_one_is_loaded(
    start, follow, trainer, client, namespace, caplog
):
    servers = start(2)
    with follow(servers):
        trainer.publish(1)
        until(lambda: have(servers, 1))
    trainer.publish(2)
    client.execute("DEL", f"redrb:{{{namespace}:weights:{NAME}}}:chunk:2:0")
    with follow(servers):
        until(lambda: caplog.text.count("WeightCorrupt") == 2)
        looks = servers[0].requests["/weight_info"]
        until(lambda: servers[0].requests["/weight_info"] > looks + 3)
        assert have(servers, 1), "they go on with the version before"
        trainer.publish(3)
        until(lambda: have(servers, 3))
    assert [server.requests["/update_weights"] for server in servers] == [3, 3]


def test_a_server_that_could_not_reach_redis_gets_the_same_version_later(
    start, follow, trainer, monkeypatch
):
    """Not only the next version, which may never come."""
    [server] = start(1)
    server.redis_url = "redis://127.0.0.1:1"
    with follow([server]):
        trainer.publish(1)
        until(lambda: server.requests.get("/update_weights", 0) >= 2)
        server.redis_url = URL
        until(lambda: has(server, 1))


def test_a_mixture_of_two_versions_answers_nothing_until_one_is_loaded(start, follow, trainer):
    [server] = start(1)
    server.break_at = 2
    with follow([server]):
        trainer.publish(1)
        until(lambda: server.requests.get("/update_weights"))
        until(lambda: has(server, 1))
    assert server.requests["/resume"] == 1


def test_idle_servers_cost_redis_nothing(start, follow, trainer, monkeypatch):
    updates: list[str] = []
    update = EngineWeights.update

    async def noted(self: EngineWeights, **options: Any) -> int:
        updates.append(self._engine.where)
        return await update(self, **options)

    monkeypatch.setattr(EngineWeights, "update", noted)
    servers = start(9)
    with follow(servers):
        trainer.publish(1)
        until(lambda: have(servers, 1))
        looks = servers[8].requests["/weight_info"]
        until(lambda: servers[8].requests["/weight_info"] > looks + 3)
    assert sorted(updates) == sorted(server.url for server in servers)


def test_redis_that_is_emptied_begins_anew_with_smaller_numbers(
    start, follow, trainer, client, namespace
):
    servers = start(2)
    with follow(servers):
        trainer.publish(7)
        until(lambda: have(servers, 7))
        client.execute("FLUSHALL")
        looks = servers[0].requests["/weight_info"]
        until(lambda: servers[0].requests["/weight_info"] > looks + 2)
        assert have(servers, 7), "nothing is published: they keep what they have"
        Trainer(client, namespace).publish(1)
        until(lambda: have(servers, 1))


def test_redis_that_is_started_again_is_waited_for(own_server, start, follow, namespace):
    redis = own_server("--appendonly", "yes", "--appendfsync", "always")
    servers = start(2, redis.url)
    with redrb.connect(redis.url, retry_s=0.5) as client, follow(servers, client=client):
        Trainer(client, namespace).publish(1)
        until(lambda: have(servers, 1))
        redis.kill()
        looks = servers[0].requests["/weight_info"]
        until(lambda: servers[0].requests["/weight_info"] > looks + 3)
        assert have(servers, 1)
        redis.start()
        with redrb.connect(redis.url) as other:
            Trainer(other, namespace).publish(2)
        until(lambda: have(servers, 2))


def test_servers_without_the_backend_load_a_folder(follow, trainer, tmp_path):
    with EngineServer() as one, EngineServer() as other:
        servers = [one, other]
        with follow(servers, folder=tmp_path, at_once=2):
            for version in (1, 2):
                trainer.publish(version)
                until(lambda: have(servers, version))  # noqa: B023
            assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_a_server_without_the_backend_is_said_at_once_and_the_others_go_on(
    start, follow, trainer, caplog
):
    with EngineServer() as plain:
        with pytest.raises(ConfigError, match="fetches no weights from Redis"), follow([plain]):
            until(lambda: "/init_weight_transfer_engine" in plain.requests)
            time.sleep(0.2)
        [server] = start(1)
        with follow([plain, server]):
            trainer.publish(1)
            until(lambda: has(server, 1))
            until(lambda: plain.requests["/init_weight_transfer_engine"] > 2)
    assert caplog.text.count("fetches no weights from Redis") == 1
    assert "/pause" not in plain.requests


# The command.


@contextmanager
def command(
    url: str, servers: Sequence[EngineServer], *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "redrb.cli.__main__", "engine-weights"],
            *[server.url for server in servers],
            *["--weights", NAME, "--json", *arguments],
        ],
        env=child_environment(without=PREFIX, REDRB_URL=url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def event(process: subprocess.Popen[str], text: str) -> dict[str, Any]:
    """Read events until one has a text in it."""
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line)
        if text in found["event"]:
            return found
    raise AssertionError(f"it ended before {text!r}: {process.stderr.read()}")


@pytest.fixture
def real_trainer(owner: Client, namespace: str) -> Trainer:
    return Trainer(owner, namespace)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_logs_each_update_and_ends_at_a_signal_without_a_pause(
    real_url, start, real_trainer, namespace, number
):
    servers = start(2, real_url)
    with command(real_url, servers, "--namespace", namespace, "--pause", "abort") as process:
        event(process, "has come, with the weights 'default'")
        real_trainer.publish(1)
        event(process, "has version 1 after ")
        until(lambda: have(servers, 1))
        servers[0].holds = servers[1].holds = "/update_weights"
        real_trainer.publish(2)
        until(lambda: any(server.paused for server in servers))
        until(lambda: any(server.held.is_set() for server in servers))
        process.send_signal(number)
        until(lambda: not any(server.paused for server in servers), seconds=5)
        assert process.wait(30) == 0
        assert servers[0].mode == "abort"


@pytest.mark.long
def test_a_command_that_was_killed_during_an_update_is_started_again(
    real_url, start, real_trainer, namespace
):
    [server] = start(1, real_url)
    server.holds = "/update_weights"
    arguments = ("--namespace", namespace)
    real_trainer.publish(1)
    with command(real_url, [server], *arguments) as process:
        assert server.held.wait(60)
        process.kill()
        process.wait()
    assert server.paused
    server.holds = ""
    with command(real_url, [server], *arguments) as process:
        event(process, "has version 1 after ")
        until(lambda: has(server, 1))


def test_arguments_that_cannot_be_used_are_said(run, monkeypatch):
    words = ("engine-weights", "http://h:1", "--weights", NAME)
    for more, text in (
        (("--at-once", "0"), "--at-once 0: give 1 or more"),
        (("--api-key-from", "NO_SUCH_KEY"), "there is no variable NO_SUCH_KEY"),
        (("localhost:8000",), "give the address of a server, http://host:port"),
    ):
        status, _, errors = run(*words, *more)
        assert status == 2
        assert text in errors
    with EngineServer() as plain:
        status, _, errors = run("engine-weights", plain.url, "--weights", NAME)
        assert status == 2
        assert "--weight-transfer-config" in errors


def test_a_fleet_ends_whenever_it_is_cancelled(start, trainer, client, namespace):
    """Also when the reply of a server arrives in the same turn of the loop."""
    [server] = start(1)
    trainer.publish(1)

    async def ended(turns: int) -> None:
        engine = VLLMEngine(server.url, model="", retry_s=0.0)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asked = asyncio.Event()

        async def label() -> str:
            asked.set()
            return await answer

        engine._weights_label = label  # type: ignore[method-assign]
        weights = EngineWeights(client, NAME, engine, namespace=namespace)
        running = asyncio.create_task(
            Fleet(client, NAME, [(engine, weights)], namespace=namespace).run()
        )
        await asked.wait()
        answer.set_result("default")
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        _, late = await asyncio.wait({running}, timeout=20)
        assert not late
        assert running.cancelled()

    for turns in range(12):
        asyncio.run(ended(turns))
        assert not server.paused


@pytest.mark.long
@pytest.mark.parametrize("right", [True, False])
def test_the_key_of_the_servers_is_read_from_a_variable(
    run, monkeypatch, start, real_url, real_trainer, right
):
    [server] = start(1, real_url)
    server.api_key = "s3cret"
    real_trainer.publish(1)
    monkeypatch.setenv("KEY_OF_SERVERS", "s3cret" if right else "wrong")
    ending = sigterm_after_condition(
        (lambda: has(server, 1)) if right else (lambda: server.requests.get("/weight_info", 0) > 1)
    )
    status, output, _ = run(
        "engine-weights", server.url, "--weights", NAME, "--api-key-from", "KEY_OF_SERVERS"
    )
    ending.join()
    assert status == 0
    assert ("is away" not in output) == right
    assert ("answered 401" in output) != right
    assert "s3cret" not in output
    assert has(server, 1) == right


def sigterm_after_condition(condition: Callable[[], object]) -> threading.Thread:
    """End the command in this process once a condition holds."""

    def end() -> None:
        until(condition)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    return thread


@pytest.mark.parametrize("role", ["observer", "weight-reader"])
def test_a_user_that_may_only_read_weights_suffices(
    log_in, start, owner, namespace, real_trainer, monkeypatch, caplog, capsys, role
):
    user = log_in(role, weights=NAME)
    monkeypatch.setenv("REDRB_URL", user.url)
    [server] = start(1, log_in("weight-reader", weights=NAME).url)
    real_trainer.publish(1)
    ending = sigterm_after_condition(lambda: "has version 1 after" in caplog.text)
    words = ["engine-weights", server.url, "--weights", NAME, "--namespace", namespace]
    assert main(words) == 0
    ending.join()
    assert "has version 1 after" in capsys.readouterr().out
