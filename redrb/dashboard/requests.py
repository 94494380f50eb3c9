"""Requests of pages: checked, with limits; a wrong one raises ConfigError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec
from starlette.requests import Request

from redrb.browse.choice import RANKS, Choice
from redrb.checks import check_choice
from redrb.errors import ConfigError
from redrb.keys import check_name

MOST_GROUPS = 20
"""Most groups of one reply."""

MOST_BODY = 100_000
"""Most bytes of the body of a request."""

ORDERS = ("newest", *RANKS, "ids")
"""Ways to choose groups."""


def group_choice(given: Mapping[str, str]) -> tuple[str, Choice]:
    """Return the task and the groups that the query of a URL names, or raise ConfigError."""
    order = given.get("order", "newest")
    check_choice("order", order, ORDERS)
    ids = _numbers(given.get("ids", "").split(",") if given.get("ids") else [], MOST_GROUPS)
    if order == "ids" and not ids:
        raise ConfigError("ids are missing: write their numbers with commas between.")
    (count,) = _numbers([given.get("count", "5")], 1)
    if not 1 <= count <= MOST_GROUPS:
        raise ConfigError(f"count must be between 1 and {MOST_GROUPS}.")
    rank = next((rank for rank in RANKS if rank == order), None)
    return given.get("task", ""), Choice(ids, given.get("status") or None, rank=rank, count=count)


async def body_of(request: Request) -> bytes:
    """Return the body of a request, or raise ConfigError."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY:
            raise ConfigError(f"a request has at most {MOST_BODY:,} bytes.")
    return body


MOST_IDS = 1000
"""Most dead letters of one request to requeue."""

Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Letters(msgspec.Struct, frozen=True):
    """Task, consumer group and ids of the dead letters to requeue."""

    task: str
    group: str
    ids: Annotated[list[Id], msgspec.Meta(max_length=MOST_IDS)]


def letter_choice(body: bytes) -> Letters:
    """Return the dead letters that a body of JSON names, or raise ConfigError."""
    try:
        wanted = msgspec.json.decode(body, type=Letters)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f'write {{"task": NAME, "group": NAME, "ids": [NUMBER, ...]}}: {error}.'
        ) from error
    check_name("task", wanted.task)
    check_name("consumer group", wanted.group)
    return wanted


def _numbers(texts: list[str], most: int) -> tuple[int, ...]:
    if len(texts) > most:
        raise ConfigError(f"at most {most} numbers can be given.")
    if not all(text.isdecimal() for text in texts):
        raise ConfigError("ids and counts are whole numbers.")
    if any(len(text) > 18 for text in texts):
        raise ConfigError("a number has at most 18 digits.")
    return tuple(map(int, texts))
