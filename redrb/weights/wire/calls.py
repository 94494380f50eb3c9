"""Calls of the scripts of weights, and what an error of Redis says where a key is not redrb's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

from redrb.connection import Client
from redrb.connection.transport import Argument, Reply
from redrb.errors import StoreDenied, StoreError, StoreUnavailable
from redrb.keys import WeightKeys
from redrb.lua import scripts
from redrb.lua.calls import Call, Page

_TYPES: Final = {
    "versions": b"stream",
    "manifests": b"hash",
    "fence": b"hash",
    "pins": b"hash",
    "attempts": b"hash",
    "loads": b"zset",
    "fulls": b"zset",
    "trash": b"set",
    "followers": b"set",
}


def call(client: Client, keys: WeightKeys, script: str, *arguments: Argument) -> Reply:
    """Run a script of weights on the node that has their keys, or raise StoreError."""
    with foreign_keys_named(client, keys):
        return scripts.run(client, scripts.load(script), [keys.versions], arguments)


@contextmanager
def foreign_keys_named(client: Client, keys: WeightKeys) -> Iterator[None]:
    """Let an error about a key that is not of redrb's type name the key."""
    try:
        yield
    except (StoreUnavailable, StoreDenied):
        raise
    except StoreError as error:
        if "WRONGTYPE" not in str(error):
            raise
        names: dict[str, str] = {}
        for name, kind in _TYPES.items():
            key = f"{keys.prefix}{name}"
            held: bytes = client.execute("TYPE", key)
            if held not in (kind, b"none"):
                names[key] = f"{key} holds a {held.decode()} and not a {kind.decode()}"
        if not names:  # the key was deleted meanwhile
            raise
        raise StoreError(
            f"{' and '.join(names.values())}: another program has written there. Delete it, and "
            f"try again: redis-cli DEL {' '.join(map(repr, names))}"
        ) from error


class Advance(Call[int], frozen=True):
    """Tell a task the newest weight version; returns the one that it knows now, -1 without a task.

    Makers that may begin groups now are woken.
    """

    script: ClassVar = "task/advance"
    version: int


class RemovedPage(Page, frozen=True, kw_only=True):
    """A page of versions that were deleted.

    Attributes:
        token: Last token that was given to an attempt.
        entries: Ids of their entries.
    """

    token: int
    entries: list[str]


class RemoveVersions(Call[RemovedPage], frozen=True):
    """Delete a page of versions, and fence the publisher.

    Attributes:
        name: A new one, which no publisher has; the same for each page.
    """

    script: ClassVar = "weights/remove"
    name: str
