"""The version that an engine notes for a token computed it, also if its request came late."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from redrb.train.engines import engine as engines
from redrb.train.engines.completions import Sampled
from redrb.train.engines.engine import Engine
from redrb.train.engines.labels import weights_label

MOST = 6


class Server(Engine):
    """A server whose tokens are the versions that computed them; requests arrive when let in.

    Like vLLM and SGLang it lets requests that arrive during a pause wait, and aborts those that
    it has begun.
    """

    def __init__(self) -> None:
        super().__init__("http://here", timeout=10, retry_s=10)
        self.arrives = asyncio.Event()
        self.begun = asyncio.Event()
        self.paused = asyncio.Event()
        self.running = asyncio.Event()
        self.running.set()
        self.have = self.version = 1
        self.label = "default"
        self.sent = 0

    async def _request(self, tokens: list[int], most: int, **_: Any) -> Sampled:
        self.sent += 1
        await self.arrives.wait()
        await self.running.wait()
        found: list[int] = []
        for _token in range(most):
            if not self.running.is_set():
                return Sampled(found, [0.0] * len(found), "abort", label=self.label)
            found.append(self.have)
            if len(found) == 2:
                self.begun.set()
            await asyncio.sleep(0)
        return Sampled(found, [0.0] * len(found), "length", label=self.label)

    async def _pause(self, *, abort: bool) -> None:
        self.running.clear()
        self.paused.set()

    async def _name(self, label: str) -> None:
        self.label = label
        if not label.startswith("loading"):
            self.have = int(label.removeprefix("version-").replace("/", "-").partition("-")[0])

    async def _weights_label(self) -> str:
        return self.label

    async def _load(self, path: Path) -> None:
        assert not self.running.is_set()
        self.arrives.set()

    async def _resume(self) -> None:
        self.running.set()


@pytest.fixture(autouse=True)
def short_quiet(monkeypatch):
    monkeypatch.setattr(engines, "QUIET_S", 0.05)


def test_a_request_that_arrives_after_the_pause_is_computed_and_noted_with_the_new_version():
    async def late():
        server = Server()
        asking = asyncio.create_task(server.generate([0], max_new_tokens=MOST))
        await asyncio.sleep(0)
        await server.update(Path("/new"), 2)
        done = await asking
        assert server.sent == 2
        return done

    done = asyncio.run(late())
    assert done.versions == done.tokens == [2] * MOST


def test_a_request_that_was_begun_goes_on_with_the_new_version():
    async def aborted():
        server = Server()
        server.arrives.set()
        asking = asyncio.create_task(server.generate([0], max_new_tokens=MOST))
        await server.begun.wait()
        await server.update(Path("/new"), 2)
        return await asking

    done = asyncio.run(aborted())
    assert done.versions == done.tokens
    assert set(done.versions) == {1, 2}
    assert len(done.tokens) == MOST


def test_two_updates_in_a_row_let_no_request_between_them():
    async def twice():
        server = Server()
        first = asyncio.create_task(server.update(Path("/new"), 2))
        await server.paused.wait()
        asking = asyncio.create_task(server.generate([0], max_new_tokens=MOST))
        await first
        server.arrives.clear()
        await server.update(Path("/newer"), 3)
        return await asking

    done = asyncio.run(twice())
    assert done.versions == done.tokens


@pytest.mark.parametrize("count", [1, 2, MOST])
@pytest.mark.parametrize("goes", ["on", "back"])
def test_a_label_that_is_told_afterwards_is_not_that_of_the_tokens(count, goes):
    """Another maker loads other weights before the label is asked for."""

    def label(version: int) -> str:
        return weights_label(version, 1e9 + version, "0" * 16)

    async def moved():
        server = Server()
        server.arrives.set()
        await server.update(Path("/2"), 2, label(2))
        request, other = server._request, 3 if goes == "on" else 1

        async def then_moves(tokens: list[int], most: int, **sampling: Any) -> Sampled:
            done = await request(tokens, most, **sampling)
            if server.sent > 1:
                return done
            await server._name(f"{label(other)}/0a")
            return Sampled(done.tokens, done.log_probs, done.finish, label=server.label)

        server._request = then_moves
        asking = asyncio.create_task(server.generate([0], max_new_tokens=count))
        while not server.has_lost_weights:
            await asyncio.sleep(0)
        assert not asking.done()
        await server.update(Path("/3"), 3, label(3))
        return await asking

    done = asyncio.run(moved())
    assert done.versions == done.tokens == [3] * count


def test_the_end_gives_a_late_request_up():
    async def ended():
        server = Server()
        asking = asyncio.create_task(server.generate([0], max_new_tokens=MOST))
        await asyncio.sleep(0)
        await server.abort()
        return await asking

    done = asyncio.run(ended())
    assert (done.tokens, done.finish) == ([], "abort")


def test_a_caller_that_is_cancelled_takes_its_request_with_it():
    async def cancelled():
        server = Server()
        asking = asyncio.create_task(server.generate([0], max_new_tokens=MOST))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        return len(server._in_flight)

    assert asyncio.run(cancelled()) == 0
