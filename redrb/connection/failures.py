"""Maps redis-py's exceptions to redrb's errors; nothing else does."""

from __future__ import annotations

import re
from collections.abc import Sequence

import redis.exceptions as upstream

from redrb.connection.deadline import here
from redrb.errors import (
    RedrbError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnsupportedServer,
)

_DENIED = (
    upstream.AuthenticationError,
    upstream.AuthenticationWrongNumberOfArgsError,
    upstream.AuthorizationError,
    upstream.NoPermissionError,
)
_NOT_LOGGED_IN = (
    upstream.AuthenticationError,
    upstream.AuthenticationWrongNumberOfArgsError,
)
_UNREACHABLE = (upstream.ConnectionError, upstream.TimeoutError)
_MOVING = (upstream.AskError, upstream.TryAgainError)  # MOVED too, when it leads nowhere
_NOT_NOW = (
    *_MOVING,
    upstream.ClusterDownError,  # MASTERDOWN too
    upstream.ReadOnlyError,
)
_BUSY = "BUSY "
_NOT_NOW_CODES = (_BUSY, "NOREPLICAS", "UNBLOCKED")
_DISCARDED = "Transaction discarded because of: "
_DISCARDED_NOT_NOW = tuple(
    _DISCARDED + code
    for code in ("READONLY ", "LOADING ", "MASTERDOWN ", "CLUSTERDOWN ", "TRYAGAIN ")
)
_DISCARDED_DENIED = _DISCARDED + "NOPERM "
_MISSED_IN_SCRIPT = "ttempted to access a non local key in a cluster node"
_DOWN_IN_SCRIPT = "while the cluster is down"
_ONLY_READS = "this user may only read"
_DENIED_IN_SCRIPT = ("The user executing the script can't ", "ACL failure in script")

_NO_LOGIN = re.compile("NOAUTH|Authentication required|already authenticated")
_SCRIPT_LINE = re.compile(r"user_script: ?(\d+)")
_SCRIPT_SHA = re.compile(r"\b[0-9a-f]{40}\b")
_SCRIPT_PLACE = re.compile(
    r"@?user_script: ?\d+: |,? script: (\w+, )?on @?user_script: ?\d+|,? of script [0-9a-f ]+"
)

_KEY = re.compile(r"redrb:\{[^}]*\}:\S*\Z")
_KEY_BYTES = 300
_MOST_KEYS = 3

_sources: dict[str, tuple[str, ...]] = {}
"""Of each Lua script, by its SHA-1: the file and line of each line that the server knows."""


class NotReplicated(upstream.ConnectionError):
    """A write was done, and fewer replicas than asked for have confirmed it so far."""


def note_script(sha: str, sources: tuple[str, ...]) -> None:
    """Remember where the lines of a script come from, so that its errors name file and line."""
    _sources[sha] = sources


def name_scripts(error: upstream.ResponseError, shas: Sequence[str]) -> None:
    """Add the SHA-1s of the scripts to a script's error: Valkey 9 sends only the line."""
    message = str(error)
    if _SCRIPT_LINE.search(message) and not _SCRIPT_SHA.search(message):
        error.args = (f"{message.rstrip('.')} of script {' '.join(shas)}",)


def name_request(error: upstream.ResponseError, *arguments: bytes) -> None:
    """Add command and keys to the error of a server that refused them: it names no key."""
    command, *words = (word[:_KEY_BYTES].decode("ascii", "replace") for word in arguments)
    keys = [word for word in words if _KEY.match(word) and word not in str(error)]
    if is_denied(error) and keys:
        request = " ".join([command, *keys[:_MOST_KEYS]])
        error.args = (f"{str(error).rstrip('.')}, in the request {request}",)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed a little later."""
    if isinstance(error, upstream.MaxConnectionsError) or is_denied(error):
        return False
    if isinstance(error, (*_UNREACHABLE, *_NOT_NOW)):
        return True
    # an error of a command in a script is a plain ResponseError with the code in its text, and one
    # that discards a transaction at EXEC is an ExecAbortError with the code in its text
    return isinstance(error, upstream.ResponseError) and (
        str(error).removeprefix(_DISCARDED).startswith(_NOT_NOW_CODES)
        or str(error).startswith(_DISCARDED_NOT_NOW)
        or "-READONLY " in str(error)
        or is_disk_full(error)
        or _DOWN_IN_SCRIPT in str(error)
        or is_moving(error)
    )


def is_denied(error: BaseException) -> bool:
    """Return whether the server refused the login, or a command of this user, also in a script."""
    return isinstance(error, _DENIED) or (
        isinstance(error, upstream.ResponseError)
        and any(phrase in str(error) for phrase in (*_DENIED_IN_SCRIPT, _DISCARDED_DENIED))
    )


def is_moving(error: BaseException) -> bool:
    """Return whether keys were not found because their slot moves to another node."""
    return isinstance(error, _MOVING) or (
        isinstance(error, upstream.ResponseError) and _MISSED_IN_SCRIPT in str(error)
    )


def may_have_landed(error: BaseException) -> bool:
    """Return whether the server may have done the request before the connection broke."""
    return isinstance(error, _UNREACHABLE) and " connecting to " not in str(error)


def is_cut_off(error: BaseException) -> bool:
    """Return whether an open connection ended, or stayed silent, where a reply was due."""
    # subclasses are errors that the server answered, such as LOADING
    return type(error) in _UNREACHABLE and may_have_landed(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the server refused a write because it is at its memory limit."""
    return isinstance(error, upstream.OutOfMemoryError) or (
        isinstance(error, upstream.ResponseError) and "OOM command not allowed" in str(error)
    )


def is_disk_full(error: BaseException) -> bool:
    """Return whether the server refused a write because it cannot write its data to its disk."""
    return isinstance(error, upstream.ResponseError) and "MISCONF " in str(error)


def is_missing_script(error: BaseException) -> bool:
    """Return whether the server does not have the script, as after a restart or failover."""
    return isinstance(error, upstream.NoScriptError)


def translate(error: upstream.RedisError, where: str) -> RedrbError:
    """Return redrb's error for an exception of redis-py."""
    reply = _first_line(error)
    if isinstance(error, upstream.AuthenticationError) and _NO_LOGIN.search(reply):
        return StoreDenied(
            f"the password is missing: Redis at {where} asks for user and password, and the URL "
            "has none. Write redis://user:password@host:6379/0 (:password@ for the default user), "
            "best in the variable REDRB_URL."
        )
    if is_denied(error):
        if _ONLY_READS in reply:
            return StoreDenied(
                f"Redis at {where} refused a change: {reply}. Give the URL of a user with more "
                "permissions: `redrb acl --role admin` prints those that every change needs."
            )
        if not isinstance(error, _NOT_LOGGED_IN):
            return StoreDenied(
                f"Redis at {where} refused access: {reply}. The login is right, and this user "
                "lacks the permission. Give the URL of a user whose role has it: an observer "
                "looks, an admin changes everything, and `redrb acl --role ROLE` prints what a "
                "role needs."
            )
        return StoreDenied(
            f"Redis at {where} refused access: {reply}. Check user and password in the URL "
            "(or REDRB_URL), and that this user may run scripts and use keys `redrb:*`: "
            "`redrb acl` prints the permissions that it needs."
        )
    if is_out_of_memory(error):
        return StoreFull(
            f"Redis at {where} is at its memory limit: raise maxmemory, or let trainers catch up.",
            reason="memory",
        )
    if isinstance(error, upstream.InvalidResponse):
        return UnsupportedServer(
            f"the server at {where} does not speak Redis' protocol: check host and port; a port "
            "that expects TLS needs rediss://."
        )
    if is_moving(error):
        return StoreUnavailable(
            f"Redis at {where} is moving the keys from one node of the cluster to another and has "
            f"not finished in time: {reply}. Look at `redis-cli --cluster check`, and raise "
            "retry_s if slots are that large.",
            where=where,
        )
    if isinstance(error, NotReplicated):
        return StoreUnavailable(
            f"Redis at {where} has stored the put, but {reply}. If the primary fails now, the put "
            "may be lost: look at `redis-cli info replication`, or lower min_replicas. The same "
            "groups put again are stored twice; parts of groups count once.",
            where=where,
            uncertain=True,
        )
    if str(error).removeprefix(_DISCARDED).startswith(_BUSY):
        return StoreUnavailable(
            f"Redis at {where} is busy with a script that has not ended: {reply}. `redis-cli "
            "SCRIPT KILL` ends it if it has not written yet; if it has, only `redis-cli "
            "SHUTDOWN NOSAVE` does, which loses what is not on disk. Then `redrb doctor` tells "
            "whether data is damaged. The server answers so while one script takes longer than its "
            "busy-reply-threshold.",
            where=where,
        )
    if is_disk_full(error):
        return StoreUnavailable(
            f"Redis at {where} takes no writes, because its disk is full or not writable: {reply}. "
            "Make room on the disk of its data: it takes writes again within a second.",
            where=where,
        )
    if isinstance(error, upstream.ReadOnlyError) or "-READONLY " in str(error):
        return StoreUnavailable(
            f"Redis at {where} is a replica, which takes no writes: {reply}. After a failover give "
            "the URL of the primary, or one of Sentinel (redis+sentinel://...), which finds it.",
            where=where,
        )
    if is_transient(error):
        budget = here().budget
        if budget is not None and not budget.left_s:
            text = f"had not answered when the time to end (stop_timeout) was up: {reply}."
        else:
            text = f"is not reachable: {reply}. {_check_of(where)}"
        return StoreUnavailable(
            f"Redis at {where} {text}",
            where=where,
            uncertain=may_have_landed(error),
        )
    return StoreError(f"Redis at {where} answered with an error: {reply}")


def _check_of(where: str) -> str:
    """Return what to check where no server answers."""
    if where.startswith("unix://"):
        return (
            "Check that the server runs: that of `redrb run` ends with its run, and `redrb server "
            "DIRECTORY`, with the directory of the socket, starts it again with its data."
        )
    return "Check that the server runs there (`redis-cli ping`), and that no firewall is between."


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return _with_source(lines[0].rstrip(".")) if lines else type(error).__name__


def _with_source(message: str) -> str:
    """Name the file and line where a script failed, in place of its SHA-1 and line."""
    line = _SCRIPT_LINE.search(message)
    if line is None:
        return message
    sources = [_sources.get(sha, ()) for sha in _SCRIPT_SHA.findall(message)]
    places = [lines[int(line[1]) - 1] for lines in sources if 1 <= int(line[1]) <= len(lines)]
    return f"{_SCRIPT_PLACE.sub('', message)} (at {' or '.join(places)})" if places else message
