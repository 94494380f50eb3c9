"""How makers learn where weights are: trainers announce it, to makers that they name and to all.

A trainer T puts each announcement into the inbox of every maker M that it names, the stream
`redrb:{namespace:maker:M}:inbox`, and into its own outbox, `redrb:{namespace:trainer:T}:outbox`,
which is for makers that no trainer names. Each box keeps only its newest entry, so a maker that
comes late, or comes back, finds it. Announcing twice does no harm.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from redrb.connection import Client
from redrb.connection.transport import Pipeline, Reply, first_error
from redrb.errors import DecodeError
from redrb.keys import check_name

_BLOCK_S = 5.0  # one blocking read; far below the connection's timeout
_RUN = re.compile(rb"([0-9a-f]{32})?")


@dataclass(frozen=True, slots=True)
class Announcement:
    """Where a trainer's newest weights are.

    Attributes:
        trainer: Name of the trainer.
        full: Version of its newest full update; 0: there was none, wait for it.
        partial: Version of its newest partial update, 0 when there was none after the full one.
        run: Random id of who published the full update, 32 hex digits: when it changes, versions
            may have begun anew, in a Redis that was emptied. "": it did not say.
    """

    trainer: str
    full: int
    partial: int = 0
    run: str = ""


def inbox_of(namespace: str, maker: str) -> str:
    """Return the key of a maker's inbox."""
    check_name("namespace", namespace)
    check_name("maker", maker)
    return f"redrb:{{{namespace}:maker:{maker}}}:inbox"


def outbox_of(namespace: str, trainer: str) -> str:
    """Return the key of a trainer's outbox."""
    check_name("namespace", namespace)
    check_name("trainer", trainer)
    return f"redrb:{{{namespace}:trainer:{trainer}}}:outbox"


def announce(client: Client, boxes: Sequence[str], news: Announcement) -> None:
    """Tell makers where weights are; those that wait wake up.

    Raises:
        StoreUnavailable: Redis stayed away; some may have been told.
    """
    pipelines: dict[Client, Pipeline] = {}  # on a cluster boxes are in several places
    for box in boxes:
        fields = ("trainer", news.trainer, "full", news.full, "partial", news.partial)
        pipeline = pipelines.setdefault(client.at(box), Pipeline())
        pipeline.add(*("XADD", box, "MAXLEN", 1, "*", *fields, "run", news.run))

    def attempt(own: Client, pipeline: Pipeline) -> None:
        error = first_error(own.exchange(pipeline))
        if error is not None:
            raise error

    for own, pipeline in pipelines.items():
        own.retrying(partial(attempt, own, pipeline))


class Box:
    """A reader's side of an inbox or outbox: the newest announcement, or a wait for one."""

    def __init__(self, client: Client, key: str) -> None:
        self._client = client.at(key)
        self._key = key
        self._last = "0-0"

    def newest(self) -> Announcement | None:
        """Return the newest announcement, None where it is the one that was returned last.

        Raises:
            DecodeError: It is damaged; it is passed over from then on.
            StoreUnavailable: Redis stayed away.
        """
        found = self._client.execute("XREVRANGE", self._key, "+", f"({self._last}", "COUNT", 1)
        if not found:
            return None
        entry_id, flat = found[0]
        self._last = entry_id.decode()
        return _parsed(flat)

    def wait(self, seconds: float) -> Announcement | None:
        """Return the next announcement, None when none came in time; never polls.

        Raises:
            DecodeError, StoreUnavailable: As `newest` does.
        """
        deadline = time.monotonic() + seconds
        while (news := self.newest()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            block_ms = max(1, math.ceil(min(left, _BLOCK_S) * 1000))
            self._client.execute(
                "XREAD", "BLOCK", block_ms, "STREAMS", self._key, self._last, retry_s=left
            )
        return news


def _parsed(flat: Reply) -> Announcement:
    fields = {
        name.decode(errors="replace"): value
        for name, value in zip(flat[::2], flat[1::2], strict=True)
    }
    numbers = [fields.get(name, b"") for name in ("full", "partial")]
    trainer, run = (fields.get(name, b"") for name in ("trainer", "run"))
    usable = all(number.isdigit() and len(number) <= 16 for number in numbers)
    if not usable or not _RUN.fullmatch(run):
        raise DecodeError("an inbox or outbox holds something that is no announcement of weights.")
    try:
        name = check_name("trainer", trainer.decode())
        return Announcement(name, int(numbers[0]), int(numbers[1]), run.decode())
    except ValueError as error:
        raise DecodeError(f"an announcement of weights is damaged: {error}") from error
