"""Names of keys in Redis: all keys of a task share one hash tag, so that they are on one node."""

from __future__ import annotations

import itertools
import re
from binascii import crc_hqx
from dataclasses import dataclass
from typing import Final

from redrb.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._/@+-]{1,128}")


def check_name(argument: str, name: str) -> str:
    """Return `name` as a plain str, or raise ConfigError if a key may not contain it."""
    if not isinstance(name, str) or not is_name(name):
        raise ConfigError(
            f"{argument} {name!r} is not usable: write 1 to 128 letters, digits and . _ / @ + -"
        )
    return str.__str__(name)  # msgspec encodes no subclasses, such as numpy's


def is_name(name: str) -> bool:
    """Return whether a key may contain a name."""
    return _NAME.fullmatch(name) is not None


def is_task(name: str) -> bool:
    """Return whether a task can have this name: that of a task of its own, or `TABLE:TASK`."""
    table, colon, task = name.partition(":")
    return is_name(table) and (is_name(task) if colon else True)


REGISTRIES = "redrb:{*}:registry"
"""Pattern of the keys of the registries of all namespaces."""


def registry_key(namespace: str) -> str:
    """Return the key that holds the names of the tasks and weights of a namespace."""
    return f"redrb:{{{check_name('namespace', namespace)}}}:registry"


def maker_key(namespace: str, maker: str) -> str:
    """Return the key of the announcements of weights to one maker."""
    check_name("namespace", namespace)
    check_name("maker", maker)
    return f"redrb:{{{namespace}:maker:{maker}}}:announcements"


def trainer_key(namespace: str, trainer: str) -> str:
    """Return the key of a trainer's announcements to makers that no trainer names."""
    check_name("namespace", namespace)
    check_name("trainer", trainer)
    return f"redrb:{{{namespace}:trainer:{trainer}}}:announcements"


def consumer_key(namespace: str, trainer: str) -> str:
    """Return the key that holds the task and consumer of the newest trainer of a name."""
    check_name("namespace", namespace)
    check_name("trainer", trainer)
    return f"redrb:{{{namespace}:trainer:{trainer}}}:consumer"


def replay_key(namespace: str) -> str:
    """Return the key that holds the names of the tasks of a `ReplayBuffer`."""
    return f"redrb:{{{check_name('namespace', namespace)}:replay}}:tasks"


def replay_run_key(namespace: str) -> str:
    """Return the key that holds the name of the run that the groups of a `ReplayBuffer` are of."""
    return f"redrb:{{{check_name('namespace', namespace)}:replay}}:run"


def reference_weights(name: str) -> str:
    """Return the name of the weights of a recipe's reference policy."""
    return f"{name}-reference"


TASK_KEYS: Final = {
    owner: tuple(names.split())
    for owner, names in {
        "task": "stream task puts facts groups changes refreshed behind dead buried "
        "admission rights right holders holds makers "
        "parts part_records part_blobs part_due part_ends part_ended sessions "
        "sources workers announcements",
        "group": "group clock consumers deliveries joining leases letters returning slots spared "
        "staleness ranks rank_steps",
        "notes": "moved expiries reads",
        "pool": "ready versions newest mass queries",
        "queue": "queue needs",
    }.items()
}
"""The keys that go with a task: its own, and `<name>:<owner>` of what else they belong to.

A consumer group has those of "group" and of "notes", which hold a field for each entry that is not
done in it; the groups that wait for it in one status are a pool. Scripts name a list
`TASK_KEYS.owner`: what deletes a task or a consumer group goes through them.
"""

TASK_REST: Final = (
    *("sources:<origin>", "wake:<waiter>", "removed"),
    *("session:<digest>", "gathering:<group>", "filling:<place>"),
)
"""Further keys of a task: one for each origin that `sources` has, and those that expire."""

TABLE_KEYS: Final = {
    owner: tuple(names.split())
    for owner, names in {
        "table": "task puts keys rows tags columns changes gone cleared marks claims",
        "claim": "claimed parts consumed spent",
        "queue": "queue needs",
    }.items()
}
"""The keys that go with a table; those of "claim" belong to a task that claims its rows."""

TABLE_REST: Final = (
    *("claims:<task>:<key>", "trash", "<token>:<place>"),
    *("wake:<waiter>", "restoring:<token>:<key>"),
)
"""Further keys of a table: tasks that claim; values, and those to delete; those that expire."""
MOST_SHARDS: Final = 1024
"""Most tasks of a `ShardedStream`."""

_SLOTS = 16384
"""Slots of a cluster."""

_PLACES = (0, 8, 4, 10, 2, 6, 1, 9, 5, 11, 3, 7)
"""Twelfth of a cluster's slots in which a shard lies, by its number.

The first 2, 3, 4, 6 or 12 are on as many nodes, which have equal, contiguous ranges of slots.
"""


def _placed(tag: str) -> str:
    """Return the hash tag of a task; that of a shard, "<task>@<number>", puts it in its place."""
    shard = re.search(r"@([0-9]{1,4})$", tag)
    if shard is None:
        return tag
    place, placed, attempts = _PLACES[int(shard[1]) % len(_PLACES)], tag, itertools.count(1)
    while crc_hqx(placed.encode(), 0) % _SLOTS * len(_PLACES) // _SLOTS != place:
        placed = f"{tag}~{next(attempts)}"  # "~" is in no name
    return placed


class _Key:
    """A key that has the prefix of its owner, and the name of the attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, keys: TaskKeys | TableKeys | WeightKeys, owner: type) -> str:
        name = vars(keys)[self._name] = f"{keys.prefix}{self._name}"  # found there from now on
        return name


@dataclass(frozen=True)
class TaskKeys:
    """Keys of one task.

    Scripts get `stream` and derive the others from its prefix, since consumer groups and waiters
    come and go.
    """

    prefix: str

    @classmethod
    def of(cls, namespace: str, task: str) -> TaskKeys:
        """Return the keys of `task` in `namespace`; TABLE:TASK is a task that claims rows."""
        check_name("namespace", namespace)
        table, claims, name = task.partition(":") if isinstance(task, str) else ("", "", task)
        check_name("task", name if claims else task)
        if claims:
            return cls(f"{TableKeys.of(namespace, table).prefix}claims:{name}:")
        return cls(f"redrb:{{{_placed(f'{namespace}:{task}')}}}:")

    @classmethod
    def in_any_namespace(cls, task: str) -> str:
        """Return the pattern of the keys `task` of a task, or a table, in all namespaces."""
        return f"redrb:{{*:{check_name('task', task)}}}:task"

    @property
    def namespace(self) -> str:
        """Namespace of the task."""
        return self.prefix.removeprefix("redrb:{").partition(":")[0]

    stream = _Key()
    """The groups themselves."""

    task = _Key()
    """Settings and counters."""

    puts = _Key()
    """Counters of all puts, and the last operation of each producer."""

    dead = _Key()
    """The dead-letter stream."""

    groups = _Key()
    """The names of the consumer groups."""

    @property
    def contents(self) -> tuple[str, ...]:
        """Keys of which a task that was used has one at least, besides its settings."""
        return (self.stream, f"{self.prefix}facts", self.groups, self.dead)

    part_blobs = _Key()
    """The encoded parts of groups that are not complete."""

    changes = _Key()
    """The newest changes of settings, newest first."""

    removed = _Key()
    """Who removed the task last, for an hour."""

    refreshed = _Key()
    """The last refresh of staleness of each status, of a task of a `ReplayBuffer`."""

    none = _Key()
    """A key that never exists."""

    def consumers(self, group: str) -> str:
        """Sorted set: the deadlines of the heartbeats of a consumer group's consumers."""
        return f"{self.prefix}consumers:{group}"

    def wake(self, waiter: str) -> str:
        """The list on which `waiter` blocks."""
        return f"{self.prefix}wake:{waiter}"


@dataclass(frozen=True)
class TableKeys:
    """Keys of one table: its index on one node, the values of its rows on all of them.

    Scripts get `stream`, which no table has, and derive the others from its prefix.
    """

    prefix: str

    @classmethod
    def of(cls, namespace: str, table: str) -> TableKeys:
        """Return the keys of `table` in `namespace`."""
        check_name("namespace", namespace)
        check_name("table", table)
        return cls(f"redrb:{{{namespace}:table:{table}}}:")

    @property
    def namespace(self) -> str:
        """Namespace of the table."""
        return self.prefix.removeprefix("redrb:{").partition(":")[0]

    @property
    def table(self) -> str:
        """Name of the table."""
        return self.prefix.removesuffix("}:").rpartition(":")[2]

    stream = _Key()

    task = _Key()
    """Settings and counters."""

    claims = _Key()
    """The tasks that claim rows."""

    keys = _Key()
    """The number of each row, by key."""

    columns = _Key()
    """The number of each column, by name."""

    rows = _Key()
    """The record of each row, by number."""

    cleared = _Key()
    """The numbers of rows that are retained after they were cleared."""

    trash = _Key()
    """Set of the keys of values that are to be deleted."""

    def value(self, bucket: int, token: str, place: int) -> str:
        """What one put has stored of one row."""
        return f"{self.prefix[:-2]}:{bucket}}}:{token}:{place}"

    def wake(self, waiter: str) -> str:
        """The list on which `waiter` blocks."""
        return f"{self.prefix}wake:{waiter}"

    @property
    def values(self) -> str:
        """Pattern of the keys of all values."""
        return f"{self.prefix.removesuffix('}:')}:[0-9]*}}:*"


BUCKETS = 64
"""Groups of a table's rows; the values of a group lie on one node of a cluster."""


def bucket_of(row: bytes) -> int:
    """Return the number of a row's group: the sum by which a cluster finds slots, mod 64."""
    return crc_hqx(row, 0) % BUCKETS


@dataclass(frozen=True)
class WeightKeys:
    """Keys of one published model.

    Scripts get `versions` and derive the fence and the chunks from its prefix.
    """

    prefix: str

    @classmethod
    def of(cls, namespace: str, name: str) -> WeightKeys:
        """Return the keys of the weights `name` in `namespace`."""
        check_name("namespace", namespace)
        check_name("weights", name)
        return cls(f"redrb:{{{namespace}:weights:{name}}}:")

    @classmethod
    def in_any_namespace(cls, name: str) -> str:
        """Return the pattern of the keys `versions` of the weights `name` in all namespaces."""
        return f"redrb:{{*:weights:{check_name('weights', name)}}}:versions"

    versions = _Key()
    """Stream of committed versions, whose ids are `<version>-0`."""

    manifests = _Key()
    """Hash of the manifests of all versions."""

    attempts = _Key()
    """Hash of the attempts whose keys are permanent, and that are not committed yet."""

    trash = _Key()
    """Set of ranges of keys that are to be deleted."""

    asked = _Key()
    """Stream whose one entry is the damaged version for which a reader wants another one."""

    followers = _Key()
    """Set of the streams of tasks that follow the newest version."""

    def chunk(self, token: int, index: int, spread: int = 0) -> str:
        """One chunk of a state, as the attempt with `token` wrote it.

        With `spread` the keys have that many different hash tags, so that all nodes of a cluster
        share them.
        """
        return f"{self._part(index, spread)}chunk:{token}:{index}"

    def delta(self, token: int, number: int, spread: int = 0) -> str:
        """One piece of a delta, as the attempt with `token` wrote it."""
        return f"{self._part(number, spread)}delta:{token}:{number}"

    def _part(self, number: int, spread: int) -> str:
        if not spread:
            return self.prefix
        return f"{self.prefix.removesuffix('}:')}:{number % spread}}}:"
