"""Calls of the scripts of weights, and what an error of Redis says where a key is not redrb's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from redrb.connection import Client
from redrb.connection.transport import Argument, Reply
from redrb.errors import StoreDenied, StoreError, StoreUnavailable
from redrb.keys import WeightKeys
from redrb.lua import scripts

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


def call(
    client: Client,
    keys: WeightKeys,
    script: str,
    *arguments: Argument,
    retry_s: float | None = None,
) -> Reply:
    """Run a script of weights on the node that has their keys.

    Raises:
        StoreError: Redis refuses it; where a key is not of redrb's type, the message names it.
    """
    with foreign_keys_named(client, keys):
        return scripts.run(
            client, scripts.load(script), [keys.versions], arguments, retry_s=retry_s
        )


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
        raise StoreError(_foreign_keys(client, keys)) from error


def _foreign_keys(client: Client, keys: WeightKeys) -> str:
    found = {f"{keys.prefix}{name}": kind for name, kind in _TYPES.items()}
    held = {key: client.execute("TYPE", key) for key in found}
    wrong = [key for key, kind in found.items() if held[key] not in (kind, b"none")]
    names = " and ".join(
        f"{key} holds a {held[key].decode()} and not a {found[key].decode()}" for key in wrong
    )
    return (
        f"{names or 'a key of these weights had another type just now'}: another program has "
        f"written there. Nothing was changed. Delete it, and publish again: redis-cli DEL "
        f"{' '.join(repr(key) for key in wrong)}"
    )
