"""Operators: one changes settings of tasks, one requeues dead letters and deletes some."""

from __future__ import annotations

from redrb.connection import Client
from redrb.stream.task.settings import SettingArguments
from tests.chaos import options, tasks
from tests.chaos.worker import Worker

LETTERS = 20

_CHANGES: tuple[tuple[str, SettingArguments], ...] = (
    *((tasks.FLOW, {"limit": limit}) for limit in (60, 150, 300, 600)),
    *((tasks.FLOW, {"max_dead": most}) for most in (0, 1, 5)),
    (tasks.FLOW, {"limit": 200, "max_dead": 10}),
    *((tasks.ROLLOUTS, {"limit": limit}) for limit in (40, 100)),
)


class Configures(Worker):
    """Changes settings now and then."""

    part = "makers"

    def open(self, client: Client) -> None:
        self._streams = {name: self.stream(client, name) for name in (tasks.FLOW, tasks.ROLLOUTS)}

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def step(self) -> None:
        self.pause(self.dice.uniform(0.2, 3.0))
        task, changes = self.dice.choice(_CHANGES)
        with self.journal.call("configure", 3 * options.RETRY_S, task=task, changes=changes):
            self._streams[task].configure(**changes)


class Requeues(Worker):
    """Requeues some of the newest dead letters, and now and then deletes them instead."""

    part = "makers"

    def open(self, client: Client) -> None:
        self._stream = self.stream(client, tasks.FLOW)

    def close(self) -> None:
        self._stream.close()

    def step(self) -> None:
        self.pause(self.dice.uniform(0.1, 1.5))
        with self.journal.call("dead_letters", options.RETRY_S):
            letters = self._stream.dead_letters(LETTERS)
        chosen = [letter for letter in letters if self.dice.random() < 0.7]
        ids = [letter.id for letter in chosen]
        names = [letter.items[0].extras["group"] for letter in chosen if letter.items]
        if self.dice.random() < 0.15:
            with self.journal.call("drop_letters", options.RETRY_S, letters=names) as outcome:
                outcome["count"] = self._stream.drop_dead_letters(ids)
        else:
            with self.journal.call("requeue", options.RETRY_S, letters=names) as outcome:
                outcome["count"] = len(self._stream.requeue(ids))
