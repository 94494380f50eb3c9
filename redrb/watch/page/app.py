"""The application: the files of the page, its events, groups of tasks, requeue of dead letters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.resources import files

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from redrb.errors import ConfigError, RedrbError, UnknownTask
from redrb.watch.page.feed import MOST_PAGES, Feed, encoded
from redrb.watch.page.groups import TaskGroups, body_of, group_choice, letter_choice
from redrb.watch.page.guard import TOKEN_HEADER, Guard, is_token

MOST_CALLS = 8
"""Most calls that wait for Redis at the same time; further requests wait for a place."""

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def make_app(
    feed: Feed, groups: TaskGroups, *, token: str, hosts: frozenset[str] = frozenset()
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

    async def read_groups(request: Request) -> Response:
        task, choice = group_choice(request.query_params)
        return await in_thread(partial(groups.read, task, choice))

    async def read_letters(request: Request) -> Response:
        task = request.query_params.get("task", "")
        return await in_thread(partial(groups.letters, task))

    async def requeue(request: Request) -> Response:
        if not is_token(request.headers.get(TOKEN_HEADER, ""), token):
            return JSONResponse({"error": "the token is missing or wrong."}, 403)
        wanted = letter_choice(await body_of(request))
        return await in_thread(lambda: {"requeued": groups.requeue(wanted)})

    files_of_page = [  # no path of a request ever names a file
        Route(
            "/" if file.name == "index.html" else f"/{file.name}",
            Response(file.read_bytes(), media_type=_TYPES[file.name.rpartition(".")[2]]),
            methods=["GET"],
        )
        for file in files("redrb.watch.page").joinpath("static").iterdir()
        if file.name.rpartition(".")[2] in _TYPES
    ]
    return Starlette(
        routes=[
            Route("/events", events),
            Route("/api/groups", read_groups),
            Route("/api/letters", read_letters),
            Route("/api/requeue", requeue, methods=["POST"]),
            *files_of_page,
        ],
        middleware=[Middleware(Guard, hosts=hosts)],
        exception_handlers={RedrbError: _refused},
    )


def _refused(_: Request, error: Exception) -> Response:
    wrong = 404 if isinstance(error, UnknownTask) else 400
    return JSONResponse({"error": str(error)}, wrong if isinstance(error, ConfigError) else 503)


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
