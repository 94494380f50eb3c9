"""`Checkup`: all checks of a namespace or of one task, one after the other, and their findings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
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
    server_settings,
    staged_chunks,
    storage,
    waiters,
)
from redrb.doctor.examination import Examination, examine
from redrb.doctor.latency import Ping
from redrb.doctor.registry_names import MOST_NAMES, LeftName
from redrb.doctor.wording import shown
from redrb.errors import StoreDenied, StoreError, StoreUnavailable
from redrb.keys import is_name
from redrb.registry import Registry
from redrb.state.finding import Finding, FindingKind, worst_first
from redrb.state.findings import KINDS as STATE_KINDS
from redrb.state.findings import findings_of
from redrb.state.model import State, TaskState
from redrb.stream.task.inspection import existing_task
from redrb.stream.task.store import TaskStore

T = TypeVar("T")

UNCHECKED = FindingKind(
    "unchecked",
    "info",
    "This user of Redis has no right to look. Run doctor as a user with more rights to check this, "
    "too.",
)
FAILED_CHECK = FindingKind(
    "failed-check",
    "critical",
    "A key of redrb has another type or content than it should have: another program changed it.",
)
KINDS: tuple[FindingKind, ...] = (
    *STATE_KINDS,
    FAILED_CHECK,
    UNCHECKED,
    *latency.KINDS,
    *server_facts.KINDS,
    *server_settings.KINDS,
    *storage.KINDS,
    *leases.KINDS,
    *waiters.KINDS,
    *registry_names.KINDS,
    *staged_chunks.KINDS,
)
"""All kinds of findings of `redrb doctor`."""


@dataclass(frozen=True, slots=True)
class Checkup:
    """The result of all checks.

    Attributes:
        state: The state of the namespace, or of the one task.
        findings: The troubles, the worst first.
        pings: How fast each server answers.
        examined: The tasks and partitions that were examined.
        left_names: Names in the registry that name nothing.
    """

    state: State
    findings: tuple[Finding, ...]
    pings: tuple[Ping, ...]
    examined: tuple[Examination, ...]
    left_names: tuple[LeftName, ...]


def check_up(client: Client, namespace: str, look: Callable[[], State], task: str = "") -> Checkup:
    """Check a namespace, or one of its tasks, and its servers.

    Args:
        client: A client of the servers.
        namespace: The namespace.
        look: Reads the state of the namespace.
        task: The task; "": all tasks and weights.

    Raises:
        UnknownTask: There is no such task.
        StoreUnavailable: Redis stayed away.
    """
    servers = client.primaries()
    pings = tuple(map(latency.ping, servers))
    unchecked: list[str] = []
    findings = list(latency.find(pings))
    try:
        state = look()
    except (StoreDenied, StoreUnavailable):
        raise
    except StoreError as error:
        findings.append(FAILED_CHECK.found("namespace", shown(str(error), longest=400)))
        state = _unread(client, namespace, task)
    if task:
        existing_task(client, task, namespace=namespace)
        state = _of_task(state, task)
    findings += findings_of(state)

    def allowed(what: str, check: Callable[[], Iterable[T]]) -> tuple[T, ...]:
        try:
            return tuple(check())
        except StoreDenied:
            unchecked.append(what)
        except StoreUnavailable:
            raise
        except StoreError as error:
            findings.append(FAILED_CHECK.found(what, shown(str(error), longest=400)))
        return ()

    for server in servers:
        findings += allowed("INFO", partial(_facts, server))
        findings += allowed("settings (CONFIG GET)", partial(_settings, server))
    findings += allowed("slots of the cluster", lambda: server_facts.find_in_cluster(client))
    examined = tuple(
        each
        for one in state.tasks
        if one.readable
        for each in allowed(f"task {one.name}", partial(_examined, client, namespace, one))
    )
    for each in examined:
        for part in (storage, leases, waiters):
            findings += part.find(state, each)
    names: tuple[LeftName, ...] = ()
    if not task:
        names = allowed("registry", lambda: registry_names.left_names(client, state))
        findings += registry_names.find(state, names)
        findings += allowed("staged chunks", lambda: staged_chunks.find(client, state))
    if unchecked:
        text = f"Not checked: {', '.join(dict.fromkeys(unchecked))}."
        findings.append(UNCHECKED.found("server", text))
    return Checkup(state, worst_first(findings), pings, examined, names)


def _unread(client: Client, namespace: str, task: str) -> State:
    """Return the names of tasks, as a state, where the state cannot be read."""
    names = [task] if task else islice(Registry(client, namespace).names("task"), MOST_NAMES)
    tasks = tuple(
        TaskState(name, partitions=TaskStore.of(client, namespace, name).partitions)
        for name in filter(is_name, names)
    )
    return State(namespace, client.where, time.time(), tasks=tasks, tasks_total=len(tasks))


def _of_task(state: State, task: str) -> State:
    """Return the part of a state that is about one task."""
    tasks = tuple(one for one in state.tasks if one.name == task)
    return replace(state, tasks=tasks, tasks_total=len(tasks), weights=())


def _facts(client: Client) -> Iterator[Finding]:
    info = server_facts.info_of(client)
    yield from server_facts.find(server_facts.server_of(client, info), info)


def _settings(client: Client) -> Iterator[Finding]:
    settings = server_settings.settings_of(client)
    server = server_facts.server_of(client, server_facts.info_of(client))
    yield from server_settings.find(server, settings)


def _examined(client: Client, namespace: str, task: TaskState) -> Iterator[Examination]:
    stores = TaskStore.of_partitions(client, namespace, task.name, task.partitions)
    for number, store in enumerate(stores):
        found = examine(store, number if len(stores) > 1 else None)
        if found is not None:  # else it was deleted meanwhile
            yield found
