"""`Announcement`: what a worker says of itself, the last time with its end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from redrb.errors import StoreError
from redrb.forks import in_child
from redrb.stream.task.calls import Announce
from redrb.stream.task.task import Task

Role: TypeAlias = Literal["maker", "trainer", "stage"]
"""What a worker does with a task: it puts, takes, or does both."""

WaitsFor: TypeAlias = Literal["", "batch", "room", "right", "weights", "engine"]
"""What a worker waits for: a full batch, room in the task, the right to begin groups, weights, an
inference server that is away."""

_log = logging.getLogger("redrb")
MOST_BYTES = 2048
"""Most bytes of an announcement; metrics, then fault, then engine are left out of a larger one."""

MOST_METRICS = 16
EQUAL_REWARDS = "equal_rewards"
"""Metric of trainers: steps until now in each of which all samples had the same reward."""

MOST_NAME = 64
MOST_ADDRESS = 256
MOST_FAULT = 200
_LARGEST = sys.float_info.max

Name: TypeAlias = Annotated[str, Meta(max_length=128)]

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]

Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=_LARGEST)]

Figure: TypeAlias = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a worker says of itself; anything else is refused by those who read it.

    Attributes:
        label: Name that its owner gave it, such as "maker-1"; "": none.
        program: Module of `python -m`, or file name, of its program, such as "train.py".
        period_s: Seconds between two announcements.
        lease_s: Seconds without one after which its leases are taken over.
        weight_version: Newest weight version that it uses (maker) or published (trainer); 0: none.
        groups: Groups that it has put, or acknowledged, since it began.
        filtered: Groups that it has filtered since the last one that it has put.
        fault: Why the last group was filtered; "": not known, as by a filter of the user.
        leased: Groups that it leases.
        rights: Rights to begin groups that it holds.
        waits_s: Seconds for which it has waited.
        engine: Address of the inference server that it samples from, cut off if it has
            `MOST_ADDRESS` characters; "": none, or not known.
        step_s: Seconds for which its step has lasted: since it got a batch, or since the step
            before has ended; 0 between two steps.
        usual_step_s: Its longest step of late; 0 before its first one has ended.
        step_limit_s: Seconds after which its owner says that a step hangs; 0: not given.
        steps, steps_s: Steps that have ended, and the seconds that they lasted.
        metrics: Newest figures, such as "reward" and "loss".
        ended: Whether it has ended.
    """

    role: Role
    label: Name = ""
    host: Name = ""
    pid: Count = 0
    program: Name = ""
    redrb: Name = ""
    period_s: Seconds = 0.0
    lease_s: Seconds = 0.0
    uptime_s: Seconds = 0.0
    weights_name: Name = ""
    weight_version: Count = 0
    groups: Count = 0
    samples: Count = 0
    filtered: Count = 0
    fault: Annotated[str, Meta(max_length=MOST_FAULT)] = ""
    leased: Count = 0
    rights: Count = 0
    waits_for: WaitsFor = ""
    waits_s: Seconds = 0.0
    engine: Annotated[str, Meta(max_length=MOST_ADDRESS)] = ""
    step_s: Seconds = 0.0
    usual_step_s: Seconds = 0.0
    step_limit_s: Seconds = 0.0
    steps: Count = 0
    steps_s: Seconds = 0.0
    metrics: Annotated[Mapping[Name, Figure], Meta(max_length=MOST_METRICS)] = field(
        default_factory=dict
    )
    ended: bool = False


class WorkerEnd:
    """The end of a worker, which is announced once, also when the worker itself is gone."""

    def __init__(self, task: Task, name: str) -> None:
        """Note a worker that has announced nothing yet."""
        self._task, self._name = task, name
        self._said: Announcement | None = None
        in_child(self.forget)

    def note(self, said: Announcement) -> None:
        """Note an announcement, after which the end must be announced."""
        self._said = said
        _unended.add(self)

    def forget(self) -> None:
        """Announce no end."""
        self._said = None
        _unended.discard(self)

    def announce(self) -> None:
        """Announce the end, if anything was announced; while Redis is away nothing is said."""
        said = self._said
        self.forget()
        if said is None:
            return
        said = replace(said, leased=0, rights=0, waits_for="", waits_s=0.0, step_s=0.0, ended=True)
        try:
            self._task.store.call(Announce(self._name, ended=True), packed(said))
        except StoreError as error:  # those who look see it fall silent
            _log.debug("task %r: the end of a worker is not announced: %s", self._task.name, error)


_unended: set[WorkerEnd] = set()


def end_unended() -> None:
    """Announce the ends of all workers of this process, which ends."""
    for end in list(_unended):
        end.announce()


def packed(said: Announcement) -> bytes:
    """Return an announcement in at most `MOST_BYTES`: without metrics, fault, engine if need be."""
    given: dict[str, Any]
    for given in ({"metrics": {}}, {"fault": ""}, {"engine": ""}):
        packed = msgspec.msgpack.encode(said)
        if len(packed) <= MOST_BYTES:
            return packed
        said = replace(said, **given)
    return msgspec.msgpack.encode(said)
