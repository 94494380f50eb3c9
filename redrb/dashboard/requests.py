"""What pages ask for: checked, with limits; a wrong request gets status 400 and a sentence."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from redrb.errors import ConfigError, RedrbError, UnknownTask
from redrb.keys import check_name

MOST_GROUPS = 20
"""Most groups of one reply."""

MOST_IDS = 1000
"""Most dead letters of one request to requeue."""

MOST_BODY = 100_000
"""Most bytes of the body of a request."""

ORDERS = ("newest", "stalest", "best", "worst")
"""Ways to choose groups."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """The groups that a page wants.

    Attributes:
        task: Name of the task.
        order: One of `ORDERS`, or "ids".
        status: Status of the groups; "": completed.
        ids: Their ids, for "ids".
        count: Most groups.
    """

    task: str
    order: str = "newest"
    status: str = ""
    ids: tuple[int, ...] = ()
    count: int = 5


@dataclass(frozen=True, slots=True)
class LetterRequest:
    """Dead letters to requeue.

    Attributes:
        task: Name of the task.
        group: Consumer group that gave them up.
        ids: Their ids.
    """

    task: str
    group: str
    ids: tuple[int, ...]


class Groups(Protocol):
    """Reads groups and dead letters of tasks, and requeues letters; its methods block."""

    def read(self, request: GroupRequest) -> Any:
        """Return groups as data that JSON can hold."""

    def letters(self, task: str) -> Any:
        """Return the newest dead letters as data that JSON can hold."""

    def requeue(self, request: LetterRequest) -> int:
        """Let dead letters wait again; returns how many."""


def group_choice(given: Mapping[str, str]) -> GroupRequest:
    """Return the request in the query of a URL.

    Raises:
        ConfigError: It cannot be used.
    """
    order = given.get("order", "newest")
    if order not in (*ORDERS, "ids"):
        raise ConfigError(f"order {order!r} is not one of {', '.join(ORDERS)}, ids.")
    ids = _numbers(given.get("ids", "").split(",") if given.get("ids") else [], MOST_GROUPS)
    if order == "ids" and not ids:
        raise ConfigError("ids are missing: write their numbers with commas between.")
    (count,) = _numbers([given.get("count", "5")], 1)
    if not 1 <= count <= MOST_GROUPS:
        raise ConfigError(f"count must be between 1 and {MOST_GROUPS}.")
    return GroupRequest(given.get("task", ""), order, given.get("status", ""), ids, count)


async def body_of(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        ConfigError: It is too long.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY:
            raise ConfigError(f"a request has at most {MOST_BODY:,} bytes.")
    return body


def letter_choice(body: bytes) -> LetterRequest:
    """Return the request in a body of JSON.

    Raises:
        ConfigError: It cannot be used.
    """
    try:
        data = json.loads(body)
        task, group, ids = data["task"], data["group"], data["ids"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError('write {"task": NAME, "group": NAME, "ids": [NUMBER, ...]}.') from error
    if not (isinstance(task, str) and isinstance(group, str) and isinstance(ids, list)):
        raise ConfigError('write {"task": NAME, "group": NAME, "ids": [NUMBER, ...]}.')
    check_name("task", task)
    check_name("consumer group", group)
    return LetterRequest(task, group, _numbers(ids, MOST_IDS))


def bad_requests(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Answer errors of redrb with a status and their message."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except UnknownTask as error:
            return JSONResponse({"error": str(error)}, 404)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 400)
        except RedrbError as error:
            return JSONResponse({"error": str(error)}, 503)

    return answer


def _numbers(texts: list[Any], most: int) -> tuple[int, ...]:
    if len(texts) > most:
        raise ConfigError(f"at most {most} numbers can be given.")
    if not all(isinstance(text, int | str) and str(text).isdecimal() for text in texts):
        raise ConfigError("ids and counts are whole numbers.")
    if any(len(str(text)) > 18 for text in texts):
        raise ConfigError("a number has at most 18 digits.")
    return tuple(map(int, texts))
