"""`TaskGroups`: reads groups and dead letters of a namespace for the page, and requeues letters."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

from redrb.browse.choice import Choice, Limits
from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.dashboard.requests import Letters
from redrb.stream.task.dead_letters import find_letters
from redrb.stream.task.inspection import existing_task
from redrb.stream.task.letter_changes import change_letters, requeue
from redrb.stream.task.reach import Reach

if TYPE_CHECKING:  # it loads numpy, which the page itself does not need
    from redrb.browse import Tokenizer

MOST_LETTERS = 50
"""Dead letters that a page shows, the newest of each partition first."""

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
        from redrb.browse import Browser, as_json

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
            stores = existing_task(self._client, task, namespace=self._namespace)
            found = list(islice(find_letters(stores), MOST_LETTERS))
        shown = ("id", "group", "reason", "exception", "message", "failed_deliveries", "consumer")
        return [
            {name: getattr(letter, name) for name in shown} | {"time": letter.time.isoformat()}
            for letter in found
        ]

    def requeue(self, letters: Letters) -> int:
        """Let dead letters wait again; return how many, or raise UnknownTask."""
        with Deadline(at_most=ANSWER_S):
            stores = existing_task(self._client, letters.task, namespace=self._namespace)
            return change_letters(requeue, Reach(stores), letters.group, letters.ids)


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
