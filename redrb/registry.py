"""`Registry`: the names of the tasks, tables and weights of a namespace, in one sorted set."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final, Literal, TypeAlias

from redis.exceptions import RedisError

from redrb.connection import Client
from redrb.connection.client import scan
from redrb.connection.deadline import GRACE_S, Deadline
from redrb.errors import StoreDenied, StoreError, StoreFull, StoreUnavailable
from redrb.keys import REGISTRIES, is_name, registry_key

Kind: TypeAlias = Literal["task", "table", "weights"]

NAMES_OF_A_CALL: Final = 1000

ODD_NAME: Final = "nothing can have this name in the registry: another program entered it"

_SEARCH_S = 1.0
_AGAIN_S = 0.2
_NAMED = 10

_log = logging.getLogger("redrb")


def namespaces(client: Client) -> tuple[str, ...]:
    """Return the namespaces that have names, as far as they are found within a second."""
    found: set[str] = set()
    with suppress(RedisError, StoreError), Deadline(at_most=_SEARCH_S) as deadline:
        for primary in client.primaries():
            for key in scan(primary, REGISTRIES, until=deadline):
                found.add(key.decode(errors="replace").removeprefix("redrb:{").partition("}")[0])
    return tuple(sorted(filter(is_name, found)))


def elsewhere(namespaces: Sequence[str]) -> str:
    """Return what to say where a namespace has nothing; `namespaces` are the others."""
    beyond = len(namespaces) - _NAMED
    more = f" and {beyond:,} more" if beyond > 0 else ""
    named = f": {', '.join(namespaces[:_NAMED])}{more}" if namespaces else ""
    return f"--namespace names another one{named}"


class Registry:
    """The names of the tasks, tables and weights of a namespace.

    On a cluster it is on another node than most tasks, so a name and what it names are not written
    in one step. A process enters a name after it has opened the task or the weights, each time: a
    registry whose data was lost fills again. A name may be there without a task: whoever reads the
    registry looks at the task itself.
    """

    def __init__(self, client: Client, namespace: str) -> None:
        self._key = registry_key(namespace)
        self._client = client.at(self._key)

    def add(self, kind: Kind, name: str) -> None:
        """Enter a name; entering it again changes nothing.

        A user without permission to do this, a server at its memory limit, and a node that is away
        are logged: the task works without its name in the registry.
        """
        self._change("enter", "ZADD", self._key, "NX", 0, f"{kind}:{name}")

    def remove(self, kind: Kind, name: str) -> None:
        """Remove a name; removing it again changes nothing. What fails is logged, as above."""
        self._change("remove", "ZREM", self._key, f"{kind}:{name}")

    def has(self, kind: Kind, name: str) -> bool:
        """Return whether a name is entered."""
        place = f"[{kind}:{name}"
        return bool(self._client.execute("ZRANGEBYLEX", self._key, place, place))

    def names(self, kind: Kind) -> Iterator[str]:
        r"""Yield the names of a kind in alphabetical order; they are read in pages.

        Names that redrb did not enter, which `is_name` refuses, are among them; bytes that are no
        text are shown as `\xff`.
        """
        begin, end = f"[{kind}:".encode(), f"({kind};"  # ";" follows ":"
        while True:
            page = self._client.execute(
                "ZRANGEBYLEX", self._key, begin, end, "LIMIT", 0, NAMES_OF_A_CALL
            )
            for member in page:
                yield member.decode(errors="backslashreplace").removeprefix(f"{kind}:")
            if len(page) < NAMES_OF_A_CALL:
                return
            begin = b"(" + page[-1]

    def count(self, kind: Kind) -> int:
        """Return the number of names of a kind."""
        return int(self._client.execute("ZLEXCOUNT", self._key, f"[{kind}:", f"({kind};"))

    def _change(self, verb: str, *command: str | int) -> None:
        again = self._client.fails  # whoever opens many tasks waits for the node once
        limits = Deadline(at_most=_AGAIN_S, repeat_s=0.0) if again else Deadline(at_most=GRACE_S)
        try:
            with limits:
                self._client.execute(*command)
        except (StoreDenied, StoreFull, StoreUnavailable) as error:
            _log.warning(
                "could not %s %r in the registry, which `redrb ls` reads: %s",
                verb,
                command[-1],
                error,
            )
