"""The part of a benchmark's round that one process does."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier

from benchmarks.shapes import SHAPES, Shape
from redrb.stream.task.settings import SettingArguments

TIMEOUT_S = 120
"""Longest wait of any side for another."""


@dataclass
class Job:
    """What one producer or one consumer process has to do.

    A side connects and prepares everything that is not measured, then calls `start`; after its last
    group is stored (a producer) or acknowledged (a consumer) it calls `finish`.

    Attributes:
        url: Of the server.
        key: A name that no other round has.
        shape_name: Key of `SHAPES`.
        groups: Groups that this process puts or takes, a multiple of the shape's `put_groups` and
            `take_groups`.
        barrier: Where all sides meet twice before the clock starts: when all are prepared, and when
            the counters of the server have been read.
        settings: Arguments of `redrb.ExperienceStream`, such as the order; only redrb reads them.
        tasks: Tasks among which the groups go in turn; only redrb reads it.
        began_s, ended_s: `time.monotonic()` of `start` and `finish`.
        processor_s: Seconds of this process's processor time from `start` to `finish`.
    """

    url: str
    key: str
    shape_name: str
    groups: int
    barrier: Barrier
    settings: SettingArguments = field(default_factory=SettingArguments)
    tasks: int = 1
    began_s: float = 0.0
    ended_s: float = 0.0
    processor_s: float = 0.0

    @property
    def shape(self) -> Shape:
        """The shape of the samples."""
        return SHAPES[self.shape_name]

    def start(self) -> None:
        """Wait until all sides are ready; what follows is measured."""
        for _ in range(2):
            self.barrier.wait(TIMEOUT_S)
        self.began_s = time.monotonic()
        self.processor_s = -time.process_time()

    def finish(self) -> None:
        """Note that the last group of this process is stored, or acknowledged."""
        self.processor_s += time.process_time()
        self.ended_s = time.monotonic()
