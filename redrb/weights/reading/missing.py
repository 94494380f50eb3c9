"""`MissingWeights`: logs where weights are that a process waits for in vain."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Final

from redis.exceptions import RedisError

from redrb.connection import Client
from redrb.connection.client import scan
from redrb.connection.deadline import Deadline
from redrb.errors import StoreDenied, StoreError
from redrb.keys import WeightKeys, is_name
from redrb.registry import Registry

LOG_AFTER_S: Final = 10.0
SEARCH_S: Final = 1.0
MOST_NAMESPACES: Final = 10

_NAMESPACE = re.compile(rb"redrb:\{([^:{}]+):weights:.*")

_log = logging.getLogger("redrb")


@contextmanager
def announced_wait(client: Client) -> Iterator[None]:
    """In this block, workers of a client that have begun nothing announce that it waits."""
    with ExitStack() as waiting:
        for worker in list(client.workers):
            waiting.enter_context(worker.awaiting_first_weights())
        yield


class MissingWeights:
    """One wait for the first version of some weights, which is often one in the wrong namespace."""

    def __init__(self, client: Client, namespace: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._began = time.monotonic()
        self._logged = False

    def log(self) -> None:
        """Log the missing weights, once, if the wait lasts longer than `LOG_AFTER_S`."""
        waited_s = time.monotonic() - self._began
        if self._logged or waited_s < LOG_AFTER_S:
            return
        self._logged = True
        _log.warning(
            "waiting for weights %r in namespace %r at %s, for %.0f s now: %s",
            self._name,
            self._namespace,
            self._client.where,
            waited_s,
            self._advice(),
        )

    def _advice(self) -> str:
        pattern = WeightKeys.in_any_namespace(self._name)
        try:
            with Deadline(at_most=SEARCH_S):
                keys = (key for each in self._client.primaries() for key in scan(each, pattern))
                matches = filter(None, map(_NAMESPACE.fullmatch, keys))
                found = {each[1].decode(errors="backslashreplace") for each in matches}
                listed = Registry(self._client, self._namespace).names("weights")
                near = list(islice(filter(is_name, listed), MOST_NAMESPACES))
        except StoreDenied:
            return (
                "no trainer has announced them. Check that a trainer runs, and that it has this "
                "namespace and URL; this user may not search for weights in other namespaces"
            )
        except (RedisError, StoreError) as error:
            return f"no trainer has announced them; other namespaces were not searched: {error}"
        if self._namespace in found:
            return "they are published, and no trainer has announced them. Check that one runs"
        if not found:
            beside = f". This namespace has weights {', '.join(map(repr, near))}" if near else ""
            return (
                "nobody has published weights of this name in any namespace here. Check that the "
                f"trainer runs, and that it has this URL and this name for its weights{beside}"
            )
        names = sorted(found)
        more = f" and {len(names) - MOST_NAMESPACES} others" * (len(names) > MOST_NAMESPACES)
        shown = ", ".join(map(repr, names[:MOST_NAMESPACES])) + more
        return f"nobody has published them there. Namespaces with weights of this name: {shown}"
