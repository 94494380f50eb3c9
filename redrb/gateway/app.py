"""The application: sessions, the three protocols below a session's URL, and its reward."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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
)
from redrb.gateway import limits
from redrb.gateway.chat import ChatServer
from redrb.gateway.limits import Bodies, Threads, within
from redrb.gateway.messages import (
    MOST_BYTES,
    Json,
    Protocol,
    Refused,
    ask_of,
    known_in,
    parsed,
)
from redrb.gateway.replies import PROTOCOLS, Replies, Reply, error_of, models_of
from redrb.gateway.store import SessionStore, session_name
from redrb.gateway.turns import OnEdited, Turns
from redrb.stream.assembly.calls import OnIncomplete
from redrb.stream.worker import Worker
from redrb.train.engines import EngineWeights
from redrb.unpacking import Reading

MOST_REWARD = 3e38
"""Largest reward, of either sign: samples have it as float32."""

KEY_LENGTHS = range(16, 201)
"""Characters of the Idempotency-Key of a session: with the token, it opens the session."""

_STATUSES: dict[type[Exception], int] = {
    **dict.fromkeys((ConfigError, RecordError, EncodeError), 400),
    UnknownSession: 404,
    SessionOver: 409,
    AdmissionTimeout: 503,
}

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
    """Answers requests; it keeps nothing of a session, so that any other one goes on with it.

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
        on_edited: OnEdited = "branch",
        public_url: str = "",
    ) -> None:
        self._store, self._chat, self._weights, self._worker = store, chat, weights, worker
        self._token, self._public_url = token, public_url.rstrip("/")
        worker.role, worker.engine, worker.weights_name = "maker", chat.engine, weights.name
        self._loaded, self._bodies, self._replies = asyncio.Event(), Bodies(), Replies()
        self._calls, self._opens, self._rewards = (Threads(limits.MOST_CALLS) for _ in range(3))
        self._parsers = Threads(limits.MOST_PARSED)
        self._turns = Turns(store, chat, self._calls, self._parsers, on_edited)

    async def run(self) -> None:
        """Give each version of the weights to the server."""
        with self._worker.waiting("weights"):
            await self._weights.update()
        self._loaded.set()
        await self._weights.follow()

    async def close(self) -> None:
        """End nothing: requests in flight have a while to end."""

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
        if self._token and not hmac.compare_digest(given.encode("latin-1"), self._token.encode()):
            raise Refused("the gateway's token is missing or wrong.", 401)
        key = request.headers.get("idempotency-key", "")
        if key and len(key) not in KEY_LENGTHS:
            raise Refused("Idempotency-Key: give 16 to 200 characters that nobody can guess.")
        async with self._bodies.of(request) as data:
            body = known_in(parsed(data), _Opening)
        await self._until_loaded()
        options = msgspec.structs.asdict(body) | {"wait_s": limits.WAIT_S}
        options["once"] = json.dumps([self._token, key]) if key else ""
        opened = await self._opens.run(self._store.open, request=request, **options)
        if opened.version is not None:
            with suppress(TimeoutError):  # staleness is counted when the group is put
                async with asyncio.timeout(limits.WAIT_S):
                    await self._weights.reach(opened.version)
        if opened.is_new and await request.is_disconnected():  # nobody gets to know it
            await self._calls.run(self._store.drop, opened.name, unless_shared=True)
        base = self._public_url or str(request.base_url).rstrip("/")
        url = f"{base}/s/{opened.id}.{opened.secret}/v1"
        found = {"id": opened.id, "url": url, "weight_version": opened.version}
        return JSONResponse(found, 201)

    async def _turn(self, protocol: Protocol, request: Request) -> Response:
        name = await self._used(request)
        key = request.headers.get("idempotency-key", "")
        async with self._bodies.of(request) as data:
            ask = await self._parsers.run(ask_of, protocol, data, key=key)
        session = await self._calls.run(self._store.read, name)
        if ask.model != self._chat.model:
            raise Refused(f"model={ask.model!r:.80}: this gateway samples {self._chat.model!r}.")
        turn = next((each for each in session.turns if each.request == ask.request), None)
        if turn is None:
            await self._until_loaded()
            async with self._in_use(name):
                turn = await self._turns.sample(session, ask)
            self._worker.weight_version = max(turn.sampled.versions)
        with Reading("the reply of a turn"):
            reply, done = Reply(ask, json.loads(turn.reply)), turn.sampled
        if ask.return_token_ids:
            reply.tokens = {
                "token_ids": done.tokens,
                "token_log_probs": done.log_probs,
                "token_versions": done.versions,
            }
        if ask.stream:
            return self._replies.of(b"".join(reply.events()), "text/event-stream")
        return self._replies.of(json.dumps(reply.body()).encode(), "application/json")

    async def _models(self, request: Request) -> Response:
        await self._used(request)
        return JSONResponse(models_of(self._chat.model))

    async def _reward(self, request: Request) -> Response:
        name = await self._used(request)
        async with self._bodies.of(request) as data:
            body = known_in(parsed(data), _Ending)
        options = msgspec.structs.asdict(body)
        return JSONResponse({"group": await self._rewards.run(self._store.reward, name, **options)})

    async def _drop(self, request: Request) -> Response:
        name = await self._used(request)
        await self._calls.run(self._store.drop, name)
        return Response(status_code=204)

    async def _used(self, request: Request) -> str:
        """Return the name of a request's session, which lives on, or raise UnknownSession."""
        name = session_name(*request.path_params.values())
        await self._calls.run(self._store.use, name)
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
    known = (status for kind, status in _STATUSES.items() if isinstance(error, kind))
    status, text = next(known, 0), str(error)
    match error:
        case Refused():
            status = error.status
        case HTTPException():
            status, text = error.status_code, error.detail
        case EngineError() if error.is_refusal:
            status, text = 400, text.replace(error.where, "")
    if not status:  # the text may name hosts
        status, text = (500, limits.BROKEN) if _lasts(error) else (503, limits.BUSY)
        _log.warning("a request gets status %d: %s", status, error)
    # OpenAI's and Anthropic's SDKs would repeat a request with status 409
    pause = "0" if isinstance(error, AdmissionTimeout) else "5"  # it has waited
    headers = {503: {"retry-after": pause}, 409: {"x-should-retry": "false"}}.get(status)
    return JSONResponse(error_of(request.url.path, status, text), status, headers)


def _lasts(error: Exception) -> bool:
    """Whether a request that is sent again would meet the same error of Redis."""
    passes = (StoreUnavailable, StoreFull, StoreClosed)
    return isinstance(error, StoreError | DecodeError) and not isinstance(error, passes)
