"""`StateReader`: reads the state of a namespace; never more than the newest figures."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

from redis.exceptions import ResponseError

from redrb import environment
from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.connection.failures import is_transient
from redrb.connection.server_cli import cli_options
from redrb.connection.transport import Pipeline, Reply
from redrb.errors import StoreDenied
from redrb.keys import is_name, registry_key
from redrb.options import has_password
from redrb.registry import Registry, namespaces
from redrb.stream.task.lookup import unknown_task
from redrb.watch.state.model import ClaimState, ServerState, State, TableState, TaskState
from redrb.watch.state.rates import RateWindow
from redrb.watch.state.shards import shard_names, sums_of
from redrb.watch.state.tables import read_tables
from redrb.watch.state.tasks import read_tasks
from redrb.watch.state.weights import read_weights
from redrb.watch.state.workers import Announced


def server_state(
    info: Mapping[str, str], *, address: str, latency_s: float = 0.0, cli: tuple[str, ...] = ()
) -> ServerState:
    """Return a server's state from its fields of INFO; a missing figure is 0 or ""."""
    number = partial(figure_of, info)
    valkey = "valkey_version" in info or info.get("server_name") == "valkey"
    return ServerState(
        address=address,
        kind="valkey" if valkey else "redis",
        version=info.get("valkey_version") or info.get("redis_version", ""),
        mode=info.get("server_mode") or info.get("redis_mode") or "standalone",
        uptime_s=number("uptime_in_seconds"),
        used_memory=int(number("used_memory")),
        maxmemory=int(number("maxmemory")),
        maxmemory_policy=info.get("maxmemory_policy", ""),
        clients=int(number("connected_clients")),
        blocked_clients=int(number("blocked_clients")),
        commands_per_s=number("instantaneous_ops_per_sec"),
        cpu_s=number("used_cpu_sys") + number("used_cpu_user"),
        aof=info.get("aof_enabled") == "1",
        last_save_ok="err"
        not in (info.get("rdb_last_bgsave_status"), info.get("aof_last_write_status")),
        replicas=int(number("connected_slaves")),
        allocator=info.get("mem_allocator", ""),
        latency_s=latency_s,
        cli=cli,
    )


def info_fields(reply: Reply) -> dict[str, str]:
    """Return the fields in a reply to INFO."""
    if isinstance(reply, dict):  # redis-py has parsed it
        return {str(name): str(value) for name, value in reply.items()}
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)
    pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in pairs if colon}


def figure_of(info: Mapping[str, str], name: str) -> float:
    """Return a field of INFO as a number; 0 if it is missing, or none."""
    try:
        return float(info.get(name) or 0)
    except ValueError:
        return 0.0


MOST_NAMES: Final = 200
"""Most tasks, and most weights, of one look by default."""


class StateReader:
    """Reads the state of a namespace, again and again; not safe among threads.

    A look costs each server one INFO and one script of bounded work for each task and table,
    whatever the number of groups or rows. It reads only: a user with the role observer may use it.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        *,
        tasks: Sequence[str] | None = None,
        group: str = "",
        most_names: int = MOST_NAMES,
        window: RateWindow | None = None,
    ) -> None:
        """Make a reader; nothing is read yet.

        Args:
            tasks: The only tasks and tables to read, for a user who may not read the registry;
                None: all.
            group: Consumer group that comes first in each task, also if it has not joined; "":
                "default", unless only others have joined.
            window: Counters of looks by earlier readers, for rates from the first look on.
        """
        self._client = client
        self._namespace = namespace
        self._tasks = tasks
        self._group = group
        self._most_names = most_names
        self._window = window or RateWindow()
        self._announced: dict[str, Announced] = {}
        self._others: tuple[str, ...] | None = None
        registry_key(namespace)  # checks the name

    def look(self, *, timeout_s: float = 2.0) -> State:
        """Return the state now, with rates since the looks before.

        A request is not repeated after `timeout_s`.

        Raises:
            StoreUnavailable: Redis does not answer.
            StoreError: It answered with an error.
            UnknownTask: One of the tasks to read does not exist.
        """
        with Deadline(at_most=timeout_s):
            state = self._window.rated(self._read())
        return replace(state, sums=sums_of(state.tasks))

    def _read(self) -> State:
        began = time.monotonic()
        servers, now_s = self._servers()
        names, total, tables, weights = self._names()
        place = self._client, self._namespace
        found_tables = read_tables(*place, tables)
        if self._tasks is not None:  # each name may be that of a task, and that of a table
            found_tables = [table for table in found_tables if table.readable]
            names += [claim.name for table in found_tables for claim in table.claims]
        known = {table.name for table in found_tables}
        tasks = [
            task
            for task in read_tasks(*place, dict.fromkeys(names), self._group, self._announced)
            if task.readable or self._tasks is None or task.name not in known
        ]
        known |= {task.name for task in tasks}
        if self._others is None and not (names or tables or weights):
            self._others = namespaces(self._client)  # once: it looks at all keys
        for name in self._tasks or ():
            if name.replace("@*", "@0") not in known:
                raise unknown_task(self._client, self._namespace, name)
        return State(
            namespace=self._namespace,
            where=self._client.where,
            time=now_s,
            took_s=time.monotonic() - began,
            servers=servers,
            tasks=tuple(tasks),
            tasks_total=total,
            tables=tuple(_with_claims(table, tasks) for table in found_tables),
            weights=tuple(read_weights(*place, weights, now_s)),
            url=url_flag(self._client),
            others=() if known or weights else self._others or (),
        )

    def _servers(self) -> tuple[tuple[ServerState, ...], float]:
        found, now_s = [], 0.0
        for primary in self._client.primaries():
            pipeline = Pipeline()
            pipeline.add("TIME")
            pipeline.add("INFO")
            pipeline.freeze()
            began = time.monotonic()
            clock, info = primary.retrying(lambda p=primary, q=pipeline: _checked(p.exchange(q)))  # type: ignore[misc]
            latency_s = time.monotonic() - began
            now_s = now_s or int(clock[0]) + int(clock[1]) / 1e6
            cli, fields = cli_options(primary), info_fields(info)
            found.append(server_state(fields, address=primary.where, latency_s=latency_s, cli=cli))
        return tuple(found), now_s

    def _names(self) -> tuple[list[str], int, list[str], list[str]]:
        registry = Registry(self._client, self._namespace)
        try:
            weights = list(islice(registry.names("weights"), self._most_names))
            if self._tasks is not None:
                names = self._asked
                return names, len(names), self._perhaps_tables, weights
            names = list(islice(registry.names("task"), self._most_names))
            tables = list(islice(registry.names("table"), self._most_names))
            total = registry.count("task") if len(names) == self._most_names else len(names)
        except StoreDenied:
            if self._tasks is None:
                raise
            names = self._asked
            return names, len(names), self._perhaps_tables, []
        return names, total, tables, weights

    @property
    def _asked(self) -> list[str]:
        place = self._client, self._namespace
        return [name for task in self._tasks or () for name in shard_names(*place, task)]

    @property
    def _perhaps_tables(self) -> list[str]:
        return list(filter(is_name, self._tasks or ()))


def _with_claims(table: TableState, tasks: Sequence[TaskState]) -> TableState:
    ledgers = {task.name: task.main.stats.ledger for task in tasks if task.main}

    def counted(claim: ClaimState) -> ClaimState:
        ledger = ledgers.get(claim.name)
        if ledger is None:
            return claim
        return replace(
            claim, waiting=ledger.waiting * claim.size, leased=ledger.leased * claim.size
        )

    return replace(table, claims=tuple(map(counted, table.claims)))


def url_flag(client: Client) -> str:
    """Return the URL that commands need as `--url`; "" where REDRB_URL has it, or a password."""
    in_environment = client.url == environment.variable(environment.URL)
    return "" if in_environment or has_password(client.url) else client.url


def _checked(replies: list[Reply]) -> list[Reply]:
    """Return the replies to TIME and INFO; without INFO, as the fake server is, it says nothing."""
    clock, info = replies
    if isinstance(info, ResponseError) and not is_transient(info):
        info = b""
    for reply in (clock, info):
        if isinstance(reply, Exception):
            raise reply
    return [clock, info]
