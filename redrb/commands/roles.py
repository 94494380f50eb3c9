"""The rights in Redis that each role of a run needs: commands, and the keys that they may touch.

A rule set has a part for the task's keys and, behind it, selectors: a request is allowed if one of
these parts allows all of it. The commands inside scripts are found in the scripts' text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from redrb.commands.arguments import Role
from redrb.errors import ConfigError
from redrb.keys import TaskKeys, WeightKeys, check_name, registry_key
from redrb.lua.needed_commands import needed_commands, scripts_in
from redrb.stream.mixture.ratio import Ratio

CONNECTING = ("cluster|slots", "info", "select")
"""Commands of new connections; INFO says whether the server would delete keys."""

_RUN_SCRIPTS = ("eval", "evalsha")
_PUT = ("blpop", "exec", "exists", "hdel", "hget", "multi", "wait", "xadd")
_TAKE = ("blpop", "hget", "hmget", "xpending", "xrange", "xreadgroup", "xrevrange", "zscore")
_LOOK = (
    *("exists", "hget", "hmget", "hscan", "lrange", "time", "xlen", "xrange", "xread"),
    *("xinfo|consumers", "xrevrange", "zmscore", "zscore"),
)
_REGISTRY = {
    "maker": ("zadd",),
    "trainer": ("zadd",),
    "observer": ("zlexcount", "zrangebylex"),
    "admin": ("zadd", "zrangebylex", "zrem"),
}
_READ_WEIGHTS = ("exists", "get", "hget", "time", "xrange", "xread", "xrevrange")
_LOOK_AT_WEIGHTS = (*_READ_WEIGHTS, "hscan", "xlen")
_PUBLISH = (
    *("exists", "expire", "get", "hexists", "hget", "persist", "pexpire", "set", "smembers"),
    *("srem", "time", "unlink", "xadd", "xrange", "xread", "xrevrange", "xtrim"),
)

_PUT_SCRIPTS = (
    *scripts_in("put"),
    *scripts_in("parts"),
    *scripts_in("admission"),
    *("task/announce", "task/open", "task/fill", "task/stats"),
)
_LOOK_SCRIPTS = (
    *scripts_in("browse"),
    *scripts_in("doctor"),
    *("task/archived", "task/count", "task/observe", "task/stats", "task/versions"),
)
_ADMIN_ONLY = ("task/clear", "task/configure", "task/drop_group")
_TASK_SCRIPTS = tuple(name for name in scripts_in("task") if name not in _ADMIN_ONLY)
_TAKE_SCRIPTS = (*scripts_in("take"), *scripts_in("ranks"), *scripts_in("mixture"), *_TASK_SCRIPTS)
_ADMIN_SCRIPTS = (
    *scripts_in("browse"),
    *scripts_in("saving"),
    *scripts_in("doctor"),
    *scripts_in("repair"),
    *_ADMIN_ONLY,
    *_PUT_SCRIPTS,
    *_TAKE_SCRIPTS,
)
_READ_WEIGHTS_SCRIPTS = ("weights/follow", "weights/pin", "weights/renew_pin")
_PUBLISH_SCRIPTS = (*(name for name in scripts_in("weights") if name != "weights/remove"),)


@dataclass(frozen=True, slots=True)
class Rules:
    """A part of a user's rights.

    Attributes:
        keys: Patterns of keys, as ACL rules: "~pattern", or "%R~pattern" for reading only.
        commands: Names of commands.
        writes: Whether commands that write stay allowed.
    """

    keys: tuple[str, ...]
    commands: frozenset[str]
    writes: bool = True

    def __str__(self) -> str:
        allowed = [*self.keys, *(f"+{command}" for command in sorted(self.commands))]
        return " ".join(allowed if self.writes else [*allowed, "-@write"])


def rights(
    role: Role,
    task: str | None,
    namespace: str,
    weights: str | None,
    *,
    to: str | None = None,
) -> str:
    """Return the rules of `ACL SETUSER` for a role; they replace all rights that a user had.

    Args:
        role: What the user does.
        task: The task that it does this with; None, for an observer: all tasks and weights of the
            namespace.
        namespace: Namespace of the task and the weights.
        weights: Weights that it reads, or as a trainer or admin publishes; None: none.
        to: Task that it puts into as a maker; None: none.

    Raises:
        ConfigError: A name is not usable, or the role needs a task.
    """
    if task is None:
        if role != "observer" or to is not None:
            raise ConfigError(f"give --task: the role {role} is one for a single task.")
        return _joined([*_namespace_observer(namespace), _registry(role, namespace)])
    keys = TaskKeys.of(namespace, task)
    turn = TaskKeys.of_mixture(namespace, "*", Ratio.of({task: 1}).digest)
    published = None if weights is None else WeightKeys.of(namespace, weights)
    first, *selectors = [*_parts(role, keys, turn, published), _registry(role, namespace)]
    if to is not None:
        selectors += _parts("maker", TaskKeys.of(namespace, to), turn, None)
    return _joined([first, *selectors])


def _joined(rules: Sequence[Rules]) -> str:
    first, *selectors = rules
    parts = [str(first), *(f"({selector})" for selector in selectors)]
    return " ".join(["clearselectors resetkeys resetchannels -@all", *parts])


def _parts(role: Role, keys: TaskKeys, turn: TaskKeys, weights: WeightKeys | None) -> list[Rules]:
    """Return the parts of a role.

    `turn` are the keys with which the waiting takes of a task with partitions take turns.
    """
    if role == "observer":
        return _observer(keys, weights)
    scripts, commands = {
        "maker": (_PUT_SCRIPTS, _PUT),
        # its heartbeat puts groups in parts whose makers have died
        "trainer": ((*_TAKE_SCRIPTS, *_PUT_SCRIPTS), (*_TAKE, *_PUT)),
        "admin": (_ADMIN_SCRIPTS, (*_PUT, *_TAKE, *_LOOK, "smembers")),
    }[role]
    allowed = _commands(scripts, *CONNECTING, *_RUN_SCRIPTS, *commands)
    prefixes = [keys.prefix, keys.partitions] + ([] if role == "maker" else [turn.prefix])
    task = Rules(tuple(f"~{prefix}*" for prefix in prefixes), allowed)
    if weights is None:
        return [task]
    if role == "maker":
        return [task, *_reader(weights)]
    publishing = _commands(_PUBLISH_SCRIPTS, *_RUN_SCRIPTS, *_PUBLISH)
    if role == "admin":  # it deletes chunks that no version has, and must search for them
        publishing |= _commands(["weights/remove"], "scan")
    return [task, Rules(tuple(f"~{name}" for name in _patterns(weights)), publishing)]


def _registry(role: Role, namespace: str) -> Rules:
    """Return the rights to the names of the namespace's tasks and weights."""
    reads = "%R" if role == "observer" else ""
    return Rules((f"{reads}~{registry_key(namespace)}",), frozenset(_REGISTRY[role]))


def _observer(keys: TaskKeys, weights: WeightKeys | None) -> list[Rules]:
    """EVAL counts as writing to its key, so it is allowed apart from the commands in scripts."""
    looking = _commands(_LOOK_SCRIPTS, *CONNECTING, *_LOOK)
    parts = [
        Rules((f"%R~{keys.prefix}*", f"%R~{keys.partitions}*"), looking, writes=False),
        Rules((f"~{keys.stream}", f"~{keys.partitions}stream"), frozenset(_RUN_SCRIPTS)),
    ]
    if weights is not None:
        read = tuple(f"%R~{name}" for name in _patterns(weights))
        parts.append(Rules(read, frozenset(_LOOK_AT_WEIGHTS)))
    return parts


def _namespace_observer(namespace: str) -> list[Rules]:
    """Return the rights to read all tasks and weights of a namespace."""
    place = f"redrb:{{{check_name('namespace', namespace)}:*}}:"
    looking = _commands(_LOOK_SCRIPTS, *CONNECTING, *_LOOK, *_LOOK_AT_WEIGHTS)
    return [
        Rules((f"%R~{place}*",), looking, writes=False),
        Rules((f"~{place}stream",), frozenset(_RUN_SCRIPTS)),
    ]


def _reader(weights: WeightKeys) -> list[Rules]:
    """Return what a subscriber needs: it notes the versions that it reads, and writes no other."""
    notes = (f"~{weights.prefix}{name}" for name in ("followers", "none", "pins"))
    read = (f"%R~{name}" for name in _patterns(weights))
    return [
        Rules((*notes, *read), _commands(_READ_WEIGHTS_SCRIPTS, *_READ_WEIGHTS)),
        Rules((f"~{weights.versions}",), frozenset(_RUN_SCRIPTS)),
    ]


def _patterns(weights: WeightKeys) -> tuple[str, str]:
    """Return the patterns of all keys; on a cluster chunks have further hash tags."""
    return f"{weights.prefix}*", f"{weights.prefix.removesuffix('}:')}:*}}:*"


def _commands(scripts: Iterable[str], *others: str) -> frozenset[str]:
    return frozenset(others).union(*map(needed_commands, scripts))
