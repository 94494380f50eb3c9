"""The application: sessions, the three protocols below a session's URL, and its reward."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal, TypeVar

import anyio.to_thread
import msgspec
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from redrb.errors import (
    ConfigError,
    EncodeError,
    EngineError,
    RecordError,
    RedrbError,
    SessionOver,
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
    extended,
    histories,
    known_in,
    parsed,
    rest_of,
    text_digest,
)
from redrb.gateway.replies import PROTOCOLS, Reply, error_of, models_of
from redrb.gateway.session import Session, Turn
from redrb.gateway.store import SessionStore
from redrb.stream.assembly.calls import OnIncomplete
from redrb.stream.worker import Worker
from redrb.train.engines import EngineWeights

MOST_CALLS = 64
"""Most calls that wait for Redis at the same time, and most that wait for a right."""

BODY_S = 60.0
"""Seconds in which the body of a request must come."""

WAIT_S = 10.0
"""Seconds for which a request waits for the first weights, a right, or the weights of its right."""

MOST_REWARD = 3e38
"""Largest reward, of either sign: samples have it as float32."""

OnEdited = Literal["branch", "error"]

T = TypeVar("T")


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
        self._loaded = asyncio.Event()
        self._calls, self._waits = CapacityLimiter(MOST_CALLS), CapacityLimiter(MOST_CALLS)

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
        body = known_in(parsed(await _body_of(request)), _Opening)
        await self._until_loaded()
        opening = partial(self._store.open, wait_s=WAIT_S, **msgspec.structs.asdict(body))
        opened = await _in_thread(opening, self._waits)
        if opened.version is not None:
            with suppress(TimeoutError):  # staleness is counted when the group is put
                async with asyncio.timeout(WAIT_S):
                    await self._weights.reach(opened.version)
        url = f"{request.base_url}s/{opened.id}.{opened.secret}/v1"
        found = {"id": opened.id, "url": url, "weight_version": opened.version}
        return JSONResponse(found, 201)

    async def _turn(self, protocol: Protocol, request: Request) -> Response:
        data = await _body_of(request)
        session = await self._session(request)
        ask = ask_of(protocol, data, key=request.headers.get("idempotency-key", ""))
        if ask.model != self._chat.model:
            raise Refused(f"model={ask.model!r:.80}: this gateway samples {self._chat.model!r}.")
        turn = next((each for each in session.turns if each.request == ask.request), None)
        if turn is None:
            turn = await self._sampled(session, ask)
        reply, done = Reply(ask, json.loads(turn.reply)), turn.sampled
        if ask.return_token_ids:
            reply.tokens = {
                "token_ids": done.tokens,
                "token_log_probs": done.log_probs,
                "token_versions": done.versions,
            }
        if ask.stream:
            return Response(b"".join(reply.events()), media_type="text/event-stream")
        return JSONResponse(reply.body())

    async def _sampled(self, session: Session, ask: Ask) -> Turn:
        """Sample a turn and store it; return the one that was stored first for this request."""
        if session.over:
            raise SessionOver(session.id, "over")
        await self._until_loaded()
        parent, given, before = await self._place(session, ask)
        tokens = [*session.tokens(parent), *given]
        done = await self._chat.sample(ask, tokens)
        self._worker.weight_version = max(done.versions)
        found = await self._chat.reply(ask, tokens, done)
        whole = found.pop("whole")
        message = Reply(ask, found).message
        turn = Turn(
            parent=parent,
            request=ask.request,
            before=before,
            after=text_digest(ask.prompt + whole) if ask.prompt else extended(before, message),
            given=given,
            sampled=done,
            reply=json.dumps(found).encode(),
        )
        return await _in_thread(partial(self._store.append, session, turn), self._calls)

    async def _place(self, session: Session, ask: Ask) -> tuple[int, list[int], bytes]:
        """Return the turn that a request goes on from, the tokens between, and its digest."""
        chain = [text_digest(ask.prompt)] if ask.prompt else histories(ask)
        parent, same = _longest(session, ask, chain)
        is_edited = _has_child(session, parent) if parent >= 0 else bool(session.turns)
        given: list[int] | None = None
        if parent >= 0 and ask.prompt:
            given = await self._chat.text(ask.prompt[same:]) if ask.prompt[same:] else []
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
        return parent, given, chain[-1]

    async def _models(self, request: Request) -> Response:
        await self._session(request)
        return JSONResponse(models_of(self._chat.model))

    async def _reward(self, request: Request) -> Response:
        body = known_in(parsed(await _body_of(request)), _Ending)
        session = await self._session(request)
        ending = partial(self._store.reward, session, body.reward, extras=body.extras)
        return JSONResponse({"group": await _in_thread(ending, self._waits)})

    async def _drop(self, request: Request) -> Response:
        session = await self._session(request)
        await _in_thread(partial(self._store.drop, session), self._calls)
        return Response(status_code=204)

    async def _session(self, request: Request) -> Session:
        found = request.path_params
        reading = partial(self._store.read, found["id"], found["secret"])
        return await _in_thread(reading, self._calls)

    async def _until_loaded(self) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                await self._loaded.wait()
        except TimeoutError as error:
            text = "the server has no published weights yet: does a trainer publish?"
            raise Refused(text, 503) from error


async def _in_thread(call: Callable[[], T], places: CapacityLimiter) -> T:
    """Return the result of a call that waits for Redis; the end does not wait for it."""
    return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=places)


def _has_child(session: Session, parent: int) -> bool:
    return any(turn.parent == parent for turn in session.turns)


def _longest(session: Session, ask: Ask, chain: list[bytes]) -> tuple[int, int]:
    """Return the turn after which the most is the same, or -1; and how many messages, or letters.

    Of several, the newest one that no turn goes on from.
    """
    found = [(0, False, -1)]
    places = {digest: at for at, digest in enumerate(chain)}
    for index, turn in enumerate(session.turns):
        rest = rest_of(ask.prompt, turn.after) if ask.prompt else None
        same = places.get(turn.after, 0) if rest is None else len(ask.prompt) - len(rest)
        found += [(same, not _has_child(session, index), index)] if same else []
    same, _, index = max(found)
    return index, same


async def _body_of(request: Request) -> bytes:
    """Return the body of a request with JSON: a page of another site cannot send such a one."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise Refused("send JSON, with content-type: application/json.", 415)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                data += part
                if len(data) > MOST_BYTES:
                    raise Refused(f"the body has more than {MOST_BYTES} bytes.", 413)
    except TimeoutError as error:
        raise Refused(f"the body did not come within {BODY_S:g} s.", 408) from error
    return bytes(data)


def _failed(request: Request, error: Exception) -> Response:
    """Return an error in the protocol's form."""
    status, text = 503, str(error)
    match error:
        case Refused():
            status = error.status
        case HTTPException():
            status, text = error.status_code, error.detail
        case UnknownSession():
            status = 404
        case SessionOver():
            status = 409
        case ConfigError() | RecordError() | EncodeError():
            status = 400
        case EngineError() if error.is_refusal:
            status = 400
    # OpenAI's and Anthropic's SDKs would repeat a request with status 409
    headers = {503: {"retry-after": "5"}, 409: {"x-should-retry": "false"}}.get(status)
    return JSONResponse(error_of(request.url.path, status, text), status, headers)
