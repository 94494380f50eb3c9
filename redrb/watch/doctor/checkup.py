"""`report_on`: connects, checks, repairs and checks again; a server that is away is a finding."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from redrb import environment
from redrb.connection import Client, connect
from redrb.connection.deadline import Deadline
from redrb.errors import StoreDenied, StoreError, StoreUnavailable, UnsupportedServer
from redrb.keys import TaskKeys, is_task
from redrb.registry import Registry
from redrb.stream.task.lookup import unknown_task
from redrb.stream.task.store import TaskStore
from redrb.watch.doctor import latency, registry_names, server_fixes, servers, stored
from redrb.watch.doctor.examination import Examination, examine
from redrb.watch.doctor.latency import Ping
from redrb.watch.doctor.registry_names import LeftName
from redrb.watch.doctor.repairs import Repair, repair
from redrb.watch.state.findings import connection_finding, findings_of, worst_first
from redrb.watch.state.findings.wording import (
    command_line,
    finding_of,
    server_command,
    shown,
    url_command,
)
from redrb.watch.state.model import Finding, ServerState, State, TaskState
from redrb.watch.state.reader import MOST_NAMES, StateReader, url_flag

if TYPE_CHECKING:
    from redrb.watch.doctor.tables import TableExamination

T = TypeVar("T")

_CONNECT_S = 5.0
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Report:
    """What doctor found, the worst first, and did; findings that it repaired are not in it."""

    findings: tuple[Finding, ...]
    repairs: tuple[Repair, ...] = ()
    pings: tuple[Ping, ...] = ()
    state: State | None = None


def report_on(
    url: str | None, namespace: str, task: str, *, repairing: bool, over_s: float, timeout_s: float
) -> Report:
    """Check a namespace, or one of its tasks, and its servers; mend what is safe if `repairing`.

    `over_s` are the seconds between two looks, for rates, and `timeout_s` the most for all checks.
    Repairs may wait for a lease besides.

    Raises:
        ConfigError: The URL or a name is wrong, or there is no such task.
        StoreDenied: The user may not log in, or may not even look.
    """
    url = url or environment.variable(environment.URL)

    def away(error: StoreUnavailable, url: str | None) -> Finding:
        return connection_finding(shown(error.where), shown(str(error), longest=_LONGEST), url)

    try:
        with Deadline(at_most=timeout_s):
            client = connect(
                url, connect_timeout=min(timeout_s, _CONNECT_S), retry_s=0, allow_eviction=True
            )
    except StoreUnavailable as error:
        return Report((away(error, url),))
    except UnsupportedServer as error:
        command = url_command(url, "localhost:6379", "INFO", "server")
        text = shown(str(error), longest=_LONGEST)
        return Report((finding_of("old-server", "server", text, command),))

    def checked() -> Checkup:
        reader = StateReader(client, namespace, tasks=[task] if task else None)

        def look() -> State:  # the second state has rates
            reader.look()
            threading.Event().wait(over_s)
            return reader.look()

        with Deadline(at_most=timeout_s + over_s):
            return Checkup(client, namespace, look, task)

    repairs: list[Repair] = []
    with client:
        try:
            found = checked()
            if repairing:
                examined = (found.examined, found.left_names, found.tables)
                for each in repair(client, found.state, *examined):
                    repairs.append(each)
                if repairs:
                    found = checked()
        except StoreUnavailable as error:
            return Report((away(error, client.url), *_slots(client)), tuple(repairs))
    return Report(found.findings, tuple(repairs), found.pings, found.state)


def _slots(client: Client) -> tuple[Finding, ...]:
    """Return findings about a cluster that answers, and serves nobody as slots are missing."""
    try:
        with Deadline(at_most=_CONNECT_S):
            return tuple(servers.find_in_cluster(client))
    except StoreError:
        return ()


class Checkup:
    """All checks, one after the other; one that fails or is not allowed is a finding."""

    def __init__(
        self, client: Client, namespace: str, look: Callable[[], State], task: str = ""
    ) -> None:
        """Check a namespace, or one of its tasks or tables, and its servers.

        Raises:
            UnknownTask: There is no such task.
            StoreUnavailable: Redis stayed away.
        """
        self._client = client
        self._task = task
        self._unchecked: list[str] = []
        self._found: list[Finding] = []
        primaries = client.primaries()
        self.pings = tuple(map(latency.ping, primaries))
        self._server = ServerState(self.pings[0].server, cli=self.pings[0].cli)
        self.state = self._look(look, namespace)
        self._found += [*latency.find(self.pings), *findings_of(self.state)]
        for primary in primaries:
            self._check_server(primary)
        slots = partial(servers.find_in_cluster, client)
        self._found += self._allowed("slots of the cluster", slots)
        self.examined = self._examine_tasks()
        self.tables = self._examine_tables()
        self.left_names: tuple[LeftName, ...] = ()
        if not task:
            names = partial(registry_names.left_names, client, self.state)
            self.left_names = self._allowed("registry", names)
            self._found += registry_names.find(self.state, self.left_names)
        if self._unchecked:
            text = f"Not checked: {', '.join(dict.fromkeys(self._unchecked))}."
            words = ("redrb", "doctor", *([task] if task else []))
            command = f"REDRB_URL=URL {command_line(words, namespace=namespace)}"
            self._found.append(finding_of("unchecked", "server", text, command))
        self.findings = worst_first(self._found)

    def _look(self, look: Callable[[], State], namespace: str) -> State:
        """Return the state; names of tasks only where it cannot be read."""
        client, task = self._client, self._task
        try:
            state = look()
        except (StoreDenied, StoreUnavailable):
            raise
        except StoreError as error:
            self._note_failure("namespace", error)
            state = _unread(client, namespace, task)
        if not task:
            return state
        keys = TaskKeys.of(namespace, task)
        if any(table.name == task for table in state.tables):
            return replace(state, weights=())
        if not client.at(keys.task).execute("EXISTS", keys.task, *keys.contents):
            raise unknown_task(client, namespace, task)
        tasks = tuple(one for one in state.tasks if one.name == task)
        return replace(state, tasks=tasks, tasks_total=len(tasks), weights=())

    def _check_server(self, client: Client) -> None:
        info = dict(self._allowed("INFO", lambda: servers.info_of(client).items()))
        server = servers.server_of(client, info)
        self._found += [*servers.find(server, info), *server_fixes.find(server)]
        for what, find in (
            ("settings (CONFIG GET)", servers.find_in_settings),
            ("users (ACL USERS)", servers.find_users),
        ):
            self._found += self._allowed(what, partial(find, client, server))

    def _examine_tasks(self) -> tuple[Examination, ...]:
        client, state = self._client, self.state
        if self._task:
            unread: Sequence[str] = [] if state.tasks else [self._task]
        else:
            look = partial(registry_names.unread_tasks, client, state)
            unread = self._allowed("registry", look)
        examined: list[Examination] = []
        for task in (*state.tasks, *map(TaskState, unread)):
            if not task.readable:
                continue
            store = TaskStore.of(client, state.namespace, task.name)
            found = self._allowed(f"task {task.name}", partial(map, examine, [store]))
            examined += filter(None, found)  # others were deleted meanwhile
        for one in examined:
            self._found += stored.find(state, one)
        return tuple(examined)

    def _examine_tables(self) -> tuple[TableExamination, ...]:
        examined: list[TableExamination] = []
        for table in self.state.tables:
            if table.readable:
                from redrb.watch.doctor.tables import examine_table, find  # imports numpy

                examine = partial(examine_table, self._client, self.state.namespace)
                found = partial(map, examine, [table.name])
                examined += self._allowed(f"values of table {table.name}", found)
        for one in examined:
            self._found += find(self.state, one)
            if not one.whole:
                self._unchecked.append(f"values of table {one.name} (give a longer --timeout)")
        return tuple(examined)

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
        text = shown(str(error), longest=_LONGEST)
        self._found.append(finding_of("failed-check", what, text, command))


def _unread(client: Client, namespace: str, task: str) -> State:
    """Return the names of tasks, as a state, where the state cannot be read."""
    registry = Registry(client, namespace)
    names = [task] if task else islice(registry.names("task"), MOST_NAMES)
    tasks = tuple(map(TaskState, filter(is_task, names)))
    return State(
        namespace,
        client.where,
        time.time(),
        tasks=tasks,
        tasks_total=1 if task else registry.count("task"),
        url=url_flag(client),
    )
