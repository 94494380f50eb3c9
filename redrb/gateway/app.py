"""The application: sessions, the three protocols below a session's URL, and its reward."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Literal, TypeVar

import anyio.to_thread
import msgspec
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from redrb.errors import (
    AdmissionTimeout,
    ConfigError,
    EncodeError,
    EngineError,
    RecordError,
    RedrbError,
    SessionOver,
    StoreUnavailable,
    UnknownSession,
)
from redrb.gateway.chat import ChatServer
from redrb.gateway.messages import (
    MOST_BYTES,
    Ask,
    Json,
    Protocol,
    Refused,
    ask_of,
    beginnings,
    extended,
    histories,
    known_in,
    parsed,
    text_digest,
)
from redrb.gateway.replies import PROTOCOLS, Replies, Reply, error_of, models_of
from redrb.gateway.session import Session, Turn
from redrb.gateway.store import SessionStore
from redrb.stream.assembly.calls import OnIncomplete
from redrb.stream.worker import Worker
from redrb.train.engines import EngineWeights

MOST_CALLS = 64
"""Most calls of a kind at the same time: those of turns, opens, and rewards."""

MOST_PARSED = 4
"""Most requests that are parsed, or whose history is looked for, at the same time."""

SMALL_BYTES = 2**20
"""Largest body that opens or ends a session: each sample gets a copy."""

ALL_BYTES = 256 * 2**20
"""Most bytes of all bodies that are not parsed yet."""

BODY_S = 60.0
"""Seconds in which the body of a request must come."""

WAIT_S = 10.0
"""Seconds for which a request waits for the first weights, a right, the weights of its right, or
behind others."""

MOST_REWARD = 3e38
"""Largest reward, of either sign: samples have it as float32."""

_BUSY = "the gateway cannot answer now: send the request again."

OnEdited = Literal["branch", "error"]

T = TypeVar("T")

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
    ) -> None:
        self._store, self._chat, self._weights = store, chat, weights
        self._token, self._on_edited, self._worker = token.encode(), on_edited, worker
        worker.role, worker.engine, worker.weights_name = "maker", chat.engine, weights.name
        self._loaded, self._replies = asyncio.Event(), Replies()
        self._calls, self._opens, self._rewards = (_Threads(MOST_CALLS) for _ in range(3))
        self._parsers, self._held = _Threads(MOST_PARSED), 0

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
        turns = [
            Route(f"{below}/v1/{path}", partial(self._turn, protocol), methods=["POST"])
            for path, protocol in PROTOCOLS.items()
        ]
        return Starlette(
            routes=[
                Route("/sessions", self._open, methods=["POST"]),
                *turns,
                Route(f"{below}/v1/models", self._models),
                Route(f"{below}/reward", self._reward, methods=["POST"]),
                Route(below, self._drop, methods=["DELETE"]),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
            exception_handlers={RedrbError: _failed, HTTPException: _failed},
        )

    async def _open(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self._token and not hmac.compare_digest(given, self._token):
            raise Refused("the gateway's token is missing or wrong.", 401)
        async with self._body_of(request, SMALL_BYTES) as data:
            body = known_in(parsed(data), _Opening)
        await self._until_loaded()
        opening = partial(self._store.open, wait_s=WAIT_S, **msgspec.structs.asdict(body))
        opened = await self._opens.run(opening, request)
        if opened.version is not None:
            with suppress(TimeoutError):  # staleness is counted when the group is put
                async with asyncio.timeout(WAIT_S):
                    await self._weights.reach(opened.version)
        if await request.is_disconnected():  # nobody gets to know it
            reading = partial(self._store.read, opened.id, opened.secret)
            session = await self._calls.run(reading)
            await self._calls.run(partial(self._store.drop, session))
        url = f"{request.base_url}s/{opened.id}.{opened.secret}/v1"
        found = {"id": opened.id, "url": url, "weight_version": opened.version}
        return JSONResponse(found, 201)

    async def _turn(self, protocol: Protocol, request: Request) -> Response:
        await self._use(request)
        key = request.headers.get("idempotency-key", "")
        async with self._body_of(request, MOST_BYTES) as data:
            ask = await self._parsers.run(partial(ask_of, protocol, data, key=key))
        session = await self._session(request)
        if ask.model != self._chat.model:
            raise Refused(f"model={ask.model!r:.80}: this gateway samples {self._chat.model!r}.")
        turn = next((each for each in session.turns if each.request == ask.request), None)
        if turn is None:
            async with self._in_use(request):
                turn = await self._sampled(session, ask)
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

    async def _sampled(self, session: Session, ask: Ask) -> Turn:
        """Sample a turn and store it; return the one that was stored first for this request."""
        if session.over:
            raise SessionOver(session.id, "over")
        await self._until_loaded()
        parent, given, asked = await self._place(session, ask)
        tokens = [*session.tokens(parent), *given]
        done = await self._chat.sample(ask, tokens)
        self._worker.weight_version = max(done.versions)
        found = await self._chat.reply(ask, tokens, done)
        whole = found.pop("whole")
        message = Reply(ask, found).message
        turn = Turn(
            parent=parent,
            request=ask.request,
            after=text_digest(ask.prompt + whole) if ask.prompt else extended(asked, message),
            given=given,
            sampled=done,
            reply=json.dumps(found).encode(),
        )
        return await self._calls.run(partial(self._store.append, session, turn))

    async def _place(self, session: Session, ask: Ask) -> tuple[int, list[int], bytes]:
        """Return the turn that a request goes on from, the tokens between, and its digest."""
        parent, same, asked = await self._parsers.run(partial(_longest, session, ask))
        is_edited = _has_child(session, parent) if parent >= 0 else bool(session.turns)
        given: list[int] | None = None
        if parent >= 0 and ask.prompt:
            rest = ask.prompt.encode()[same:].decode()
            given = await self._chat.text(rest) if rest else []
        elif parent >= 0:
            last = session.turns[parent].sampled.tokens[-1]
            whole, given = await self._chat.continuation(ask, same - 1, last)
            if given is None:  # the template writes the history in another way from here on
                parent, given, is_edited = -1, whole, True
        if is_edited and self._on_edited == "error":
            raise Refused(
                "this history is not what was sampled: it was edited, goes on from an earlier "
                "turn, or is another conversation. Send the messages as they were answered, open "
                "another session for it, or start the gateway with --on-edited branch.",
                409,
            )
        if given is None:
            given = await self._chat.prompt(ask)
        return parent, given, asked

    async def _models(self, request: Request) -> Response:
        await self._session(request)
        return JSONResponse(models_of(self._chat.model))

    async def _reward(self, request: Request) -> Response:
        session = await self._session(request)
        async with self._body_of(request, SMALL_BYTES) as data:
            body = known_in(parsed(data), _Ending)
        ending = partial(self._store.reward, session, body.reward, extras=body.extras)
        return JSONResponse({"group": await self._rewards.run(ending)})

    async def _drop(self, request: Request) -> Response:
        session = await self._session(request)
        await self._calls.run(partial(self._store.drop, session))
        return Response(status_code=204)

    async def _session(self, request: Request) -> Session:
        return await self._calls.run(partial(self._store.read, *_names(request)))

    async def _use(self, request: Request) -> None:
        await self._calls.run(partial(self._store.use, *_names(request)))

    @asynccontextmanager
    async def _in_use(self, request: Request) -> AsyncIterator[None]:
        """Let a session live on, however long a turn takes."""

        async def use() -> None:
            while True:
                await asyncio.sleep(self._store.timeout_s / 3)
                with suppress(StoreUnavailable, Refused):  # the next time, or the turn says it
                    await self._use(request)

        using = asyncio.create_task(use())
        try:
            yield
        finally:
            if not using.cancel():
                using.result()  # raises what ended it

    @asynccontextmanager
    async def _body_of(self, request: Request, most: int) -> AsyncIterator[bytes]:
        """Give the body of a request with JSON: a page of another site cannot send such a one."""
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise Refused("send JSON, with content-type: application/json.", 415)
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    data += part
                    self._held += len(part)
                    if len(data) > most:
                        raise Refused(f"the body has more than {most} bytes.", 413)
                    if self._held > ALL_BYTES:
                        raise Refused(_BUSY, 503)
            yield bytes(data)
        except TimeoutError as error:
            raise Refused(f"the body did not come within {BODY_S:g} s.", 408) from error
        except ClientDisconnect as error:
            raise Refused("the body broke off.") from error
        finally:
            self._held -= len(data)

    async def _until_loaded(self) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                await self._loaded.wait()
        except TimeoutError as error:
            text = "the server has no published weights yet: does a trainer publish?"
            raise Refused(text, 503) from error


class _Threads:
    """Calls at the same time, in threads; further ones wait for a place."""

    def __init__(self, most: int) -> None:
        self._places = asyncio.Semaphore(most)

    async def run(self, call: Callable[[], T], request: Request | None = None) -> T:
        """Return the result of a call; the end of the gateway does not wait for it.

        Args:
            request: The call is not begun if it has nobody who waits for its reply any more.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                await self._places.acquire()
        except TimeoutError as error:
            raise Refused(_BUSY, 503) from error
        try:
            if request is not None and await request.is_disconnected():
                raise Refused(_BUSY, 503)
            return await anyio.to_thread.run_sync(
                call, abandon_on_cancel=True, limiter=CapacityLimiter(1)
            )
        finally:
            self._places.release()


def _names(request: Request) -> tuple[str, str]:
    """Return the id and the secret of a session."""
    return request.path_params["id"], request.path_params["secret"]


def _has_child(session: Session, parent: int) -> bool:
    return any(turn.parent == parent for turn in session.turns)


def _longest(session: Session, ask: Ask) -> tuple[int, int, bytes]:
    """Return the turn after which the most is the same, or -1; and how many messages, or bytes.

    Of several, the newest one that no turn goes on from. Then the digest of the whole history.
    """
    if ask.prompt:
        places = beginnings(ask.prompt.encode(), (turn.after for turn in session.turns))
        whole = text_digest(ask.prompt)
    else:
        chain = histories(ask)
        places, whole = {digest: at for at, digest in enumerate(chain)}, chain[-1]
    found = [(0, False, -1)]
    for index, turn in enumerate(session.turns):
        same = places.get(turn.after, 0)
        found += [(same, not _has_child(session, index), index)] if same else []
    same, _, index = max(found)
    return index, same, whole


def _failed(request: Request, error: Exception) -> Response:
    """Return an error in the protocol's form."""
    status, text = 503, str(error)
    match error:
        case Refused():
            status = error.status
        case AdmissionTimeout():
            pass
        case HTTPException():
            status, text = error.status_code, error.detail
        case UnknownSession():
            status = 404
        case SessionOver():
            status = 409
        case ConfigError() | RecordError() | EncodeError():
            status = 400
        case EngineError() if error.is_refusal:
            status, text = 400, text.replace(error.where, "")
        case _:  # it may name hosts
            _log.warning("a request gets status 503: %s", error)
            text = _BUSY
    # OpenAI's and Anthropic's SDKs would repeat a request with status 409
    headers = {503: {"retry-after": "5"}, 409: {"x-should-retry": "false"}}.get(status)
    return JSONResponse(error_of(request.url.path, status, text), status, headers)
