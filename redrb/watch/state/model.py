"""`State`: a namespace at one moment; `Finding`: one trouble that it shows. Pure data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from redrb.stream.announcement import Announcement
from redrb.stream.task.ledger import StreamStats
from redrb.watch.state.histogram import Histogram

Life: TypeAlias = Literal["live", "silent", "dead", "ended"]
"""live: its heartbeat comes in time; silent: one is overdue; dead: its leases and rights were, or
will be, taken back; ended: it said that it ends."""


@dataclass(frozen=True, slots=True)
class WorkerState(Announcement):
    """A process that works on a task: its last announcement, and what follows from its age.

    Times go on since then: `uptime_s`, `waits_s` and `step_s` are those of now.

    Attributes:
        leased: Groups that it leases; of a dead worker at most those that are not taken over.
        rights: Rights to begin groups that it holds; of a dead worker those not yet taken back.
        behind: Versions that the task knew, and it did not use, at its last announcement.
        groups_per_s: Its rate between its announcements of the last seconds; None at the first;
            0 if it is dead or has ended, or none came for 10 seconds.
    """

    name: str
    life: Life = "live"
    seen_s: float = 0.0
    behind: int = 0
    groups_per_s: float | None = None
    samples_per_s: float | None = None

    @property
    def alive(self) -> bool:
        """Whether its leases and rights stay with it: it has neither died nor ended."""
        return self.life in ("live", "silent")


@dataclass(frozen=True, slots=True)
class Staleness:
    """Staleness of the groups of one consumer group, by the task's newest weight version.

    Attributes:
        waiting: Of the completed groups that wait.
        taken: Of all groups ever taken, as they were when they were taken.
    """

    waiting: Histogram = field(default_factory=Histogram)
    leased: Histogram = field(default_factory=Histogram)
    taken: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True)
class ConsumerGroupState:
    """One consumer group of a task."""

    name: str
    stats: StreamStats
    staleness: Staleness = field(default_factory=Staleness)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a task over the last seconds, per second.

    Attributes:
        over_s: Seconds from the first look that counts to the last one.
        acked: Groups acknowledged by the first consumer group.
    """

    over_s: float
    put: float = 0.0
    acked: float = 0.0
    samples_put: float = 0.0
    samples_acked: float = 0.0
    bytes_put: float = 0.0
    expired: float = 0.0
    filtered: float = 0.0
    evicted: float = 0.0
    dead: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskState:
    """One task.

    Attributes:
        readable: Whether it can be read; if not, the user lacks permission, or its data is damaged,
            and all else is empty.
        damage: Why its data cannot be read; "" if it can, or the user lacks permission.
        incarnation: Random id from its creation.
        settings: Its settings by name, as text, such as "max_staleness": "4".
        groups: Its consumer groups, at most 16: "default" first, then by name. A task from which
            nothing was taken yet has "default", not joined.
        odd_groups: Consumer groups with names that nothing can have; they are not shown.
        workers: Its makers, trainers and stages, at most 200, the newest first.
        stored_bytes: Bytes of the stored groups, by the mean size of all groups put.
        memory_bytes: Bytes of memory of the groups, their facts and the dead letters, as Redis
            estimates them; None if the user may not ask.
        rates: None at the first look.
        shards: Tasks of the `ShardedStream` of which it is one; 0: of none.
    """

    name: str
    readable: bool = True
    damage: str = ""
    incarnation: str = ""
    order: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[ConsumerGroupState, ...] = ()
    odd_groups: int = 0
    workers: tuple[WorkerState, ...] = ()
    workers_total: int = 0
    stored_bytes: int = 0
    memory_bytes: int | None = None
    rates: Rates | None = None
    shards: int = 0

    @property
    def sum_name(self) -> str:
        """Name of the sum of its shards, such as "math@*"; "" if it is no shard."""
        return f"{self.name.rpartition('@')[0]}@*" if self.shards else ""

    @property
    def main(self) -> ConsumerGroupState | None:
        """The first consumer group; None if the task cannot be read."""
        return self.groups[0] if self.groups else None

    @property
    def table(self) -> str:
        """The table whose rows it claims; "" for any other task."""
        return self.name.partition(":")[0] if ":" in self.name else ""

    @property
    def max_staleness(self) -> int | None:
        """Its setting `max_staleness`."""
        return self.number("max_staleness")

    def number(self, setting: str) -> int | None:
        """Return a setting that is an integer; None if the task does not have it."""
        text = self.settings.get(setting, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else None


@dataclass(frozen=True, slots=True)
class ClaimState:
    """A task that claims rows of a table.

    Attributes:
        name: Name of the task, `TABLE:TASK`; `State.tasks` has it, too.
        columns: Columns that a row needs before the task can claim it.
        size: Rows that are claimed together.
        consumed: Rows of the table that it has acknowledged.
        waiting: Rows that wait; None where the task cannot be read.
        leased: Rows that its consumers lease, likewise.
    """

    name: str
    columns: tuple[str, ...] = ()
    size: int = 1
    consumed: int = 0
    waiting: int | None = None
    leased: int | None = None


@dataclass(frozen=True, slots=True)
class TableState:
    """One table.

    Attributes:
        readable, damage: As of a task.
        retained: Cleared rows that a mark may bring back.
        change: Number of the newest change: its time in microseconds since 1970.
        run: The newest run; 0: none was begun.
        bytes, retained_bytes: Bytes of the values of these rows.
        made, cleared, dropped: Rows that were ever added, cleared, and given up by a restore.
        limit, max_bytes: Its settings; 0: none.
        retain: "checkpoint" or "".
        trash: Values of cleared or replaced rows that are still to be deleted.
        columns: Names of columns that any row has had.
        marks: Change of each mark.
        left: Whether there are only values of it, as it was not deleted, or resumed, to the end.
    """

    name: str
    readable: bool = True
    damage: str = ""
    rows: int = 0
    retained: int = 0
    change: int = 0
    run: int = 0
    bytes: int = 0
    retained_bytes: int = 0
    made: int = 0
    cleared: int = 0
    dropped: int = 0
    limit: int = 0
    max_bytes: int = 0
    retain: str = ""
    trash: int = 0
    columns: tuple[str, ...] = ()
    marks: Mapping[str, int] = field(default_factory=dict)
    claims: tuple[ClaimState, ...] = ()
    left: bool = False

    @property
    def changed_s(self) -> float:
        """When a row changed last, in seconds since 1970 by the server's clock; 0: never."""
        return self.change / 1e6

    @property
    def balanced(self) -> bool:
        """Whether each row that was ever added is accounted for."""
        return self.made == self.rows + self.cleared + self.dropped


@dataclass(frozen=True, slots=True)
class WeightsState:
    """The published weights of one name.

    Attributes:
        kind: "full", "delta" or "lora".
        nbytes: Bytes of the newest version's tensors.
        stored_bytes: Bytes of the 200 newest versions in Redis, without manifests; chunks that
            versions share count once.
        age_s: Seconds since the newest version's commit, by the server's clock.
        expired_pins: Pins whose time is over.
        damage: Why the entry of the newest version cannot be read, as of a task.
        asked_version: The damaged version that a reader has found last, for which it wants a full
            one; 0: none.
        asked_key: The key that is damaged.
    """

    name: str
    version: int = 0
    kind: str = ""
    nbytes: int = 0
    stored_bytes: int = 0
    versions: int = 0
    age_s: float = 0.0
    pins: int = 0
    expired_pins: int = 0
    readable: bool = True
    damage: str = ""
    asked_version: int = 0
    asked_key: str = ""


@dataclass(frozen=True, slots=True)
class ServerState:
    """One Redis or Valkey server.

    Attributes:
        address: Host and port, or the path of its socket; never a password.
        mode: "standalone", "sentinel" or "cluster".
        maxmemory: Its limit of memory; 0: none.
        maxmemory_policy: What it does at this limit; anything but "noeviction" loses data.
        cpu_s: Processor time of the server since it started, in seconds.
        cpu_share: Processor time a second over the last seconds, 1.0 is one core; None at first.
        last_save_ok: Whether its last snapshot, and its last write of the file, succeeded.
        latency_s: Seconds from the first request of this look to its reply.
        cli: Options with which redis-cli reaches it; () for an address without user and TLS.
    """

    address: str
    kind: str = "redis"
    version: str = ""
    mode: str = "standalone"
    uptime_s: float = 0.0
    used_memory: int = 0
    maxmemory: int = 0
    maxmemory_policy: str = ""
    clients: int = 0
    blocked_clients: int = 0
    commands_per_s: float = 0.0
    cpu_s: float = 0.0
    cpu_share: float | None = None
    aof: bool = False
    last_save_ok: bool = True
    replicas: int = 0
    allocator: str = ""
    latency_s: float = 0.0
    cli: tuple[str, ...] = ()

    @property
    def evicts_keys(self) -> bool:
        """Whether it deletes keys at its limit of memory, once it has one."""
        return self.maxmemory_policy not in ("", "noeviction")


def _place(task: TaskState) -> str:
    """Return the key by which tasks are sorted: shards by their numbers, and then their sum."""
    return re.sub(r"@([0-9]{1,4})$", lambda at: f"@{at[1]:>4}", task.name.replace("*", ":"))


@dataclass(frozen=True, slots=True)
class State:
    """A namespace at one moment.

    Attributes:
        time: Seconds since 1970 by the server's clock.
        servers: The servers; of a cluster all primaries.
        tasks: All tasks, by name; at most 200.
        sums: A task `math@*` for the shards of each stream, with the sums of what they have.
        tables: All tables, by name; at most 200.
        weights: All published weights, by name; at most 200.
        url: URL of Redis for `--url`; "" where REDRB_URL has it, or it has a password.
        others: Of a namespace without any names: other namespaces, as far as they are found.
    """

    namespace: str
    where: str
    time: float
    took_s: float = 0.0
    servers: tuple[ServerState, ...] = ()
    tasks: tuple[TaskState, ...] = ()
    tasks_total: int = 0
    sums: tuple[TaskState, ...] = ()
    tables: tuple[TableState, ...] = ()
    weights: tuple[WeightsState, ...] = ()
    url: str = ""
    others: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[TaskState, ...]:
        """The tasks, and behind the shards of a stream their sum."""
        if not self.sums:
            return self.tasks
        return tuple(sorted((*self.tasks, *self.sums), key=_place))

    @property
    def streams(self) -> tuple[TaskState, ...]:
        """The tasks, but sums in place of their shards: each process is there once."""
        sums = {task.name for task in self.sums}
        return tuple(task for task in self.shown if task.sum_name not in sums)

    def has(self, name: str) -> bool:
        """Return whether a task or table has this name."""
        return bool(self.task(name)) or any(table.name == name for table in self.tables)

    def task(self, name: str) -> TaskState | None:
        """Return a task, or a sum, by its name; None if there is none."""
        return next((task for task in self.shown if task.name == name), None)


Severity: TypeAlias = Literal["critical", "warning", "info"]
"""critical: data is lost or nothing goes on; warning: near to that, or a waste; info: a note."""

SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True)
class Finding:
    """One trouble.

    Attributes:
        code: Name of the check, such as "dead-worker"; documented in docs/reference/findings.md.
        subject: What it is about: "task math", "maker host-1 of math", "server", "weights actor".
        summary: What was seen, in one sentence with its figures.
        command: The command that mends it; where no command can, one that shows more.
    """

    code: str
    severity: Severity
    subject: str
    summary: str
    cause: str
    command: str
    repairs: bool = False
