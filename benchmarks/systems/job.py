"""The part of a benchmark's round that one process does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier, Event
from typing import Any

from benchmarks.shapes import SHAPES, Shape

TIMEOUT_S = 120
"""Longest wait of any side for another."""


@dataclass(frozen=True)
class Job:
    """What one producer or one consumer process has to do; made to be sent to a spawned process.

    A side prepares everything that is not measured, then calls `start`; after its last group is
    stored (a producer) or acknowledged (a consumer) it calls `finish`.

    Attributes:
        url: Of the server.
        key: A name that no other round has.
        shape_name: Key of `SHAPES`.
        groups: Groups that this process puts or takes, a multiple of the shape's `put_groups` and
            `take_groups`.
        barrier: Where all sides and the measuring process meet before the clock starts.
        finished: Set by `finish`.
        processor_s: Seconds of processor time from `start` to `finish`, set by `finish`.
        settings: Arguments of `redrb.ExperienceStream`, such as the order; only redrb reads them.
    """

    url: str
    key: str
    shape_name: str
    groups: int
    barrier: Barrier
    finished: Event
    processor_s: Synchronized[float]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        """The shape of the samples."""
        return SHAPES[self.shape_name]

    def start(self) -> None:
        """Wait until all sides are ready; what follows is measured."""
        self.barrier.wait(TIMEOUT_S)
        self.processor_s.value = -time.process_time()

    def finish(self) -> None:
        """Say that the last group of this process is stored, or acknowledged."""
        self.processor_s.value += time.process_time()
        self.finished.set()
