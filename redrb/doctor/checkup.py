"""`Checkup`: all checks of a namespace or of one task, one after the other, and their findings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

from redrb.connection import Client
from redrb.doctor import (
    latency,
    leases,
    registry_names,
    server_facts,
    server_fixes,
    server_settings,
    server_users,
    storage,
)
from redrb.doctor.examination import Examination, examine
from redrb.doctor.latency import Ping
from redrb.doctor.registry_names import LeftName
from redrb.errors import StoreDenied, StoreError, StoreUnavailable
from redrb.keys import TaskKeys, is_name
from redrb.registry import Registry
from redrb.state.findings import findings_of, worst_first
from redrb.state.findings.servers import FAILED_CHECK
from redrb.state.findings.wording import command_line, server_command, shown
from redrb.state.model import Finding, FindingKind, ServerState, State, TaskState
from redrb.state.reader import MOST_NAMES, url_flag
from redrb.stream.task.similar_tasks import unknown_task
from redrb.stream.task.store import TaskStore

T = TypeVar("T")

UNCHECKED = FindingKind(
    "unchecked",
    "info",
    "This user of Redis has no right to look. Run doctor as a user with more rights to check this, "
    "too: URL is the one of that user.",
)


@dataclass(frozen=True, slots=True)
class Checkup:
    """The result of all checks.

    Attributes:
        findings: The troubles, the worst first.
        left_names: Names in the registry that name nothing.
    """

    state: State
    findings: tuple[Finding, ...]
    pings: tuple[Ping, ...]
    examined: tuple[Examination, ...]
    left_names: tuple[LeftName, ...]


def check_up(client: Client, namespace: str, look: Callable[[], State], task: str = "") -> Checkup:
    """Check a namespace, or one of its tasks, and its servers.

    Raises:
        UnknownTask: There is no such task.
        StoreUnavailable: Redis stayed away.
    """
    servers = client.primaries()
    pings = tuple(map(latency.ping, servers))
    checks = _Checks(client, ServerState(pings[0].server, cli=pings[0].cli), task)
    state = checks.state(look, namespace)
    checks.findings += [*latency.find(pings), *findings_of(state)]
    checks.check_servers(servers)
    examined = checks.examine_tasks(state)
    names = () if task else checks.check_names(state)
    return Checkup(state, worst_first(checks.all_findings(state)), pings, examined, names)


class _Checks:
    """Runs checks one after the other; one that fails or is not allowed is a finding."""

    def __init__(self, client: Client, server: ServerState, task: str) -> None:
        self._client = client
        self._server = server
        self._task = task
        self._unchecked: list[str] = []
        self.findings: list[Finding] = []

    def state(self, look: Callable[[], State], namespace: str) -> State:
        """Return the state; names of tasks only where it cannot be read."""
        try:
            state = look()
        except (StoreDenied, StoreUnavailable):
            raise
        except StoreError as error:
            self._note_failure("namespace", error)
            state = _unread(self._client, namespace, self._task)
        if not self._task:
            return state
        keys = TaskKeys.of(namespace, self._task)
        if not self._client.at(keys.task).execute("EXISTS", keys.task, *keys.contents):
            raise unknown_task(self._client, namespace, self._task)
        return _of_task(state, self._task)

    def check_servers(self, servers: Iterable[Client]) -> None:
        """Check each server, and the slots of a cluster."""
        for client in servers:
            info = dict(self._allowed("INFO", partial(_info, client)))
            server = server_facts.server_of(client, info)
            self.findings += [*server_facts.find(server, info), *server_fixes.find(server)]
            for what, find in (
                ("settings (CONFIG GET)", server_settings.find),
                ("users (ACL USERS)", server_users.find),
            ):
                self.findings += self._allowed(what, partial(find, client, server))
        slots = partial(server_facts.find_in_cluster, self._client)
        self.findings += self._allowed("slots of the cluster", slots)

    def examine_tasks(self, state: State) -> tuple[Examination, ...]:
        """Return what is stored of the tasks, and note the findings."""
        if self._task:
            unread: Sequence[str] = [] if state.tasks else [self._task]
        else:
            look = partial(registry_names.unread_tasks, self._client, state)
            unread = self._allowed("registry", look)
        examined = tuple(
            each
            for task in (*state.tasks, *map(TaskState, unread))
            if task.readable
            for each in self._allowed(
                f"task {task.name}", partial(_examined, self._client, state.namespace, task)
            )
        )
        for each in examined:
            for part in (storage, leases):
                self.findings += part.find(state, each)
        return examined

    def check_names(self, state: State) -> tuple[LeftName, ...]:
        """Return names that name nothing, and note the findings about names and weights."""
        client = self._client
        names = self._allowed("registry", partial(registry_names.left_names, client, state))
        self.findings += registry_names.find(state, names)
        return names

    def all_findings(self, state: State) -> list[Finding]:
        """Return the findings, with one about the checks that are not allowed."""
        if not self._unchecked:
            return self.findings
        text = f"Not checked: {', '.join(dict.fromkeys(self._unchecked))}."
        words = ("redrb", "doctor", *([self._task] if self._task else []))
        command = f"REDRB_URL=URL {command_line(words, namespace=state.namespace)}"
        return [*self.findings, UNCHECKED.found("server", text, command)]

    def _allowed(self, what: str, check: Callable[[], Iterable[T]]) -> tuple[T, ...]:
        try:
            return tuple(check())
        except StoreDenied:
            self._unchecked.append(what)
        except StoreUnavailable:
            raise
        except StoreError as error:
            self._note_failure(what, error)
        return ()

    def _note_failure(self, what: str, error: StoreError) -> None:
        command = server_command(self._server, "CLIENT", "LIST")
        self.findings.append(FAILED_CHECK.found(what, shown(str(error), longest=400), command))


def _unread(client: Client, namespace: str, task: str) -> State:
    """Return the names of tasks, as a state, where the state cannot be read."""
    registry = Registry(client, namespace)
    names = [task] if task else islice(registry.names("task"), MOST_NAMES)
    tasks = tuple(
        TaskState(name, partitions=TaskStore.of(client, namespace, name).partitions)
        for name in filter(is_name, names)
    )
    return State(
        *(namespace, client.where, time.time()),
        tasks=tasks,
        tasks_total=1 if task else registry.count("task"),
        url=url_flag(client),
    )


def _of_task(state: State, task: str) -> State:
    """Return the part of a state that is about one task."""
    tasks = tuple(one for one in state.tasks if one.name == task)
    return replace(state, tasks=tasks, tasks_total=len(tasks), weights=())


def _info(client: Client) -> Iterable[tuple[str, str]]:
    return server_facts.info_of(client).items()


def _examined(client: Client, namespace: str, task: TaskState) -> Iterator[Examination]:
    stores = TaskStore.of_partitions(client, namespace, task.name, task.partitions)
    for number, store in enumerate(stores):
        found = examine(store, number if len(stores) > 1 else None)
        if found is not None:  # else it was deleted meanwhile
            yield found
