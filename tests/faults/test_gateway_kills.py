"""A gateway that is killed at any point of a session's life: no turn is twice, and none is lost."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

import redrb
from redrb import ExperienceStream, WeightPublisher
from redrb.gateway.client import GatewayClient
from tests import warm
from tests.audit import audit
from tests.chat_server import MODEL, ChatBackend, Record
from tests.engine_server import tiny_model
from tests.gateways import GatewayProcess
from tests.parts_audit import audit_parts
from tests.proxy import Link, Proxy
from tests.scenes import until
from tests.servers import Server, programs

openai = pytest.importorskip("openai")

GROUP = 2
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Fuse:
    """Burns at one point of what passes some proxies: before, in, or after one of the pieces."""

    def __init__(self, burns: Callable[[], None]) -> None:
        self.passed, self._at, self._burns = 0, -1, burns
        self._lock = threading.Lock()

    def arm(self, point: int) -> None:
        """Burn before the piece of this number ends; three points are one piece."""
        with self._lock:
            self.passed, self._at = 0, point

    def left(self, size: int) -> int | None:
        """Return how much of the next piece passes before it burns; None: all, and it does not."""
        with self._lock:
            if self._at < 0:
                return None
            piece, way = divmod(self._at, 3)
            self.passed += 1
            if self.passed <= piece:
                return None
            self._at = -1
            return (0, size // 2, size)[way]

    def burn(self) -> None:
        self._burns()


class FusedProxy(Proxy):
    """A proxy whose pieces pass a fuse."""

    def __init__(self, url: str, fuse: Fuse) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        super().__init__(parts.hostname, parts.port)
        self._fuse = fuse

    def _send(self, link: Link, to: Any) -> None:
        held = link.held[to]
        most = self._fuse.left(len(held)) if held else None
        if most is None:
            super()._send(link, to)
            return
        to.send(held[:most])
        self._fuse.burn()
        self._cut([link])


class Lane:
    """Agents at one address, behind which is one gateway, and another one after its death."""

    def __init__(self, server: ChatBackend, namespace: str, stack: ExitStack) -> None:
        self._server, self._namespace = server, namespace
        self._stack, self._starter = stack, stack.enter_context(ThreadPoolExecutor(1))
        self.fuse = Fuse(self._kill)
        self.redis = stack.enter_context(FusedProxy(server.redis_url, self.fuse))
        self.engine = stack.enter_context(FusedProxy(server.url, self.fuse))
        self.current = self._started()
        self.agents = stack.enter_context(FusedProxy(self.current.url, self.fuse))
        self.url = f"http://127.0.0.1:{self.agents.port}"
        self.killed = 0
        self._next: Future[GatewayProcess] = self._starter.submit(self._started)

    def _started(self) -> GatewayProcess:
        redis_url = f"redis://127.0.0.1:{self.redis.port}/0"
        engine = f"http://127.0.0.1:{self.engine.port}"
        gateway = GatewayProcess(redis_url, engine, namespace=self._namespace)
        self._stack.callback(gateway.kill)
        return gateway

    def _kill(self) -> None:
        after = self._next.result(60)
        parts = urlsplit(after.url)
        self.agents.retarget("127.0.0.1", parts.port or 0)
        self.current.kill()
        self.current, self.killed = after, self.killed + 1

    def session(self, prompt: str, point: int | None) -> tuple[str, list[list[int]]]:
        """Let an agent have a session, and kill its gateway at a point; return id and tokens."""
        self._next.result(60)
        before = self.killed
        if point is not None:
            self.fuse.arm(point)
        found = asyncio.run(agent(self.url, prompt, 3))
        self.fuse.arm(-1)
        if self.killed > before:
            self._next = self._starter.submit(self._started)
        return found


async def agent(url: str, prompt: str, turns: int) -> tuple[str, list[list[int]]]:
    """Have some turns with the SDK of OpenAI, which repeats its requests; return their tokens."""
    tokens = []
    async with GatewayClient(url) as gateway, gateway.session(prompt, group_size=GROUP) as session:
        async with openai.AsyncOpenAI(base_url=session.url, api_key="any", max_retries=8) as sdk:
            history: list[Any] = [{"role": "user", "content": prompt}]
            for turn in range(turns):
                reply = await sdk.chat.completions.create(
                    model=MODEL,
                    messages=history,
                    tools=[TOOL],
                    max_tokens=4,
                    extra_body={"return_token_ids": True},
                )
                tokens.append(reply.choices[0].token_ids)
                message = reply.choices[0].message.model_dump()
                results = [
                    {"role": "tool", "tool_call_id": each["id"], "content": "4"}
                    for each in message.get("tool_calls") or ()
                ]
                history += [message, *results, {"role": "user", "content": str(turn)}]
        await session.reward(1.0)
    return session.url.split("/")[-2].split(".")[0], tokens


@pytest.fixture
def server(server_urls: Any) -> Iterator[ChatBackend]:
    with ChatBackend(server_urls("valkey-9.1")) as server:
        yield server


@contextmanager
def opened(url: str, namespace: str) -> Iterator[ExperienceStream]:
    """Publish weights, and open a task that gives rights."""
    settings = {"max_staleness": 1, "groups_per_version": 1000, "weights": "trainer_0"}
    with redrb.connect(url, retry_s=30) as client:
        state = tiny_model(1).state_dict()
        named = {f"actor.{name}": each for name, each in state.items()}
        WeightPublisher(client, "trainer_0", namespace=namespace).publish(named, version=1)
        with ExperienceStream(client, "agents", namespace=namespace, **settings) as stream:
            stream.join_group()
            yield stream


@pytest.fixture
def stream(server: ChatBackend, namespace: str) -> Iterator[ExperienceStream]:
    with opened(server.redis_url, namespace) as stream:
        yield stream


def check(stream: ExperienceStream, server: ChatBackend, told: dict[str, list[list[int]]]) -> None:
    """Check that each group has its sessions, and each session the turns that its agent was told.

    What is trained must be what the engine has sampled, each turn once.
    """
    groups, found = len(told) // GROUP, 0
    turns = sum(map(len, told.values()))
    record = Record(server)  # but for what was sampled with other weights, and thrown away
    record.samples = [each for each in record.samples if "default" not in each.labels]
    with stream.take(groups, timeout=60) as lease:
        for group in lease.groups():
            assert len(group) == len({item.extras["redrb_session"] for item in group}) == GROUP
            for item in group:
                trained = item.sequences[-len(item.action_mask) :][item.action_mask].tolist()
                assert trained == list(itertools.chain(*told.pop(item.extras["redrb_session"])))
            found += record.check(group)
        lease.ack()
    assert not told
    assert found >= turns  # of one that broke off, the engine has sampled the rest
    audit(stream)
    audit_parts(stream)
    stats = stream.stats()
    assert stats.ledger.put == stats.ledger.acked == groups
    assert stats.ledger.balanced
    assert (stats.parts.dropped, stats.parts.dead, stats.parts.balanced) == (0, 0, True)
    # a gateway that was killed with a right holds it until its deadline
    assert (stats.admission.used, stats.admission.late) == (groups, 0)
    assert stats.admission.balanced


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_a_gateway_may_be_killed_at_any_point_of_a_session(
    server: ChatBackend, stream: ExperienceStream, namespace: str, step: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    told: dict[str, list[list[int]]] = {}
    with ExitStack() as stack:
        lane = Lane(server, namespace, stack)
        for number in itertools.count():
            point = number * step
            told.update([lane.session(f"p{number // GROUP}", point)])
            if lane.killed <= number and number % GROUP:
                break
    assert lane.killed > 200 / step
    assert len(told) == number + 1
    check(stream, server, told)


TRAINER = """
import sys
import redrb
with redrb.connect(sys.argv[1], retry_s=30) as client:
    with redrb.ExperienceStream(client, "agents", namespace=sys.argv[2], lease_ms=1000) as stream:
        lease = stream.take(1)
        print("took", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("own_server", list(programs())[:1], indirect=True)
@pytest.mark.parametrize("fsync", ["everysec", pytest.param("always", marks=pytest.mark.slow)])
def test_agents_go_on_while_engine_redis_gateway_and_trainer_are_killed(
    own_server: Callable[..., Server], namespace: str, fsync: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.05)
    store = own_server("--appendonly", "yes", "--appendfsync", fsync)
    with (
        ChatBackend(store.url) as server,
        opened(store.url, namespace) as stream,
        ThreadPoolExecutor(8) as pool,
        ExitStack() as stack,
    ):
        gateway = GatewayProcess(store.url, server.url, namespace=namespace)
        port = int(gateway.url.rpartition(":")[2])
        words = [sys.executable, "-c", TRAINER, store.url, namespace]
        trainer = warm.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(trainer.communicate)  # it closes the pipes
        stack.callback(trainer.kill)
        server.step_s = 0.02
        asked = [pool.submit(asyncio.run, agent(gateway.url, f"p{at // 2}", 5)) for at in range(8)]
        until(lambda: len(server.samples) >= 4, 60)
        server.end()
        server.start()  # with other weights
        until(lambda: len(server.samples) >= 12, 60)
        store.kill()
        store.start()
        until(lambda: len(server.samples) >= 20, 60)
        gateway.kill()
        gateway = GatewayProcess(store.url, server.url, namespace=namespace, port=port)
        told = dict(each.result(120) for each in asked)
        assert trainer.stdout
        assert trainer.stdout.readline() == "took\n"
        trainer.kill()  # with its lease
        check(stream, server, told)
        assert gateway.end()[0] == 0
