"""Waits for a wake-up on any of several lists, on the nodes of a cluster at once."""

from __future__ import annotations

import selectors
import uuid
from collections.abc import Iterable

from redis.exceptions import RedisError

from redrb.connection import Client
from redrb.connection.client import Sent
from redrb.connection.deadline import GRACE_S, Deadline, here
from redrb.connection.failures import is_transient
from redrb.connection.transport import Pipeline
from redrb.errors import StoreError

_SHORTEST_BLOCK_S = 0.001
"""Smallest timeout of BLPOP; 0 would block for ever."""

_WAKE_MS = 10_000
"""A wake-up that nobody reads is forgotten."""


def wait_for_any(lists: Iterable[tuple[Client, str]], longest_s: float | None = None) -> bool:
    """Block until one of the lists, each on its client's node, has a wake-up.

    On one server this is one request on one connection. On a cluster each list has one, since a
    request must not name keys of different slots. The wait ends with the call, after `longest_s`
    seconds (default: `SLICE_S`), and when a connection breaks.

    Returns:
        Whether the waiter should look again: False if only the time is over.
    """
    seconds = max(here().slice_s(longest_s), _SHORTEST_BLOCK_S)
    wakes: dict[Client, list[str]] = {}
    for client, name in lists:
        wakes.setdefault(client, []).append(name)
    try:
        with Deadline(seconds, blocks_s=seconds):
            if len(wakes) > 1:
                return _race(wakes, seconds)
            [(client, names)] = wakes.items()
            return client.once("BLPOP", *names, f"{seconds:.3f}") is not None
    except RedisError as error:
        if not is_transient(error):
            raise StoreError(f"waiting on {next(iter(wakes)).where} failed: {error}") from error
        # the waiter looks again, and that request is repeated until Redis is back
    return True


def _race(wakes: dict[Client, list[str]], seconds: float) -> bool:
    """Block on several connections until the first reply, then end the other requests."""
    sent: dict[Client, Sent] = {}
    # a list that nobody uses again: a wake-up that comes too late wakes nobody
    end = uuid.uuid4().hex
    ends = {client: f"{names[0]}:{end}" for client, names in wakes.items()}
    try:
        with selectors.DefaultSelector() as selector:
            for client, names in wakes.items():
                pipeline = Pipeline()
                pipeline.add("BLPOP", *names, ends[client], f"{seconds:.3f}")
                sent[client] = client.begin(pipeline)
                selector.register(sent[client].fileno(), selectors.EVENT_READ, client)
            answered = [key.data for key, _ in selector.select(seconds + GRACE_S)]
        for client in answered:
            sent.pop(client).replies()
        _end(sent, ends)
        return bool(answered)
    finally:
        for one in sent.values():
            one.drop()


def _end(sent: dict[Client, Sent], ends: dict[Client, str]) -> None:
    """Let requests that still block return, so that their connections can be used again."""
    ended = {}
    for client in sent:
        pipeline = Pipeline()
        pipeline.add("RPUSH", ends[client], "1")
        pipeline.add("PEXPIRE", ends[client], _WAKE_MS)
        ended[client] = client.begin(pipeline)
    try:
        for client in list(ended):
            ended.pop(client).replies()
            sent.pop(client).replies()
    finally:
        for one in ended.values():
            one.drop()
