"""`exchanged`: sends requests about several tasks or weights together to each server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from redis.exceptions import ResponseError

from redrb.connection import Client
from redrb.connection.failures import is_missing_script, is_transient
from redrb.connection.transport import Pipeline, Reply, first_error

_MOST_SENT: Final = 200
"""Most tasks or weights whose requests are sent together."""


class Add(Protocol):
    """Adds the commands about one of the things to a pipeline."""

    def __call__(self, pipeline: Pipeline, number: int, *, whole: bool) -> None:
        """Add them; `whole`: a script with its text."""


def exchanged(clients: Sequence[Client], add: Add) -> list[list[Reply]]:
    """Return the replies about each of several things, each of which a client reaches.

    An error that concerns one thing alone, and comes again, takes the place of its reply.

    Raises:
        StoreUnavailable: Redis does not answer.
    """
    found: dict[int, list[Reply]] = {}

    def read(client: Client, numbers: Sequence[int], *, whole: bool) -> None:
        for first in range(0, len(numbers), _MOST_SENT):
            pipeline, ends = Pipeline(), []
            for number in numbers[first : first + _MOST_SENT]:
                add(pipeline, number, whole=whole)
                ends.append(pipeline.commands)
            replies = client.exchange(pipeline)
            error = first_error([each for each in replies if not _is_lasting(each)])
            if error is not None:
                raise error
            begins = [0, *ends]
            for number, begin, end in zip(numbers[first:], begins, ends, strict=False):
                found[number] = replies[begin:end]
        missing = [number for number in numbers if any(map(is_missing_script, found[number]))]
        if missing and not whole:
            read(client, missing, whole=True)

    for client in {id(each): each for each in clients}.values():
        numbers = [number for number, each in enumerate(clients) if each is client]
        client.retrying(lambda client=client, numbers=numbers: read(client, numbers, whole=False))  # type: ignore[misc]
    return [found[number] for number in range(len(clients))]


def _is_lasting(reply: Reply) -> bool:
    return isinstance(reply, ResponseError) and not is_transient(reply)
