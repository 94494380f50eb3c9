"""`TaskGroups`: reads groups and dead letters of a namespace for the page, and requeues letters."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Any

from redrb.connection import Client
from redrb.connection.deadline import within
from redrb.dashboard.requests import GroupRequest, LetterRequest
from redrb.errors import ConfigError
from redrb.stream.task.dead_letters import find_letters
from redrb.stream.task.inspection import existing_task
from redrb.stream.task.letter_changes import requeue_letters

MOST_LETTERS = 50
"""Dead letters that a page shows, the newest of each partition first."""

ANSWER_S = 5.0
"""Seconds after which a request of the page fails."""


class TaskGroups:
    """Reads and requeues for the page; every call has a deadline."""

    def __init__(self, client: Client, namespace: str) -> None:
        """Read tasks of a namespace."""
        self._client = client
        self._namespace = namespace

    def letters(self, task: str) -> list[dict[str, Any]]:
        """Return the newest dead letters of a task.

        Raises:
            UnknownTask: There is no such task.
        """
        with within(ANSWER_S):
            stores = existing_task(self._client, task, namespace=self._namespace)
            found = list(islice(find_letters(stores), MOST_LETTERS))
        shown = ("id", "group", "reason", "exception", "message", "failed_deliveries", "consumer")
        return [
            {name: data[name] for name in shown} | {"time": letter.time.isoformat()}
            for letter, data in zip(found, map(asdict, found), strict=True)
        ]

    def requeue(self, request: LetterRequest) -> int:
        """Let dead letters wait again; returns how many.

        Raises:
            UnknownTask: There is no such task.
        """
        with within(ANSWER_S):
            stores = existing_task(self._client, request.task, namespace=self._namespace)
            return requeue_letters(stores, request.group, request.ids)

    def read(self, request: GroupRequest) -> Any:
        """Return groups."""
        raise ConfigError(f"groups of {request.task!r} cannot be read yet.")
