"""Groups and dead letters for the page: requests are checked, with limits, and answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.errors import ConfigError
from redrb.keys import check_name
from redrb.stream.task.dead_letters import find_letters, requeue
from redrb.stream.task.lookup import existing_task
from redrb.watch.groups.choice import RANKS, Choice, Limits, Rank

if TYPE_CHECKING:  # it loads numpy, which the page itself does not need
    from redrb.watch.groups import Tokenizer

MOST_LETTERS = 50
"""Dead letters that a page shows, the newest first."""

MOST_BYTES = 16 << 20
"""Bytes of JSON after which no further group is sent."""

ANSWER_S = 5.0
"""Seconds after which a request of the page fails."""

_SHOWN = Limits(
    group_bytes=16 << 20,
    tensor_bytes=4 << 20,
    samples=16,
    tokens=4_096,
    text=16_384,
    entries=500,
    images=4,
    pixels=1 << 18,
)
"""Bounds of a group, so that a browser can show the answer."""


MOST_GROUPS = 20
"""Most groups of one reply."""

MOST_BODY = 100_000
"""Most bytes of the body of a request."""

MOST_IDS = 1000
"""Most dead letters of one request to requeue."""


class GroupRequest(msgspec.Struct, frozen=True):
    """The query of a URL: groups of a task, by a rank, by their ids, or the newest."""

    task: str = ""
    order: Literal[Rank, "newest", "ids"] = "newest"
    ids: Annotated[list[Annotated[int, Meta(ge=1, lt=2**53)]], Meta(max_length=MOST_GROUPS)] = []
    status: str = ""
    count: Annotated[int, Meta(ge=1, le=MOST_GROUPS)] = 5


def group_choice(given: Mapping[str, str]) -> tuple[str, Choice]:
    """Return the task and the groups that the query of a URL names, or raise ConfigError."""
    ids = given["ids"].split(",") if given.get("ids") else []
    try:
        asked = msgspec.convert({**given, "ids": ids}, GroupRequest, strict=False)
    except ValueError as error:
        raise ConfigError(
            f"give ids as whole numbers with commas between, and count and ids up to "
            f"{MOST_GROUPS}: {error}."
        ) from error
    if asked.order == "ids" and not ids:
        raise ConfigError("ids are missing: write their numbers with commas between.")
    rank = next((rank for rank in RANKS if rank == asked.order), None)
    choice = Choice(tuple(asked.ids), asked.status or None, rank=rank, count=asked.count)
    return asked.task, choice


async def body_of(request: Request) -> bytes:
    """Return the body of a request, or raise ConfigError."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY:
            raise ConfigError(f"a request has at most {MOST_BODY:,} bytes.")
    return body


class Letters(msgspec.Struct, frozen=True):
    """Task, consumer group and ids of the dead letters to requeue."""

    task: str
    group: str
    ids: Annotated[list[Annotated[int, Meta(ge=0, lt=2**53)]], Meta(max_length=MOST_IDS)]


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


class TaskGroups:
    """Reads and requeues for the page; every call has a deadline."""

    def __init__(
        self, client: Client, namespace: str, *, tokenizer: Tokenizer | None = None
    ) -> None:
        """Read tasks of a namespace; without a tokenizer the page shows ids of tokens."""
        self._client = client
        self._namespace = namespace
        self._tokenizer = tokenizer

    def read(self, task: str, choice: Choice) -> Any:
        """Return groups with their samples, as a `Page` in JSON.

        Raises:
            ConfigError: The choice is not possible.
            UnknownTask: There is no such task.
        """
        from redrb.watch.groups import Browser, as_json

        browser = Browser(
            self._client,
            task,
            namespace=self._namespace,
            tokenizer=self._tokenizer,
            limits=_SHOWN,
            timeout_s=ANSWER_S,
        )
        return fitting(as_json(browser.look(choice, full=True)))

    def letters(self, task: str) -> list[dict[str, Any]]:
        """Return the newest dead letters of a task, or raise UnknownTask."""
        with Deadline(at_most=ANSWER_S):
            store = existing_task(self._client, task, namespace=self._namespace)
            found = list(islice(find_letters(store), MOST_LETTERS))
        shown = ("id", "group", "reason", "exception", "message", "failed_deliveries", "consumer")
        return [
            {name: getattr(letter, name) for name in shown} | {"time": letter.time.isoformat()}
            for letter in found
        ]

    def requeue(self, letters: Letters) -> int:
        """Put dead letters again; return how many, or raise UnknownTask."""
        with Deadline(at_most=ANSWER_S):
            store = existing_task(self._client, letters.task, namespace=self._namespace)
            return len(requeue(store, letters.group, letters.ids))


def fitting(page: Any) -> Any:
    """Return a page with the first of its groups, as many as fit; at least one."""
    nbytes = 0
    for place, group in enumerate(page["groups"]):
        nbytes += len(json.dumps(group))
        if place and nbytes > MOST_BYTES:
            left_out = ", ".join(str(each["id"]) for each in page["groups"][place:])
            note = f"too large to be shown together: ask for {left_out} by id"
            return page | {"groups": page["groups"][:place], "notes": [*page["notes"], note]}
    return page
