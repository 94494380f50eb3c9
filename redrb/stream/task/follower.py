"""A task learns the newest weight version from the publisher."""

from __future__ import annotations

from redrb.keys import WeightKeys
from redrb.lua.scripts import load, run
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore


class Follower:
    """Subscribes a task to the versions of published weights.

    The publisher tells every task that follows it, after each commit (`weights/publisher.py`).
    """

    def __init__(self, store: TaskStore, namespace: str, weights: str) -> None:
        """Follow the weights `weights`, and learn what is published already."""
        self._store = store
        self._keys = WeightKeys.of(namespace, weights)
        self.follow()

    def follow(self) -> None:
        """Tell the task the newest version, and have it told of later ones."""
        client, script = self._store.client, load("weights/follow")
        published = self._keys.versions  # which may be on another node than the task
        newest = int(run(client.at(published), script, [published], [self._key]))
        if newest:
            TaskScripts(self._store).advance(newest)

    @property
    def _key(self) -> str:
        return self._store.keys.stream
