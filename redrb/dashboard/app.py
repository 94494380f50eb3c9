"""The application: the files of the page, its events, groups of tasks, requeue of dead letters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from redrb.dashboard.feed import MOST_PAGES, Feed
from redrb.dashboard.guard import Guard, has_token
from redrb.dashboard.payload import encoded
from redrb.dashboard.requests import Groups, bad_requests, body_of, group_choice, letter_choice

MOST_CALLS = 8
"""Most calls that wait for Redis at the same time; further requests wait for a place."""

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def make_app(
    feed: Feed, groups: Groups, *, token: str, hosts: frozenset[str] = frozenset()
) -> Starlette:
    """Return the application.

    Requests that change something must carry `token`; `hosts` are values of the header Host that
    are served, empty: any.
    """
    places = CapacityLimiter(MOST_CALLS)

    async def in_thread(call: Callable[[], object]) -> Response:
        """Return the result of a call that waits for Redis; the end of the server does not wait."""
        text = await anyio.to_thread.run_sync(
            lambda: encoded(call()), abandon_on_cancel=True, limiter=places
        )
        return Response(text, media_type="application/json")

    async def events(_: Request) -> Response:
        if feed.pages >= MOST_PAGES:
            return JSONResponse({"error": f"{MOST_PAGES} pages are open: close some."}, 503)
        return _Events(feed)

    @bad_requests
    async def read_groups(request: Request) -> Response:
        choice = group_choice(request.query_params)
        return await in_thread(partial(groups.read, choice))

    @bad_requests
    async def read_letters(request: Request) -> Response:
        task = request.query_params.get("task", "")
        return await in_thread(partial(groups.letters, task))

    @bad_requests
    async def requeue(request: Request) -> Response:
        if not has_token(request, token):
            return JSONResponse({"error": "the token is missing or wrong."}, 403)
        wanted = letter_choice(await body_of(request))
        return await in_thread(lambda: {"requeued": groups.requeue(wanted)})

    return Starlette(
        routes=[
            Route("/events", events),
            Route("/api/groups", read_groups),
            Route("/api/letters", read_letters),
            Route("/api/requeue", requeue, methods=["POST"]),
            *_files(),
        ],
        middleware=[Middleware(Guard, hosts=hosts)],
    )


class _Events(StreamingResponse):
    """The events of a feed; counts as a page from now on until the response has ended."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed.events(), media_type="text/event-stream")
        self._feed = feed
        feed.pages += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.pages -= 1


def _files() -> list[Route]:
    """Return a route for each file of the page: no path of a request ever names a file."""
    routes = []
    for file in files("redrb.dashboard").joinpath("static").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is None:
            continue
        path = "/" if file.name == "index.html" else f"/{file.name}"
        routes.append(Route(path, _serving(file.read_bytes(), kind)))
    return routes


def _serving(content: bytes, kind: str) -> Any:
    async def serve(_: Request) -> Response:
        return Response(content, media_type=kind)

    return serve
