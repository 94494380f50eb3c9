"""The application: sessions, the three protocols below a session's URL, and its reward."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from redrb.connection.stop import Stop
from redrb.errors import (
    AdmissionTimeout,
    ConfigError,
    DecodeError,
    EncodeError,
    EngineError,
    RecordError,
    RedrbError,
    SessionOver,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnknownSession,
    UnknownTask,
)
from redrb.gateway import limits
from redrb.gateway.chat import ChatServer
from redrb.gateway.limits import Bodies, Threads, within
from redrb.gateway.messages import (
    MOST_BYTES,
    Ask,
    Json,
    Protocol,
    Refused,
    ask_of,
    known_in,
    parsed,
)
from redrb.gateway.replies import PROTOCOLS, Replies, Reply, error_of, models_of
from redrb.gateway.session import Session, Turn
from redrb.gateway.store import Opened, SessionStore, session_name
from redrb.gateway.turns import Place, place_of, sampled
from redrb.stream.assembly.calls import OnIncomplete
from redrb.stream.worker import Worker
from redrb.train.engines import EngineWeights
from redrb.unpacking import Reading
from redrb.watch.page.guard import is_token
from redrb.watch.page.server import serve

MOST_REWARD = 3e38
"""Largest reward, of either sign: samples have it as float32."""

MOST_KNOWN = 2**14
"""Most sessions of which a gateway knows that they live."""

_SERVED = {"connections": 4096, "grace_s": 10, "idle_s": 75}
"""Clients close their idle connections sooner, and send nothing on one that is being closed. No
session begins after the signal, and what its request waits for then is shorter than the grace: it
gets an answer, or drops the session."""

KEY_LENGTHS = range(16, 201)
"""Characters of the Idempotency-Key of a session: with the token, it opens the session."""

_ANSWERS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], int, str], ...] = (
    (UnknownTask, 500, limits.BROKEN),
    ((ConfigError, RecordError, EncodeError), 400, ""),
    (UnknownSession, 404, ""),
    (SessionOver, 409, ""),
    (AdmissionTimeout, 503, ""),
    ((StoreUnavailable, StoreFull, StoreClosed), 503, limits.BUSY),
    ((StoreError, DecodeError), 500, limits.BROKEN),
    (RedrbError, 503, limits.BUSY),
)
"""Status of each error, the first that fits; and a text for those whose own may name hosts."""

_log = logging.getLogger("redrb")


class _Opening(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    size: int = msgspec.field(name="group_size", default=1)
    tags: Json = {}
    least: int | None = None
    on_incomplete: OnIncomplete = "drop"


class _Ending(msgspec.Struct, forbid_unknown_fields=True):
    reward: Annotated[float, msgspec.Meta(ge=-MOST_REWARD, le=MOST_REWARD)]
    extras: Json = {}


class Gateway:
    """Answers requests; of a session it knows only that it is there: any other one goes on with it.

    Args:
        worker: Announces the gateway as a maker of the task.
        token: Opens sessions, as a bearer token; "": none is needed.
        on_edited: What becomes of a history that does not go on from the newest turn.
        public_url: Where agents reach the gateway; "": where the request for a session came to.
    """

    def __init__(
        self,
        store: SessionStore,
        chat: ChatServer,
        weights: EngineWeights,
        worker: Worker,
        *,
        token: str = "",
        on_edited: Literal["branch", "error"] = "branch",
        public_url: str = "",
    ) -> None:
        self._store, self._chat, self._weights, self._worker = store, chat, weights, worker
        self._token, self._public_url = token, public_url.rstrip("/")
        self._may_branch = on_edited == "branch"
        worker.role, worker.engine, worker.weights_name = "maker", chat.engine, weights.name
        self._loaded, self._bodies, self._replies = asyncio.Event(), Bodies(), Replies()
        self._calls, self._opens, self._rewards = (Threads(limits.MOST_CALLS) for _ in range(3))
        self._parsers, self._stop = Threads(limits.MOST_PARSED), Stop()
        self._known: dict[str, float] = {}  # until when sessions that were used live on

    async def serve(
        self,
        listening: socket.socket,
        *,
        hosts: Sequence[str],
        ready: Callable[[], None] = lambda: None,
        stopped: asyncio.Event | None = None,
    ) -> None:
        """Serve sessions until a signal comes, or `stopped` is set; then close server and weights.

        Args:
            listening: Socket of the server.
            hosts: Values of the header Host that are served.
            ready: Called when the server takes requests.
            stopped: Ends it; signals are left to whoever sets it.

        Raises:
            RedrbError: The first weights could not be loaded.
        """
        try:
            await serve(self.app(hosts), self, listening, ready, **_SERVED, stopped=stopped)
        finally:
            self._weights.close()
            await self._chat.close()

    async def run(self) -> None:
        """Give each version of the weights to the server."""
        with self._worker.waiting("weights"):
            await self._weights.update()
        self._loaded.set()
        await self._weights.follow()

    async def close(self) -> None:
        """Wait for no more rights; other requests in flight have a while to end."""
        self._stop.ask("the gateway ends")

    def app(self, hosts: Sequence[str] = ("*",)) -> Starlette:
        """Return the application; `hosts` are values of the header Host that are served."""
        below = "/s/{id}.{secret}"
        small: Any = {"methods": ["POST"], "max_body_size": limits.SMALL_BYTES}
        routes = [
            Route("/sessions", self._open, **small),
            Route(f"{below}/v1/models", self._models),
            Route(f"{below}/reward", self._reward, **small),
            Route(below, self._drop, methods=["DELETE"]),
        ]
        for path, protocol in PROTOCOLS.items():
            turn = partial(self._turn, protocol)
            routes.append(Route(f"{below}/v1/{path}", turn, methods=["POST"]))
        return Starlette(
            routes=routes,
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
            exception_handlers={RedrbError: _failed, HTTPException: _failed},
            max_body_size=MOST_BYTES,
        )

    async def _open(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token and not is_token(given, self._token):
            raise Refused("the gateway's token is missing or wrong.", 401)
        key = request.headers.get("idempotency-key", "")
        if key and len(key) not in KEY_LENGTHS:
            raise Refused("Idempotency-Key: give 16 to 200 characters that nobody can guess.")
        async with self._bodies.of(request) as data:
            options = msgspec.structs.asdict(known_in(parsed(data), _Opening))
        await self._until_loaded()
        options["once"] = json.dumps([self._token, key]) if key else ""
        opened = await self._opens.run(partial(self._begun, options), request=request)
        if opened.version is not None:
            with suppress(TimeoutError):  # staleness is counted when the group is put
                async with asyncio.timeout(limits.REACH_S):
                    await self._weights.reach(opened.version)
        if opened.is_new and await request.is_disconnected():  # nobody gets to know it
            await self._calls.run(partial(self._store.drop, opened.name, unless_shared=True))
        base = self._public_url or str(request.base_url).rstrip("/")
        url = f"{base}/s/{opened.id}.{opened.secret}/v1"
        found = {"id": opened.id, "url": url, "weight_version": opened.version}
        return JSONResponse(found, 201)

    def _begun(self, options: Json) -> Opened:
        if self._stop:
            raise Refused(limits.BUSY, 503)
        return self._store.open(**options, wait_s=limits.WAIT_S, stop=self._stop)

    async def _turn(self, protocol: Protocol, request: Request) -> Response:
        name = await self._used(request, known=True)
        key = request.headers.get("idempotency-key", "")
        async with self._bodies.of(request) as data:
            threads = self._calls if len(data) < limits.LONG_BYTES else self._parsers
            ask, session, found = await threads.run(self._found, name, protocol, data, key)
        if isinstance(found, Place):
            await self._until_loaded()
            may = self._may_branch
            async with self._in_use(name):
                made = await sampled(self._chat, session, ask, found, may_branch=may)
                append = partial(self._store.append, may_branch=may)
                found = await self._calls.run(append, session, made)
            self._worker.weight_version = max(found.sampled.versions)
        with Reading("the reply of a turn"):
            reply, done = Reply(ask, json.loads(found.reply)), found.sampled
        if ask.return_token_ids:
            reply.tokens = {"token_ids": done.tokens, "token_versions": done.versions}
            reply.tokens["token_log_probs"] = done.log_probs
        if ask.stream:
            return self._replies.of(b"".join(reply.events()), "text/event-stream")
        return self._replies.of(json.dumps(reply.body()).encode(), "application/json")

    def _found(
        self, name: str, protocol: Protocol, data: bytes, key: str
    ) -> tuple[Ask, Session, Place | Turn]:
        """Return a request, its session, and the turn that answers it or the place of this turn."""
        ask, session = ask_of(protocol, data, key=key), self._store.read(name)
        if ask.model != self._chat.model:
            raise Refused(f"model={ask.model!r:.80}: this gateway samples {self._chat.model!r}.")
        turn = next((each for each in session.turns if each.request == ask.request), None)
        return ask, session, turn or place_of(session, ask)

    async def _models(self, request: Request) -> Response:
        await self._used(request)
        return JSONResponse(models_of(self._chat.model))

    async def _reward(self, request: Request) -> Response:
        name = await self._used(request, known=True)
        async with self._bodies.of(request) as data:
            options = msgspec.structs.asdict(known_in(parsed(data), _Ending))
        put = partial(self._store.reward, name, **options)
        return JSONResponse({"group": await self._rewards.run(put)})

    async def _drop(self, request: Request) -> Response:
        name = await self._used(request)
        await self._calls.run(self._store.drop, name)
        self._known.pop(name, None)
        return Response(status_code=204)

    async def _used(self, request: Request, *, known: bool = False) -> str:
        """Return the name of a request's session, which lives on, or raise UnknownSession.

        Args:
            known: It need not be looked for while it surely lives: it is read after the body.
        """
        name, now = session_name(*request.path_params.values()), time.monotonic()
        if not known or self._known.get(name, 0.0) < now:
            await self._calls.run(self._store.use, name)
            self._known.pop(name, None)
            timeout_s, until_read_s = self._store.timeout_s, limits.BODY_S + limits.WAIT_S
            self._known[name] = now + min(timeout_s / 3, timeout_s - until_read_s)
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return name

    @asynccontextmanager
    async def _in_use(self, name: str) -> AsyncIterator[None]:
        """Let a session live on, however long a turn takes."""

        async def use() -> None:
            while True:
                await asyncio.sleep(self._store.timeout_s / 3)
                with suppress(StoreUnavailable, Refused):  # the next time, or the turn says it
                    await self._calls.run(self._store.use, name)

        using = asyncio.create_task(use())
        try:
            yield
        finally:
            if not using.cancel():
                using.result()  # raises what ended it

    async def _until_loaded(self) -> None:
        text = "the server has no published weights yet: does a trainer publish?"
        async with within(limits.WAIT_S, text):
            await self._loaded.wait()


def _failed(request: Request, error: Exception) -> Response:
    """Return an error in the protocol's form."""
    match error:
        case Refused():
            status, text = error.status, str(error)
        case HTTPException():
            status, text = error.status_code, error.detail
        case EngineError() if error.is_refusal:
            status, text = 400, str(error).replace(error.where, "")
        case _:
            status, text = next(each[1:] for each in _ANSWERS if isinstance(error, each[0]))
            if text:
                _log.warning("a request gets status %d: %s", status, error)
    # OpenAI's and Anthropic's SDKs would repeat a request with status 409
    pause = "0" if isinstance(error, AdmissionTimeout) else "5"  # it has waited
    headers = {503: {"retry-after": pause}, 409: {"x-should-retry": "false"}}.get(status)
    body = error_of(request.url.path, status, text or str(error))
    return JSONResponse(body, status, headers)
