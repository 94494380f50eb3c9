"""What Redis holds of a run, read without redrb: by the keys and the format that docs/ describe."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field
from typing import Any

import msgpack
import redis

STATUSES = ("init", "completed", "aborted", "expired", "failed", "filtered", "archived")
_PREFIX = struct.Struct("<4sBBHII")
_GROUP = "default"
_RIGHTS = ("granted", "used", "returned", "lost", "late")
_PARTS = ("begun", "completed", "delivered", "dropped", "dead")


@dataclass(frozen=True)
class Look:
    """The ledger of a task at one moment.

    Attributes:
        began, ended: Times between which it was read, of CLOCK_MONOTONIC.
        ledger: put, acked, expired, filtered, evicted, dead, leased, waiting.
        rights: granted, used, returned, lost, late, held, and queued requests.
        parts: Groups in parts: begun, incomplete, completed, delivered, dropped, dead.
    """

    task: str
    began: float
    ended: float
    ledger: dict[str, int]
    rights: dict[str, int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def balanced(self) -> bool:
        """Whether each group that was put is counted once."""
        return self.ledger["put"] == sum(n for name, n in self.ledger.items() if name != "put")


@dataclass(frozen=True)
class Holdings:
    """The groups of a task, by the name that their samples carry.

    Attributes:
        held: Groups that wait or are leased.
        dead: Groups among the dead letters.
        dead_dropped: Dead letters that were deleted.
        uncounted: Entries that neither wait nor are leased.
        torn: What is wrong with entries.
        consumers: Names of consumers that the stream still has.
    """

    held: set[str]
    dead: set[str]
    uncounted: set[str]
    torn: list[str]
    consumers: list[str]
    dead_dropped: int = 0


def prefix(namespace: str, name: str) -> str:
    """Return what all keys of a task begin with."""
    return f"redrb:{{{namespace}:{name}}}:"


def look(client: redis.Redis, namespace: str, task: str) -> Look | None:
    """Read the counters of a task in one transaction; None until trainers have joined it whole.

    A consumer group that joins a task finds its groups a page at a time, so it counts them so, too.
    """
    began, keys = time.monotonic(), prefix(namespace, task)
    pipe = client.pipeline(transaction=True)
    pipe.sismember(f"{keys}groups", _GROUP)
    pipe.exists(f"{keys}joining:{_GROUP}")
    pipe.hgetall(f"{keys}task")
    pipe.hgetall(f"{keys}puts")
    pipe.hgetall(f"{keys}group:{_GROUP}")
    pipe.xinfo_groups(f"{keys}stream")
    for status in STATUSES:
        pipe.zcard(f"{keys}ready:{_pool(status)}")
    pipe.hgetall(f"{keys}admission")
    pipe.zcard(f"{keys}rights")
    pipe.zcard(f"{keys}queue:#admission")
    pipe.hgetall(f"{keys}parts")
    pipe.hlen(f"{keys}part_records")
    joined, joins, *found = pipe.execute(raise_on_error=False)
    settings, puts, group, groups, *waiting, admission, held, queued, parts, incomplete = found
    if not joined or joins or isinstance(groups, Exception):
        return None
    filtered, kept_back, stale = (
        _number(settings, name) for name in ("filtered", "kept_back", "arrived_stale")
    )
    pending = {each["name"].decode(): each["pending"] for each in groups}
    ledger = {
        "put": _number(puts, "put") + filtered + kept_back + _number(group, "put"),
        "acked": _number(group, "acked"),
        "expired": stale + _number(group, "expired"),
        "filtered": filtered + _number(group, "filtered"),
        "evicted": _number(group, "evicted"),
        "dead": _number(group, "dead"),
        "leased": pending.get(_GROUP, 0),
        "waiting": sum(waiting),
    }
    rights = {name: _number(admission, name) for name in _RIGHTS}
    return Look(
        task,
        began,
        time.monotonic(),
        ledger,
        {**rights, "held": held, "queued": queued},
        {**{name: _number(parts, name) for name in _PARTS}, "incomplete": incomplete},
    )


def holdings(client: redis.Redis, keys: str) -> Holdings:
    """Read all groups of a task; nobody may change it meanwhile."""
    torn: list[str] = []
    entries = {_seq(entry): name for entry, name in _names(client, f"{keys}stream", torn).items()}
    dead = _names(client, f"{keys}dead", torn)
    held = set[int]()
    for status in STATUSES:
        waiting: Any = client.zrange(f"{keys}ready:{_pool(status)}", 0, -1)
        held |= set(map(int, waiting))
    pending: Any = client.xpending_range(f"{keys}stream", _GROUP, "-", "+", 100_000)
    held |= {_seq(each["message_id"]) for each in pending}
    torn += [f"id {seq} waits or is leased, and is not stored" for seq in held - entries.keys()]
    consumers = client.xinfo_consumers(f"{keys}stream", _GROUP)
    return Holdings(
        held={name for seq, name in entries.items() if seq in held},
        dead=set(dead.values()),
        uncounted={name for seq, name in entries.items() if seq not in held},
        torn=torn,
        consumers=[each["name"].decode() for each in consumers],
        dead_dropped=int(client.hget(f"{keys}task", "dead_dropped") or 0),
    )


def consumers(client: redis.Redis, namespace: str, task: str) -> set[bytes]:
    """Return a task's consumers, also those that died, until another one has cleared them."""
    found: Any = client.zrange(f"{prefix(namespace, task)}consumers:{_GROUP}", 0, -1)
    return set(found)


def keys_of(client: redis.Redis, namespace: str) -> dict[str, int]:
    """Return all keys of a namespace, and the milliseconds until they expire; -1: never."""
    names = sorted(client.scan_iter(f"redrb:{{{namespace}:*", count=1000))
    return {name.decode(): client.pttl(name) for name in names}


def content(client: redis.Redis, key: str) -> object:
    """Return what a small key holds, for a finding about it."""
    read = {"hash": client.hgetall, "set": client.smembers, "string": client.get}
    kind = client.type(key).decode()
    if kind == "zset":
        return client.zrange(key, 0, 9, withscores=True)
    return read[kind](key) if kind in read else kind


def _names(client: redis.Redis, stream: str, torn: list[str]) -> dict[bytes, str]:
    """Return the name of each entry's group by its id; note groups with samples of others."""
    entries: Any = client.xrange(stream)
    found = dict[bytes, str]()
    for entry_id, fields in entries:
        extras = _extras(fields[b"g"])
        name = extras[0]["group"]
        marks = [(each["group"], each["index"], each["of"]) for each in extras]
        if marks != [(name, index, len(extras)) for index in range(len(extras))]:
            torn.append(f"entry {entry_id.decode()} holds the samples {marks}")
        found[entry_id] = name
    return found


def _extras(blob: bytes) -> list[dict[str, Any]]:
    """Return the extras of a group's samples, from its bytes (docs/reference/wire-format.md)."""
    _, _, _, schema, header, extras = _PREFIX.unpack_from(blob)
    first = _PREFIX.size + schema + header
    found: list[dict[str, Any]] = msgpack.unpackb(blob[first : first + extras])
    return found


def _seq(entry_id: bytes) -> int:
    return int(entry_id.rpartition(b"-")[2])


def _pool(status: str) -> str:
    return _GROUP if status == "completed" else f"{_GROUP}:{status}"


def _number(fields: dict[bytes, bytes], name: str) -> int:
    return int(fields.get(name.encode(), b"0"))
