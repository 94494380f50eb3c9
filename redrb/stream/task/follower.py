"""`Follower`: a task learns each new version of published weights from their publisher."""

from __future__ import annotations

from redrb.keys import WeightKeys
from redrb.lua.scripts import load, run
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore


class Follower:
    """Subscribes a task to the versions of published weights.

    After each commit the publisher advances the current version of every task that follows it
    (`redrb/weights/publishing/publisher.py`).
    """

    def __init__(self, store: TaskStore, namespace: str, weights: str) -> None:
        """Address the weights `weights`; nothing is asked of Redis."""
        self._store = store
        self._versions = WeightKeys.of(namespace, weights).versions

    def follow(self) -> None:
        """Subscribe the task, and advance it to the newest version."""
        client = self._store.client.at(self._versions)  # perhaps another node than the task's
        arguments = [self._store.keys.stream]
        newest = int(run(client, load("weights/follow"), [self._versions], arguments))
        if newest:
            TaskScripts(self._store).advance(newest)
