"""`TaskStore`: a client bound to one task; everything that runs scripts for the task shares it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self, TypeVar

from redrb.connection import Client
from redrb.connection.deadline import here
from redrb.connection.transport import Argument, Pipeline, Reply, without_errors
from redrb.errors import StoreError, StoreUnavailable
from redrb.keys import TaskKeys
from redrb.lua.calls import Call, Page
from redrb.stream.task.wakes import wait_for_any

P = TypeVar("P", bound=Page)
R = TypeVar("R")

QUEUE_TTL_MS = 3000
"""Time for which a waiter that stopped looking keeps its place in the queue."""

MOST_REFUSALS = 3
"""Refusals for the same reason, in one call, after which the task's keys count as damaged."""


class TaskStore:
    """A client bound to the keys of one task; safe among threads.

    Attributes:
        client: The client for the node that holds the task.
    """

    def __init__(self, client: Client, task: str, keys: TaskKeys) -> None:
        self.client = client.at(keys.stream)
        self.task = task
        self.keys = keys
        self.script_keys: list[Argument] = [keys.stream]

    @classmethod
    def of(cls, client: Client, namespace: str, task: str) -> Self:
        """Return the store of a task; raises ConfigError for a name that is not usable."""
        return cls(client, task, TaskKeys.of(namespace, task))

    def call(self, call: Call[R], *beside: bytes) -> R:
        """Run the script of a call on this task, and repeat it while Redis is away.

        Raises:
            StoreUnavailable: Redis stayed away.
            StoreError: The server or the script answered with an error.
        """
        return call.run(self.client, self.script_keys, *beside)

    def pages(self, call: Call[P], *, all_of_them: bool = True) -> Iterator[P]:
        """Run a call until it has no more to do, a page at a time; yields each reply.

        Args:
            all_of_them: Whether it is an error if the deadline passes before the last page.

        Raises:
            StoreUnavailable: The deadline has passed; the next call goes on.
        """
        while True:
            reply = self.call(call)
            yield reply
            if not reply.more:
                return
            if here().passed:
                if all_of_them:
                    raise self.unfinished()
                return

    def unfinished(self) -> StoreUnavailable:
        """Return the error of a call that ends before scripts have done all pages of their work."""
        return StoreUnavailable(
            f"task {self.task!r}: the time is up, and there is more to do, which is done in pages. "
            "Nothing is lost: the next call goes on from there.",
            where=self.client.where,
        )

    def refused(self, *state: object) -> None:
        """Note that a script has refused a request, which is sent again in the state read since.

        Args:
            state: The state: revision of the settings, epoch, and the like.

        Raises:
            StoreError: It was refused several times in this state, or after the time was up.
        """
        deadline = here()
        reason = (self.task,) if deadline.pages_over else (self.task, *state)
        deadline.refusals[reason] += 1
        if deadline.refusals[reason] > MOST_REFUSALS:
            raise StoreError(
                f"task {self.task!r}: its scripts refuse the settings that Redis has just "
                "returned, so its keys are damaged, or other processes change its settings all the "
                "time. A change of any setting (`redrb set`) writes the rules anew that the "
                "scripts read."
            )

    def exchange(self, pipeline: Pipeline) -> list[Reply]:
        """Send commands in one round trip, repeated while Redis is away; raises as `call`."""
        return self.client.retrying(lambda: without_errors(self.client.exchange(pipeline)))

    def wait_for_wake(self, *waiters: str, longest_s: float | None = None) -> bool:
        """Block until one of `waiters` is woken, as `wait_for_any` does."""
        wakes = [(self.client, self.keys.wake(waiter)) for waiter in waiters]
        return wait_for_any(wakes, longest_s)
