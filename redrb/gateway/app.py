"""The application: sessions, the three protocols below a session's URL, and its reward."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar

import anyio.to_thread
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
from redrb.gateway.chat import ChatServer, stored
from redrb.gateway.messages import (
    MOST_BYTES,
    Ask,
    Protocol,
    Refused,
    ask_of,
    extended,
    histories,
    parsed,
    rest_of,
    text_digest,
)
from redrb.gateway.replies import body_of, error_of, events_of
from redrb.gateway.session import Session, Turn
from redrb.gateway.store import SessionStore
from redrb.train.engines import EngineWeights

MOST_CALLS = 64
"""Most calls that wait for Redis at the same time, and most that wait for a right."""

BODY_S = 60.0
"""Seconds in which the body of a request must come."""

RIGHT_S = 10.0
"""Seconds for which a new session waits for a right, and for the weights of its version."""

OnEdited = Literal["branch", "error"]

T = TypeVar("T")

_PROTOCOLS: dict[str, Protocol] = {
    "chat/completions": "chat",
    "completions": "text",
    "messages": "messages",
}

_OPTIONS = {"prompt", "group_size", "tags", "least", "on_incomplete"}


class Gateway:
    """Answers requests; it keeps nothing of a session, so that any other one goes on with it.

    Args:
        token: Opens sessions, as a bearer token; "": none is needed.
        on_edited: What becomes of a history that does not go on from the newest turn.
    """

    def __init__(
        self,
        store: SessionStore,
        chat: ChatServer,
        weights: EngineWeights,
        *,
        token: str = "",
        on_edited: OnEdited = "branch",
    ) -> None:
        self._store, self._chat, self._weights = store, chat, weights
        self._token, self._on_edited = token, on_edited
        self._loaded = asyncio.Event()
        self._calls, self._waits = CapacityLimiter(MOST_CALLS), CapacityLimiter(MOST_CALLS)

    async def run(self) -> None:
        """Give each version of the weights to the server."""
        await self._weights.update()
        self._loaded.set()
        await self._weights.follow()

    async def close(self) -> None:
        """End nothing: requests in flight have a while to end."""

    def app(self, hosts: list[str] | None = None) -> Starlette:
        """Return the application; `hosts` are values of the header Host that are served."""
        below = "/s/{id}.{secret}"
        turns = [
            Route(f"{below}/v1/{path}", partial(self._turn, protocol), methods=["POST"])
            for path, protocol in _PROTOCOLS.items()
        ]
        return Starlette(
            routes=[
                Route("/sessions", self._open, methods=["POST"]),
                *turns,
                Route(f"{below}/v1/models", self._models),
                Route(f"{below}/reward", self._reward, methods=["POST"]),
                Route(below, self._drop, methods=["DELETE"]),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts or ["*"])],
            exception_handlers={RedrbError: _failed, HTTPException: _failed},
        )

    async def _open(self, request: Request) -> Response:
        _, _, given = request.headers.get("authorization", "").partition(" ")
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            raise Refused("the gateway's token is missing or wrong.", 401)
        body = parsed(await _body_of(request))
        if body.keys() - _OPTIONS or not isinstance(body.get("tags") or {}, dict):
            raise Refused(f"a session has these fields: {', '.join(sorted(_OPTIONS))}.")
        size, prompt = body.pop("group_size", 1), body.pop("prompt", "")
        await self._until_loaded()
        opening = partial(self._store.open, prompt, size=size, wait_s=RIGHT_S, **body)
        opened = await self._in_thread(opening, self._waits)
        if opened.version is not None:
            with suppress(TimeoutError):  # staleness is counted when the group is put
                async with asyncio.timeout(RIGHT_S):
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
        reply, tokens = json.loads(turn.reply), {}
        if ask.tokens:
            done = turn.sampled
            tokens = {"token_ids": done.tokens, "token_versions": done.versions}
        if ask.stream:
            events = b"".join(events_of(ask, reply, tokens))
            return Response(events, media_type="text/event-stream")
        return JSONResponse(body_of(ask, reply, tokens))

    async def _sampled(self, session: Session, ask: Ask) -> Turn:
        """Sample a turn and store it; return the one that was stored first for this request."""
        await self._until_loaded()
        parent, given, before = await self._place(session, ask)
        tokens = [*session.tokens(parent), *given]
        done = await self._chat.sample(ask, tokens)
        reply = await self._chat.reply(ask, tokens, done)
        whole = reply.pop("whole")
        is_text = ask.protocol == "text"
        after = text_digest(ask.text + whole) if is_text else extended(before, reply["message"])
        turn = Turn(
            parent=parent,
            request=ask.request,
            before=before,
            after=after,
            given=given,
            sampled=done,
            reply=stored(reply),
        )
        return await self._in_thread(partial(self._store.append, session, turn))

    async def _place(self, session: Session, ask: Ask) -> tuple[int, list[int], bytes]:
        """Return the turn that a request goes on from, the tokens between, and its digest."""
        chain = [text_digest(ask.text)] if ask.protocol == "text" else histories(ask)
        parent, at = _longest(session, ask, chain)
        is_edited = bool(session.turns) if parent < 0 else _has_child(session, parent)
        given: list[int] | None = None
        if parent >= 0:
            last = session.turns[parent].sampled.tokens[-1]
            if ask.protocol == "text":
                rest = rest_of(ask.text, session.turns[parent].after) or ""
                given = await self._chat.prompt(ask, rest) if rest else []
            else:
                whole, given = await self._chat.continuation(ask, at, last)
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
        name = self._chat.model
        model: dict[str, Any] = {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
        }
        model |= {"created": 0, "created_at": "1970-01-01T00:00:00Z", "owned_by": "redrb"}
        page = {"has_more": False, "first_id": name, "last_id": name}
        return JSONResponse({"object": "list", "data": [model], **page})

    async def _reward(self, request: Request) -> Response:
        body = parsed(await _body_of(request))
        reward, extras = body.get("reward"), body.get("extras") or {}
        is_number = isinstance(reward, (int, float)) and abs(reward) < 1e38
        if not is_number or not isinstance(extras, dict) or body.keys() - {"reward", "extras"}:
            raise Refused('give {"reward": number, "extras": {}}.')
        session = await self._session(request)
        ending = partial(self._store.reward, session, float(reward), extras=extras)
        return JSONResponse({"group": await self._in_thread(ending, self._waits)})

    async def _drop(self, request: Request) -> Response:
        session = await self._session(request)
        await self._in_thread(partial(self._store.drop, session))
        return Response(status_code=204)

    async def _session(self, request: Request) -> Session:
        found = request.path_params
        return await self._in_thread(partial(self._store.read, found["id"], found["secret"]))

    async def _until_loaded(self) -> None:
        try:
            async with asyncio.timeout(RIGHT_S):
                await self._loaded.wait()
        except TimeoutError as error:
            text = "the server has no published weights yet: does a trainer publish?"
            raise Refused(text, 503) from error

    async def _in_thread(self, call: Callable[[], T], places: CapacityLimiter | None = None) -> T:
        """Return the result of a call that waits for Redis; the end does not wait for it."""
        limiter = self._calls if places is None else places
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)


def _has_child(session: Session, parent: int) -> bool:
    return any(turn.parent == parent for turn in session.turns)


def _longest(session: Session, ask: Ask, chain: list[bytes]) -> tuple[int, int]:
    """Return the turn after which the most of a history is the same, or -1; and its message."""
    found: list[tuple[int, bool, int]] = []
    places = {digest: at for at, digest in enumerate(chain)}
    for index, turn in enumerate(session.turns):
        length = places.get(turn.after)
        if ask.protocol == "text" and (rest := rest_of(ask.text, turn.after)) is not None:
            length = len(ask.text) - len(rest)
        if length:
            found.append((length, not _has_child(session, index), index))
    length, _, index = max(found, default=(0, False, -1))
    return index, length - 1


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
    match error:
        case Refused():
            status = error.status
        case HTTPException():
            status = error.status_code
        case UnknownSession():
            status = 404
        case SessionOver():
            status = 409
        case ConfigError() | RecordError() | EncodeError():
            status = 400
        case EngineError() if error.is_refusal:
            status = 400
        case _:
            status = 503
    headers = {"retry-after": "5"} if status == 503 else {}
    if status == 409:
        headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's SDKs repeat such a request
    _, _, path = request.url.path.partition("/v1/")
    text = error.detail if isinstance(error, HTTPException) else str(error)
    return JSONResponse(error_of(_PROTOCOLS.get(path), status, text), status, headers)
