"""Requests to a gateway: each is answered, without an error of the gateway itself.

Input is a byte for the path, one for headers, the length of a header, the header, and a body, or
edits of one of the seeds: a byte for the place and one for the value. A request that was answered
is sent again, and then goes on with its reply. The server that renders,
samples and parses is imitated; sessions are in memory, but for those that requests open.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import redrb
from redrb import ExperienceStream
from redrb.codec import encode_groups
from redrb.errors import EngineError, UnknownSession
from redrb.gateway.app import Gateway
from redrb.gateway.chat import ChatServer
from redrb.gateway.replies import PROTOCOLS
from redrb.gateway.session import Session, Turn, decode_turn, encode_turn
from redrb.gateway.store import SessionStore, session_name
from redrb.train.engines import Generation
from tests.chat_server import (
    CALL,
    END,
    MODEL,
    THOUGHT,
    assert_tool,
    converted,
    digits,
    parsed,
    rendered,
    text_of,
)
from tests.gateway_turns import reply_of

TOKEN = b"token"
TURNS = [f"{{session}}/v1/{path}" for path in PROTOCOLS]
PATHS = [*TURNS, "/sessions", "{session}/reward", "{session}/v1/models", "{session}", "{header}"]
STATUSES = {200, 201, 204, 307, 400, 401, 404, 405, 409, 413, 415}
SHORT = {"max_tokens": 9, "model": MODEL}
VALUES = [
    *(None, True, -1, 0, 1, 2**31, 2**64, 2**200, 1e308, 0.5, float("nan"), "", "7", "x" * 5000),
    *("\0\n", "\ud800", "é", "assistant", "tool", "auto", [], {}, [[]], [None], [""], {"": ""}),
    *({"type": "text", "text": "7"}, [{"type": "text", "text": ""}], {"type": "image"}, MODEL),
    json.loads("[" * 70 + "]" * 70),
    {"type": "tool_use", "id": [], "name": {}, "input": ""},
    {"type": "tool_result", "tool_use_id": 1, "content": [{"type": "thinking"}], "is_error": "x"},
    {"id": 1, "function": {"name": 2, "arguments": "[" * 3000}},
    {"role": "assistant", "content": "7", "tool_calls": [{}]},
    {"role": 7, "content": [None]},
]


class _Server:
    """Renders, samples and parses; replies depend on the prompt alone."""

    where = "http://engine"

    async def request(
        self, path: str, body: dict[str, Any], *, last: bool = False
    ) -> dict[str, Any]:
        """Return the answer; each has a connection of its own, so that `last` changes nothing."""
        json.dumps(body).encode()
        try:
            return self._answer(path, body)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise EngineError(repr(error), where=self.where, status=400) from error

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/tokenize":
            return {"tokens": digits(body["prompt"])}
        if path.endswith("/render"):
            for tool in body.get("tools", ()):
                assert_tool(tool)
            return {"token_ids": rendered(converted(body) if "messages/" in path else body)}
        if path.startswith("/v1/chat"):
            [choice] = body["generate_response"]["choices"]
            return {"choices": [{"message": parsed(choice["token_ids"], 0)}]}
        [choice] = body["generate_responses"][0]["choices"]
        return {"choices": [{"text": text_of(choice["token_ids"])}]}

    async def repeated(self, request: Any) -> Any:
        return await request()

    async def generate(self, tokens: list[int], *, max_new_tokens: int, **_: Any) -> Generation:
        drawn = hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).digest()
        found = [int(each) % 10 for each in drawn[:4]]
        found[drawn[5] % 4] = (CALL, THOUGHT, 7, 8)[drawn[6] % 4]
        found = [*found, END][:max_new_tokens]
        finish = "stop" if found[-1] == END else "length"
        return Generation(found, [-0.5] * len(found), [1] * len(found), finish)


class _Sessions(SessionStore):
    """Sessions in memory, with the checks of what is stored."""

    def begin(self) -> str:
        """Begin the only session; return its path."""
        self._now = Session(id="a", index=0, size=1, name=session_name("a", "b"))
        done = Generation([1, END], [-0.5] * 2, [1] * 2, "stop")
        turn = Turn(
            parent=-1,
            request=b"",
            after=b"",
            given=[1],
            sampled=done,
            reply=json.dumps(reply_of("1")).encode(),
        )
        self.append(self._now, turn)
        return "/s/a.b"

    def use(self, name: str) -> None:
        if name != session_name("a", "b"):
            raise UnknownSession

    def read(self, name: str, *, ends: bool = False) -> Session:
        self.use(name)
        return self._now

    def append(self, session: Session, turn: Turn, *, may_branch: bool = True) -> Turn:
        session.turns.append(decode_turn(encode_turn(turn), len(session.turns)))
        return turn

    def reward(self, name: str, reward: float, *, extras: Any = None) -> int:
        return len(encode_groups([self.read(name).items(reward, extras)]))

    def drop(self, name: str, *, unless_shared: bool = False) -> None:
        pass


class _Bench:
    """A gateway, and the event loop that it runs in."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        stream = ExperienceStream(redrb.connect("fake://fuzz"), "agents")
        server: Any = _Server()
        worker: Any = SimpleNamespace(waiting=lambda _: nullcontext())
        weights: Any = SimpleNamespace(name="weights")
        chat = ChatServer(server, server, MODEL, 4096)
        self.sessions = _Sessions(stream, timeout_s=600)
        gateway = Gateway(self.sessions, chat, weights, worker, token=TOKEN.decode())
        gateway._loaded.set()
        self._app: Any = gateway.app()

    def ask(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> tuple[int, bytes]:
        """Send a request; return status and body of its reply."""
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(b"host", b"here"), *headers],
            "server": ("here", 80),
        }
        return self._loop.run_until_complete(self._asked(scope, body))

    async def _asked(self, scope: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        begins, sent = iter([{"type": "http.request", "body": body}]), []

        async def receive() -> dict[str, Any]:
            for event in begins:
                return event
            await asyncio.Event().wait()
            raise AssertionError

        async def send(event: dict[str, Any]) -> None:
            sent.append(event)

        async with asyncio.timeout(60):
            await self._app(scope, receive, send)
        return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])


_bench = cache(_Bench)


def one_input(data: bytes) -> None:
    """Send one request, again if it was answered, and one that goes on from it."""
    path, kinds, length, rest = *(data[:3] + bytes(3))[:3], data[3:]
    given, body = rest[:length], rest[length:]
    body = _edited(body) if kinds & 16 else body
    bench = _bench()
    place = PATHS[path % len(PATHS)]
    shown = place.format(
        session=bench.sessions.begin() if "session}" in place else "", header=given
    )
    if place == "{header}":
        shown = given.decode("latin-1")
    method = ("POST", "POST", "GET", "DELETE")[kinds % 4]
    kind = b"text/plain" if kinds & 4 else b"application/json"
    headers = [(b"content-type", kind), (b"idempotency-key", given)]
    headers.append((b"authorization", b"Bearer " + (given if kinds & 8 else TOKEN)))

    def ask(body: bytes) -> tuple[int, bytes]:
        status, reply = bench.ask(method, shown, headers, body)
        assert status in STATUSES, (status, reply)
        return status, reply

    status, reply = ask(body)
    if status == 200 and place in TURNS:
        assert ask(body) == (status, reply), "a retry gets another reply"
        sent = json.loads(body)
        if not sent.get("stream"):
            _goes_on(place, sent, json.loads(reply), ask)


def _edited(data: bytes) -> bytes:
    """Return a body of the seeds with other values at up to eight places."""
    first, *edits = data or b"\0"
    bodies = [each[3 + each[2] :] for each in _requests()]
    body = json.loads(bodies[first % len(bodies)])
    for at, what in zip(edits[:16:2], edits[1:16:2], strict=False):
        places = list(_places(body))
        if places:
            within, name = places[at % len(places)]
            within[name] = copy.deepcopy([*VALUES, body][what % (len(VALUES) + 1)])
    return json.dumps(body).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    names: Any = ()
    if isinstance(value, dict | list):
        names = list(value) if isinstance(value, dict) else range(len(value))
    for name in names:
        yield value, name
        yield from _places(value[name])


def _goes_on(place: str, sent: dict[str, Any], reply: dict[str, Any], ask: Any) -> None:
    if place == TURNS[1]:
        sent["prompt"] += reply["choices"][0]["text"] + "2"
    else:
        found = reply["choices"][0]["message"] if "choices" in reply else reply
        message = {"role": "assistant", "content": found["content"]}
        message |= {name: found[name] for name in ("tool_calls",) if name in found}
        sent["messages"] += [message, {"role": "user", "content": "2"}]
    status, _ = ask(json.dumps(sent).encode())
    assert status in (200, 400), status


def _request(path: int, body: Any, *, header: bytes = b"", kinds: int = 0) -> bytes:
    return bytes([path, kinds, len(header)]) + header + json.dumps(body).encode()


def seeds() -> Iterator[bytes]:
    """Yield a request of each kind, as it is and with an edit."""
    for number, request in enumerate(_requests()):
        yield request
        yield request[:1] + bytes([request[1] | 16, 0, number, 3 * number, 2 * number])


def _requests() -> Iterator[bytes]:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    user = {"role": "user", "content": "12"}
    history = [
        {"role": "system", "content": "1"},
        user,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "7"}]},
    ]
    sampling = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["7"], "n": 1}
    yield _request(0, {"messages": [user], **SHORT})
    yield _request(0, {"messages": history, "tools": [tool], **sampling, **SHORT}, header=b"key")
    yield _request(0, {"messages": [user], "stream": True, "return_token_ids": True, **SHORT})
    yield _request(1, {"prompt": "123", **sampling, **SHORT})
    blocks = [
        user,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "7"}]},
    ]
    theirs = {"name": "look", "input_schema": {"type": "object"}}
    yield _request(2, {"messages": blocks, "system": "1", "tools": [theirs], **SHORT})
    yield _request(
        2, {"messages": [user], "thinking": {"type": "disabled"}, "stream": True, **SHORT}
    )
    rule = {"least": 1, "on_incomplete": "dead", "tags": {"a": 1}}
    yield _request(3, {"prompt": "p", "group_size": 2, **rule})
    yield _request(3, {"prompt": "p"}, header=b"wrong", kinds=8)
    yield _request(4, {"reward": 0.5, "extras": {"a": [1]}})
    yield _request(5, {}, kinds=2)
    yield _request(6, {}, kinds=3)
    yield _request(7, {"reward": 1}, header=b"/s/a.b/reward")
