"""`Task`: one open task, the only owner of its description."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, ClassVar

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.errors import StoreUnavailable, TaskMismatch
from redrb.keys import WeightKeys
from redrb.lua.calls import Call
from redrb.registry import Registry
from redrb.stream.task.calls import DropGroup, Join, Open, SettingsReply
from redrb.stream.task.configuring import configure, open_task
from redrb.stream.task.description import StalenessRules, TaskDescription
from redrb.stream.task.lookup import similar_tasks, unknown_task
from redrb.stream.task.removal import clear, forget_name
from redrb.stream.task.settings import (
    NO_BOUND,
    STORED_DEFAULTS,
    WIRE_FORMAT,
    TaskSettings,
    stored_names,
)
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import StoredSettings, caller, read_settings, setting_text
from redrb.weights.wire.calls import Advance


class Follow(Call[int], frozen=True):
    """Register the task of a stream as a follower of weights; returns their newest version."""

    script: ClassVar = "weights/follow"
    stream: str


SEARCH_AGAIN_S = 30.0

_NO_LIMITS = {"limit": "", "max_waiting": ""}
"""Limits that follow from other settings; the task loses those that do not follow any more."""

_log = logging.getLogger("redrb")


class Task:
    """A task in Redis that this process has opened; safe among threads.

    Another process may delete the task, or give it further settings; or Redis loses its data, and
    whoever comes first creates the task anew. A script that notices says so, its caller calls
    `reopen`, and `description` is another one from then on.

    Attributes:
        name: Its name.
        namespace: The namespace that it is in.
        description: The task's settings when it was last opened; replaced as a whole.
        weights: Name of the published weights whose newest version the task learns; "": of none.
        newest: The largest version of these weights that this process knows to be published.
        version: Newest weight version that the task knew when it was opened; 0: none.
        is_advanced: Whether a trainer of redrb's tells it each version.
    """

    description: TaskDescription
    version: int = 0
    is_advanced: bool = False

    def __init__(
        self,
        client: Client,
        store: TaskStore,
        *,
        namespace: str,
        settings: TaskSettings,
        implied: TaskSettings | None = None,
        weights: str | None = None,
        create: bool = True,
        enter_name: Callable[[], None] | None = None,
    ) -> None:
        """Open a task, and create it when it is new.

        Args:
            settings: Settings that the task must have.
            implied: Settings that it gets where no user gave others.
            weights: Name of the published weights whose newest version the task learns.
            create: Whether to create the task when it does not exist.
            enter_name: Enters the name where others find it, beside the registry; called each time
                the task is opened, as it may have been created anew, in a Redis that has lost its
                data. If it raises, the task counts as not opened, and the next call opens it again.

        Raises:
            UnknownTask: The task does not exist, and `create` is False.
        """
        self.name = store.task
        self.store = store
        self._client = client
        self.namespace = namespace
        self._create = create
        self._enter_name = enter_name
        self._similar: tuple[float, tuple[str, ...]] = (-SEARCH_AGAIN_S, ())
        self._settings = settings
        self._declared = settings.as_stored()
        self._implied = {} if implied is None else _implied_beside(settings, implied)
        self._generation: int | None = None
        self._configured: frozenset[str] = frozenset()
        self._removed = ""
        self.weights = weights or ""
        self._versions = "" if weights is None else WeightKeys.of(namespace, weights).versions
        self.newest = 0
        self._joined: set[str] = set()
        self._noted: dict[str, object] = {}
        self._open("")

    def reopen(self, *, refused_here: bool = False) -> None:
        """Learn the settings that the task has now, or create it where it was deleted.

        In a task that was created anew the settings that were given from here are restored, as
        they were when this process last learned them. Consumer groups that have joined from here
        join again, and the loss of its data is logged, once.

        Args:
            refused_here: Whether a script has said in this call that the task is gone or has other
                settings.

        Raises:
            StoreError: In this call, opening the task again does not help.
            TaskMismatch: The task was created anew with other settings.
            UnknownTask: The task was deleted, and must not be created from here.
        """
        before = self.description.incarnation
        self._open(before)
        now = self.description
        incarnation = now.incarnation
        if refused_here:
            self.store.refused(self.store.keys.stream, incarnation, now.revision, now.kind)
        if incarnation == before:
            return
        for group in tuple(self._joined):
            self.store.call(Join(group))  # if there are more pages, its takes go on
        mine = object()  # of several threads that notice, one logs
        if before and self._noted.setdefault(incarnation, mine) is mine:
            self._log_loss(before)

    def stored_settings(self) -> StoredSettings:
        """Return the settings and the record of changes; raises UnknownTask if there is no task."""
        found = read_settings(self.store)
        if found is None:
            raise unknown_task(self._client, self.namespace, self.name)
        return found

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings as `configuring.configure` does; raises UnknownTask without a task."""
        if not self.description.incarnation:
            self.reopen()  # this process has cleared the task
        stored = configure(self.store, changes)
        if stored is None:
            raise unknown_task(self._client, self.namespace, self.name)
        if "order" in changes:
            self._settings = replace(self._settings, order=changes["order"])
        self._declared |= {name: stored.settings[name] for name in stored_names(changes)}
        self.reopen()

    def join(self, group: str, *, newest: bool = False) -> None:
        """Register a consumer group, now and whenever the task was created anew."""
        with Deadline():
            while not list(self.store.pages(Join(group, newest)))[-1].joined:
                self.reopen(refused_here=True)
        self._joined.add(group)

    def drop_group(self, group: str) -> int:
        """Remove a consumer group; returns the number of groups deleted with it."""
        self._joined.discard(group)
        return sum(page.found for page in self.store.pages(DropGroup(group)))

    def clear(self) -> int:
        """Delete the task; returns the number of groups that were stored."""
        stored = clear(self.store)
        self.description = replace(self.description, incarnation="")
        forget_name(self._client, self.namespace, self.store)
        if self._versions and self._create:
            self.reopen()
        return stored

    def similar(self) -> tuple[str, ...]:
        """Return tasks with groups and a similar name; searched at most once in half a minute."""
        searched, found = self._similar
        if time.monotonic() - searched >= SEARCH_AGAIN_S:
            found = similar_tasks(self._client, self.namespace, self.name)
            self._similar = (time.monotonic(), found)
        return found

    def expect(self, groups: float) -> None:
        """Give the setting `groups_per_version`, where no user gave another one."""
        self._implied |= TaskSettings(groups_per_version=groups).as_stored()
        self._open("")

    def is_published(self, version: int) -> bool:
        """Return whether a version of the weights that the task follows may have been published.

        Yes where the task follows none, while nothing is published, and while Redis does not answer
        at once. A version that this process has once known counts as published: Redis may have lost
        its data since, and groups of it may still come.
        """
        if not self._versions or version <= self.newest:
            return True
        with suppress(StoreUnavailable), Deadline(repeat_s=0.0):
            return not self._follow() or version <= self.newest
        return True

    def note_kind(self, kind: str) -> None:
        """Note the kind of groups that the task remembers since a put from here."""
        self.description = replace(self.description, kind=kind)

    def _log_loss(self, before: str) -> None:
        settings = self._declared | self._implied
        given = [f"{name}={value}" for name, value in settings.items() if value]
        removed, _, who = self._removed.partition(" ")
        why = "Redis lost its data, or another process cleared the task over an hour ago"
        if removed == before:
            host, pid, user = (who.split(" ") + [""] * 3)[:3]
            by = f" as user {user}" if user else ""
            why = f"process {pid} on {host}{by} removed it (`redrb rm`, or stream.clear())"
        _log.warning(
            "task %r was created anew, because %s: its waiting and leased groups, ledger and "
            "dead letters are gone. Restored from here: %s",
            self.name,
            why,
            ", ".join(given) or "nothing, this process gave it no settings",
        )

    def _log_held(self, stored: SettingsReply) -> None:
        for name in (each for each in self._declared if each in stored.held):
            _log.warning(
                "task %r has %s, which stays, because `redrb set` or stream.configure(...) has "
                "changed it since the task was created; this process was given %s. Who changed "
                "it: redrb set %s --namespace %s",
                self.name,
                setting_text(name, stored.settings[name]),
                setting_text(name, self._declared[name]),
                self.name,
                self.namespace,
            )

    def log_unbounded(self, given: TaskSettings | StalenessRules) -> None:
        """Log bounds of staleness that were given here, if nothing says what is current."""
        bounds = [
            f"{name}={bound}"
            for name in ("max_staleness", "max_token_staleness")
            if (bound := getattr(given, name)) is not None and bound < NO_BOUND
        ]
        if bounds and not (self._versions or self.version or self.is_advanced):
            _log.warning(
                "task %r: %s has no effect before the task knows the newest weight version, which "
                "this stream does not tell it: open it with weights=NAME, the name under which the "
                "weights are published, or call stream.advance(version) with each version",
                self.name,
                " and ".join(bounds),
            )

    def _open(self, incarnation: str) -> None:
        asked = Open(
            uuid.uuid4().hex,
            caller(self.store),
            self._create,
            incarnation,
            self._generation,
            given={"format": str(WIRE_FORMAT), **self._declared},
            implied=self._implied,
            defaults=STORED_DEFAULTS,
            configured=self._configured,
        )
        try:
            stored = open_task(self.store, asked)
        except TaskMismatch as error:
            if "tags" in error.differences and not self._settings.tags:
                error.add_note("tags=[] asks for a task without tags: leave it out to use those.")
            raise
        if stored is None:
            raise unknown_task(self._client, self.namespace, self.name)
        Registry(self._client, self.namespace).add("task", self.name)
        if self._enter_name is not None:
            self._enter_name()
        self._log_held(stored)
        # the values that the settings given from here have now
        self._generation, self._configured = stored.generation, stored.configured
        self._removed, self.version = stored.removed, stored.version
        for given in (self._declared, self._implied):
            for name in tuple(given):
                given[name] = stored.settings[name]
        order = self._settings.chosen_order(stored.settings["order"])
        self.description = TaskDescription.of(stored.settings, stored.epoch, order)
        if self._versions:  # a new task does not know the newest version
            self._follow()

    def _follow(self) -> int:
        """Let the publisher of the weights advance the task with each version from now on.

        Returns the newest published version, 0 for none.
        """
        client = self.store.client.at(self._versions)  # perhaps another node than the task's
        newest = Follow(self.store.keys.stream).run(client, [self._versions])
        if newest:
            self.newest = max(self.newest, newest, self.store.call(Advance(newest)))
        return newest


def _implied_beside(settings: TaskSettings, implied: TaskSettings) -> dict[str, str]:
    """Return the implied settings, as Redis keeps them, that are not among those given."""
    names = [field.name for field in fields(implied) if getattr(settings, field.name) is None]
    both = replace(settings, **{name: getattr(implied, name) for name in names}).as_stored()
    given = settings.as_stored()
    return {name: value for name, value in (_NO_LIMITS | both).items() if name not in given}
