"""`Task`: one open task, the only owner of its description."""

from __future__ import annotations

from redrb.connection import Client
from redrb.errors import TaskMismatch
from redrb.stream.task.description import TaskDescription
from redrb.stream.task.follower import Follower
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.settings import TaskSettings
from redrb.stream.task.store import TaskStore


class Task:
    """A task in Redis that this process has opened; safe among threads.

    Another process may delete the task, or give it further settings. A script that notices says so,
    its caller calls `reopen`, and `description` is another one from then on.

    Attributes:
        name: Name of the task.
        store: The client bound to the task.
        scripts: The scripts that concern the task as a whole.
        description: The task's settings when it was last opened; replaced as a whole.
    """

    description: TaskDescription

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        namespace: str,
        settings: TaskSettings,
        weights: str | None = None,
    ) -> None:
        """Open a task, and create it when it is new.

        Args:
            client: A client.
            name: Name of the task.
            namespace: Its namespace.
            settings: Settings that the task must have.
            weights: Name of the published weights whose newest version the task learns.
        """
        self.name = name
        self.store = TaskStore.of(client, namespace, name)
        self.scripts = TaskScripts(self.store)
        self._settings = settings
        self._checked_settings = settings.as_stored()
        self._follower = None if weights is None else Follower(self.store, namespace, weights)
        self.reopen()

    @property
    def follows_weights(self) -> bool:
        """Whether the task learns the versions of published weights."""
        return self._follower is not None

    def reopen(self) -> None:
        """Create the task where it was deleted, and learn its settings.

        Raises:
            TaskMismatch: The task exists with other settings.
        """
        try:
            stored = self.scripts.open(self._checked_settings)
        except TaskMismatch as error:
            if "tags" in error.differences and not self._settings.tags:
                error.add_note("tags=[] asks for a task without tags: leave it out to use those.")
            raise
        order = self._settings.chosen_order(stored["order"])
        self.description = TaskDescription.of(stored, order)
        if self._follower is not None:  # a new task does not know the newest version
            self._follower.follow()
