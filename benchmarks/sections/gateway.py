"""A gateway for agents beside its engine alone: turns a second, added time, and memory.

An agent's turn at the engine alone is one request with all tokens. At the gateway it is a chat
completion: the engine renders and parses it, too, and Redis stores the turn. Sessions at the
gateway are opened and rewarded in the same time. The imitated engine answers at once, so turns a
second are those of the processors, which all processes share.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx
import redis

import redrb
from benchmarks.gateway_servers import MODEL, TASK, Agents, Engine, GatewayServer
from benchmarks.options import Options
from benchmarks.processes import Worker, started
from benchmarks.server import private_server
from redrb.gateway.session import Turn
from redrb.gateway.store import SessionStore, session_name
from redrb.stream import ExperienceStream
from redrb.train.engines import Generation

Shape: TypeAlias = tuple[int, int, int]
"""Agents, turns of a session, and sampled tokens of a turn."""

SHAPES: tuple[Shape, ...] = (
    (1, 1, 100),  # the weakest: one agent, and one turn of a session
    (1, 1, 2000),
    (1, 20, 100),
    (10, 20, 100),
    (50, 1, 2000),
    (200, 1, 100),
)
QUICK_SHAPES = SHAPES[:3]
ROUND_TURNS = 100
"""Least turns of a round."""

OPEN = 2000
"""Open sessions whose memory is measured."""

CONNECTIONS = 500
"""Connections that are opened soon enough for none to be over when the last one is there."""

LONGEST = 200
"""Sessions of 32,000 tokens."""

SENT = 2**15
"""Bytes that a slow sender has sent of its body."""


def run(options: Options) -> dict[str, Any]:
    """Return figures of each case, and bytes of sessions and connections."""
    shapes = QUICK_SHAPES if options.quick else SHAPES
    number = OPEN // (20 if options.quick else 1)
    with private_server(options.server) as server, started([lambda: Worker(Engine)]) as [engine]:
        cases = _cases(options, server.url, _asked(engine, "url"), shapes)
        held = _connection_bytes(server.url, _asked(engine, "url"), min(number, CONNECTIONS))
        return {
            "server": server.name,
            "cases": cases,
            "session_bytes": _session_bytes(server.url, number),
            "connection_bytes": held,
        }


def _cases(
    options: Options, redis_url: str, engine_url: str, shapes: Sequence[Shape]
) -> dict[str, Any]:
    cases = {}
    workers = [lambda: Worker(GatewayServer, redis_url, engine_url), lambda: Worker(Agents)]
    with started(workers) as [gateway, agents]:
        for count, turns, tokens in shapes:
            found = _case(options, agents, gateway, engine_url, (count, turns, tokens))
            name = f"{count} agents, {turns} turns, {tokens} tokens"
            cases[name] = found
            print(f"  {name}: {found}", flush=True)
    return cases


def _asked(worker: Worker, name: str, *given: Any) -> Any:
    worker.ask(name, *given)
    return worker.result()


def _case(
    options: Options, agents: Worker, gateway: Worker, engine_url: str, shape: Shape
) -> dict[str, float]:
    """Let the gateway and the engine alone alternate; one untimed round comes first."""
    (count, turns, tokens), url = shape, _asked(gateway, "url")
    sessions = max(1, round(ROUND_TURNS * options.size / (count * turns)))
    given = count, sessions, turns, tokens
    made = count * sessions * turns
    rounds = []
    for number in range(-1, options.rounds):
        found = {}
        for way in ("gateway", "engine") if number % 2 else ("engine", "gateway"):
            before_s = _asked(gateway, "processor_s")
            asked = partial(_asked, agents, f"{way}_turns", url if way == "gateway" else engine_url)
            lasted, each = asked(*given)
            spent_s = _asked(gateway, "processor_s") - before_s
            found[way] = made / lasted, median(each), spent_s / made
        if number >= 0:
            rounds.append(found)
    gateways, engines = ([each[way] for each in rounds] for way in ("gateway", "engine"))
    pairs = list(zip(gateways, engines, strict=True))
    return {
        "turns_per_s": round(median(each[0] for each in gateways), 1),
        "engine_turns_per_s": round(median(each[0] for each in engines), 1),
        "over_engine": round(median(a[0] / b[0] for a, b in pairs), 3),
        "ms": round(median(each[1] for each in gateways) * 1000, 2),
        "engine_ms": round(median(each[1] for each in engines) * 1000, 2),
        "added_ms": round(median(a[1] - b[1] for a, b in pairs) * 1000, 2),
        "gateway_processor_ms": round(median(each[2] for each in gateways) * 1000, 2),
    }


def _session_bytes(url: str, count: int) -> dict[str, int]:
    """Return the bytes of an open session in Redis, by its tokens."""
    found = {}
    for tokens in (0, 1_000, 32_000):
        number = min(count, LONGEST) if tokens > 1000 else count
        with redis.Redis.from_url(url) as raw:
            raw.flushall()
            client = redrb.connect(url)
            stream = ExperienceStream(client, TASK)
            before = raw.info("memory")["used_memory"]
            with SessionStore(stream, timeout_s=600) as store:
                for _ in range(number):
                    opened = store.open("p", size=1, wait_s=0)
                    if tokens:
                        session = store.read(session_name(opened.id, opened.secret))
                        store.append(session, _turn(tokens))
            found[f"{tokens} tokens"] = round((raw.info("memory")["used_memory"] - before) / number)
            client.close()
    return found


def _turn(tokens: int) -> Turn:
    """Return a turn of which half of the tokens were sampled; ids are those of large models."""
    half = tokens // 2
    ids = [(at * 7919) % 150_000 for at in range(half)]
    done = Generation(ids, [-0.693147 - at / 1e6 for at in range(half)], [1] * half, "stop")
    message = {"role": "assistant", "content": "a" * 4 * half}
    reply = {"id": "a" * 24, "created": 0, "message": message, "finish": "stop", "stop": None}
    stored = json.dumps({**reply, "usage": [half, half]}).encode()
    digests = {"request": b"r" * 16, "after": b"a" * 16}
    return Turn(parent=-1, given=ids, sampled=done, reply=stored, **digests)


def _connection_bytes(redis_url: str, engine_url: str, count: int) -> dict[str, int]:
    """Return the bytes of a gateway's process for each connection, by what its client does."""
    found = {}
    for kind in ("idle", "slow sender", "slow reader"):
        with started([lambda: Worker(GatewayServer, redis_url, engine_url)]) as [gateway]:
            url, number = _asked(gateway, "url"), count
            (path, body), length = _long_reply(url)
            request = _request(path, body)
            if kind == "idle":
                request = _request("/none", b"{}")
            elif kind == "slow sender":
                request, length = _request("/sessions", b" " * SENT, more=1), SENT
            before = _asked(gateway, "memory")
            with ExitStack() as scope:
                for _ in range(number):
                    client = scope.enter_context(socket.socket())
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    client.connect(("127.0.0.1", urlsplit(url).port))
                    client.sendall(request)
                    if kind != "slow sender":
                        client.recv(1)  # its reply has begun
                held = round((_asked(gateway, "memory") - before) / number)
            found[kind if kind == "idle" else f"{kind} of {length} bytes"] = held
    return found


def _long_reply(url: str) -> tuple[tuple[str, bytes], int]:
    """Sample a long turn; return a request that gets its stored reply, and the reply's length."""
    opened = httpx.post(f"{url}/sessions", json={"prompt": "p"}).raise_for_status().json()
    messages = [{"role": "user", "content": "a"}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 20_000, "return_token_ids": True}
    path, body = f"{urlsplit(opened['url']).path}/chat/completions", json.dumps(asked).encode()
    headers = {"content-type": "application/json"}
    reply = httpx.post(url + path, content=body, headers=headers, timeout=60).raise_for_status()
    return (path, body), len(reply.content)


def _request(path: str, body: bytes, *, more: int = 0) -> bytes:
    """Return a request, of whose body some bytes are missing."""
    head = f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body) + more}\r\n\r\n".encode() + body
