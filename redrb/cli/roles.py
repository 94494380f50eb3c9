"""The permissions in Redis that each role of a run needs: commands, and the keys they may touch.

A rule set has a part for the task's keys and, behind it, selectors: a request is allowed if one of
these parts allows all of it. The commands inside scripts are found in the scripts' text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from redrb.cli.arguments import Role
from redrb.errors import ConfigError
from redrb.keys import (
    TableKeys,
    TaskKeys,
    WeightKeys,
    check_name,
    consumer_key,
    maker_key,
    reference_weights,
    registry_key,
    replay_key,
    replay_run_key,
    trainer_key,
)
from redrb.lua.scripts import needed_commands, scripts_in

CONNECTING = ("cluster|slots", "info", "select")
"""Commands of new connections; INFO says whether the server would delete keys."""

_MAKERS: Final = ("maker", "episode-maker", "gateway")
_RUN_SCRIPTS = ("eval", "evalsha")
_PUT = "blpop exec exists hdel hget hkeys lrange multi wait xadd".split()
_TAKE = "blpop hget hmget lrange xpending xrange xreadgroup xrevrange zscore".split()
_LOOK = (
    "exists hget hmget hscan lrange time xlen xrange xread xinfo|consumers xrevrange zmscore zscore"
).split()
_REGISTRY = {
    "maker": ("zadd",),
    "episode-maker": ("zadd",),
    "gateway": ("zadd",),
    "trainer": ("zadd",),
    "replay": ("zadd",),
    "observer": ("zlexcount", "zrangebylex"),
    "admin": ("zadd", "zrangebylex", "zrem"),
}
_REPLAY = ("get", "sadd", "set", "sismember", "smembers", "time")
_FETCH_WEIGHTS = ("get", "type", "xrange", "xread", "xrevrange")
_READ_WEIGHTS = (*_FETCH_WEIGHTS, "exists", "hget", "time")
_LOOK_AT_WEIGHTS = (*_READ_WEIGHTS, "hexists", "hscan", "xlen")
_PUBLISH = (
    "exists expire get hexists hget persist pexpire set smembers srem time type unlink xadd xrange "
    "xread xrevrange xtrim"
).split()

_PUT_SCRIPTS = (
    *scripts_in("put"),
    *scripts_in("assembly"),
    *scripts_in("admission"),
    *"task/announce task/open task/fill task/stats".split(),
)
_LOOK_SCRIPTS = (
    *scripts_in("browse"),
    *scripts_in("doctor"),
    *"task/count task/observe task/stats task/versions".split(),
)
_LOOK_AT_TABLE = ("table/produced", "table/stats", "table/tags")
_ROWS = (
    "get getrange hgetall hlen hmget mget mset scard sismember srandmember srem unlink zcard "
    "zrevrange"
).split()
_MADE = (
    "changes claimed:* claims:* columns keys needs:* none parts:* puts queue:* rows stream tags "
    "task trash wake:*"
).split()
"""Keys of a table that puts write: what was cleared, consumed and marked is not among them."""
_ADMIN_ONLY = ("task/clear", "task/configure", "task/drop_group")
_TASK_SCRIPTS = tuple(name for name in scripts_in("task") if name not in _ADMIN_ONLY)
_TAKE_SCRIPTS = (*scripts_in("take"), *scripts_in("ranks"), *_TASK_SCRIPTS)
_ADMIN_SCRIPTS = (
    *scripts_in("browse"),
    *scripts_in("saving"),
    *scripts_in("doctor"),
    *scripts_in("repair"),
    *_ADMIN_ONLY,
    *_PUT_SCRIPTS,
    *_TAKE_SCRIPTS,
)
_FETCH_WEIGHTS_SCRIPTS = ("weights/ask", "weights/pin", "weights/renew_pin")
_READ_WEIGHTS_SCRIPTS = (*_FETCH_WEIGHTS_SCRIPTS, "weights/follow")
_PUBLISH_SCRIPTS = (*(name for name in scripts_in("weights") if name != "weights/remove"),)


def permissions(
    role: Role,
    tasks: Sequence[str],
    namespace: str,
    weights: str | None,
    to: str | None,
    tables: Sequence[str] = (),
) -> str:
    """Return the rules of `ACL SETUSER` for a role; they replace all permissions that a user had.

    Args:
        tasks: The tasks that it does this with; none, for an observer: all tasks and weights of
            the namespace.
        weights: Weights that it reads, or as a trainer or admin publishes; None: none. A
            weight-reader has them alone, without the reference policy.
        to: Task that it puts into as a maker; None: none.
        tables: The tables that it does this with.

    Raises:
        ConfigError: A name is not usable, or the role needs a task, a table or weights.
    """
    if role == "weight-reader":
        if weights is None or tasks or tables or to is not None:
            raise ConfigError("give --weights, and no task or table: a weight-reader reads these.")
        return _joined(_weight_reader(WeightKeys.of(namespace, weights)))
    if not (tasks or tables):
        if role != "observer" or to is not None:
            raise ConfigError(f"give --task or --table: the role {role} is for what these name.")
        return _joined([*_namespace_observer(namespace), _registry(role, namespace)])
    keys = [_task_keys(namespace, task) for task in tasks]
    parts = []
    if keys:
        parts += _observer(keys) if role == "observer" else [_worker(role, keys)]
    for name in tables:
        parts += _table(role, TableKeys.of(namespace, name))
    if weights is not None:
        parts += _weights(role, namespace, weights)
    parts.append(_registry(role, namespace))
    if role == "replay":
        parts.append(
            _rules([f"~{key(namespace)}" for key in (replay_key, replay_run_key)], _REPLAY)
        )
    if to is not None:
        parts.append(_worker("maker", [_task_keys(namespace, to)]))
    return _joined(parts)


def _task_keys(namespace: str, task: str) -> TaskKeys:
    """Return the keys of a task, or the patterns of those of all shards, of "math@*"."""
    name = task.removesuffix("@*")
    keys = TaskKeys.of(namespace, name)
    return keys if name == task else TaskKeys(f"{keys.prefix.removesuffix('}:')}@*}}:")


def _joined(rules: Sequence[str]) -> str:
    first, *selectors = rules
    parts = [first, *(f"({selector})" for selector in selectors)]
    return " ".join(["clearselectors resetkeys resetchannels -@all", *parts])


def _rules(keys: Iterable[str], commands: Iterable[str], *, writes: bool = True) -> str:
    """Return a part of a user's permissions.

    `keys` are patterns as ACL rules: "~pattern", or "%R~pattern" for reading only. Without `writes`
    commands that write are forbidden.
    """
    allowed = [*keys, *(f"+{command}" for command in sorted(set(commands)))]
    return " ".join(allowed if writes else [*allowed, "-@write"])


def _worker(role: Role, tasks: Sequence[TaskKeys]) -> str:
    taking = (*_TAKE_SCRIPTS, *_PUT_SCRIPTS), (*_TAKE, *_PUT)
    scripts, commands = {
        "maker": (_PUT_SCRIPTS, _PUT),
        "episode-maker": taking,  # it takes groups of unfinished samples
        "gateway": ((*_PUT_SCRIPTS, *scripts_in("session")), (*_PUT, "hgetall")),
        # its heartbeat puts groups in parts whose makers have died
        "trainer": taking,
        "replay": ((*taking[0], *scripts_in("saving")), taking[1]),
        "admin": (_ADMIN_SCRIPTS, (*_PUT, *_TAKE, *_LOOK, "smembers")),
    }[role]
    allowed = _commands(scripts, *CONNECTING, *_RUN_SCRIPTS, *commands)
    return _rules([f"~{keys.prefix}*" for keys in tasks], allowed)


def _table(role: Role, table: TableKeys) -> list[str]:
    """Return what a role may do with a table and with the tasks that claim its rows."""
    prefix, values = table.prefix, table.values
    if role == "observer":
        looking = _commands((*_LOOK_SCRIPTS, *_LOOK_AT_TABLE), *CONNECTING, *_LOOK, *_ROWS)
        return [
            _rules([f"%R~{prefix}*", f"%R~{values}"], looking, writes=False),
            _rules([f"~{prefix}stream", f"~{prefix}claims:*:stream"], _RUN_SCRIPTS),
        ]
    if role in _MAKERS:
        makes = (*_LOOK_AT_TABLE, "table/open", "table/put", "table/watch", "task/stats")
        written = [f"~{prefix}{name}" for name in _MADE]
        allowed = _commands(makes, *CONNECTING, *_RUN_SCRIPTS, *_PUT, *_ROWS)
        return [_rules([*written, f"~{values}", f"%R~{prefix}*"], allowed)]
    scripts = (*scripts_in("table"), *_TAKE_SCRIPTS, *_PUT_SCRIPTS)
    allowed = _commands(scripts, *CONNECTING, *_RUN_SCRIPTS, *_PUT, *_TAKE, *_ROWS)
    if role == "admin":  # it searches for values that no row has
        allowed |= _commands(_ADMIN_SCRIPTS, *_LOOK, "object|idletime", "scan", "smembers")
    return [_rules([f"~{prefix}*", f"~{values}"], allowed)]


def _weights(role: Role, namespace: str, weights: str) -> list[str]:
    names = (weights, reference_weights(weights))
    keys = [WeightKeys.of(namespace, name) for name in names]
    stored = [pattern for each in keys for pattern in _patterns(each)]
    versions = tuple(f"~{each.versions}" for each in keys)
    if role == "observer":
        return [
            _rules([f"%R~{name}" for name in stored], _LOOK_AT_WEIGHTS),
            _rules(versions, _RUN_SCRIPTS),
        ]
    posted = (trainer_key(namespace, weights), maker_key(namespace, "+").replace("+", "*"))
    if role in _MAKERS:
        # it notes the versions that it reads or finds damaged, and writes nothing else
        noted = ("asked", "followers", "none", "pins")
        notes = [f"~{each.prefix}{name}" for each in keys for name in noted]
        read = [f"%R~{name}" for name in (*stored, *posted)]
        return [
            _rules([*notes, *read], _commands(_READ_WEIGHTS_SCRIPTS, *_READ_WEIGHTS)),
            _rules(versions, _RUN_SCRIPTS),
        ]
    # `redrb run` shows them, too
    publishing = _commands(_PUBLISH_SCRIPTS, *_RUN_SCRIPTS, *_PUBLISH, *_LOOK_AT_WEIGHTS)
    if role == "admin":  # it deletes chunks that no version has, and must search for them
        publishing |= _commands(["weights/remove"], "scan")
    written = (*stored, *posted, consumer_key(namespace, weights))
    return [_rules([f"~{name}" for name in written], publishing)]


def _weight_reader(keys: WeightKeys) -> list[str]:
    """Return what fetching needs; it notes the versions that it reads or finds damaged."""
    notes = [f"~{keys.prefix}{name}" for name in ("asked", "none", "pins")]
    stored = [f"%R~{pattern}" for pattern in _patterns(keys)]
    return [
        _rules([*notes, *stored], _commands(_FETCH_WEIGHTS_SCRIPTS, *CONNECTING, *_FETCH_WEIGHTS)),
        _rules([f"~{keys.versions}"], _RUN_SCRIPTS),
    ]


def _registry(role: Role, namespace: str) -> str:
    reads = "%R" if role == "observer" else ""
    return _rules([f"{reads}~{registry_key(namespace)}"], _REGISTRY[role])


def _observer(tasks: Sequence[TaskKeys]) -> list[str]:
    """EVAL counts as writing to its key, so it is allowed apart from the commands in scripts."""
    looking = _commands(_LOOK_SCRIPTS, *CONNECTING, *_LOOK)
    return [
        _rules([f"%R~{keys.prefix}*" for keys in tasks], looking, writes=False),
        _rules([f"~{keys.stream}" for keys in tasks], _RUN_SCRIPTS),
    ]


def _namespace_observer(namespace: str) -> list[str]:
    place = f"redrb:{{{check_name('namespace', namespace)}:*}}:"
    scripts = (*_LOOK_SCRIPTS, *_LOOK_AT_TABLE)
    looking = _commands(scripts, *CONNECTING, *_LOOK, *_LOOK_AT_WEIGHTS, *_ROWS)
    claims = f"{TableKeys.of(namespace, '+').prefix.replace('+', '*')}claims:*:stream"
    return [
        _rules([f"%R~{place}*"], looking, writes=False),
        _rules([f"~{place}stream", f"~{place}versions", f"~{claims}"], _RUN_SCRIPTS),
    ]


def _patterns(weights: WeightKeys) -> tuple[str, str]:
    """Return the patterns of all keys; on a cluster chunks have further hash tags."""
    return f"{weights.prefix}*", f"{weights.prefix.removesuffix('}:')}:*}}:*"


def _commands(scripts: Iterable[str], *others: str) -> frozenset[str]:
    return frozenset(others).union(*map(needed_commands, scripts))
