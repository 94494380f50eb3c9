"""The frame of every worker: its journal, its connection, its end."""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

import redrb
from redrb.connection import Client
from redrb.errors import (
    AdmissionTimeout,
    BatchTimeout,
    LeaseLost,
    OutcomeUnknown,
    SendFailed,
    StoreFull,
    StoreUnavailable,
    WeightTimeout,
    WrongStep,
)
from redrb.stream.admission import admitter
from redrb.stream.assembly import collector
from redrb.weights.publishing import publisher
from redrb.weights.reading import shared_copy
from tests.chaos import options, payload
from tests.chaos.journal import Journal
from tests.chaos.options import Place

EXPECTED = (
    *(BatchTimeout, LeaseLost, SendFailed, StoreFull, StoreUnavailable),
    *(WeightTimeout, WrongStep, AdmissionTimeout, OutcomeUnknown),
)
"""Errors that faults cause and that a user's loop outlives."""

_THREADS_END_S = 3.0


class Worker:
    """One process that repeats a step until it is asked to end.

    Attributes:
        name: Name of this process; a process that takes its place has another one.
        place: Where the run is.
        journal: Its journal.
        dice: Its choices.
        part: Workers that are asked to end together.
        struck: How often faults meet it, relative to the others.
    """

    part = "others"
    struck = 1

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self.place = place
        self.journal = Journal(place.directory / f"{name}.journal")
        self.dice = random.Random(name)
        self._pause = threading.Event()
        self._end = place.ends(self.part)

    @property
    def ending(self) -> bool:
        """Whether this worker was asked to end."""
        return self._end.exists()

    def pause(self, seconds: float) -> None:
        self._pause.wait(seconds)

    def open(self, client: Client) -> None:
        """Open what the steps use."""
        raise NotImplementedError

    def step(self) -> None:
        """Do one step; errors of `EXPECTED` do not end the worker."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what `open` opened."""
        raise NotImplementedError

    def stream(self, client: Client, task: str) -> redrb.ExperienceStream:
        """Open a task."""
        with self.journal.call("open", options.RETRY_S):
            return redrb.ExperienceStream(
                client,
                task,
                namespace=options.NAMESPACE,
                lease_ms=options.LEASE_MS,
            )

    def run(self) -> None:
        """Connect, open, step until the end, close."""
        client = self._until_done(self._connect)
        if client is None:
            return
        if self._until_done(lambda: self._opened(client)) is not None:
            while not self.ending:
                with suppress(*EXPECTED):
                    self.step()
            with suppress(*EXPECTED), self.journal.call("close", options.RETRY_S):
                self.close()
        client.close()

    def _connect(self) -> Client:
        with self.journal.call("connect", options.CONNECT_S):
            return redrb.connect(
                self.place.url,
                connect_timeout=options.CONNECT_S,
                retry_s=options.RETRY_S,
                min_replicas=self.place.min_replicas,
            )

    def _opened(self, client: Client) -> bool:
        self.open(client)
        return True

    def _until_done(self, action: Callable[[], Any]) -> Any:
        """Repeat an action that fails because of faults; None if the worker is asked to end."""
        while not self.ending:
            with suppress(*EXPECTED):
                return action()
            self.pause(0.2)
        return None


def serve(make: Callable[[str, Place], Worker], name: str, place: Place) -> None:
    """Run a worker in this process, and write how it ended."""
    os.setpgid(0, 0)
    with (place.directory / f"{name}.log").open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    publisher.CHUNK_BYTES = payload.CHUNK_BYTES
    shared_copy._SHARED_MEMORY = place.shared_memory
    admitter.QUEUE_TTL_MS = collector.GRACE_MS = options.LEASE_MS  # type: ignore[attr-defined]
    before = set(threading.enumerate())
    worker = make(name, place)
    worker.journal.write("start", pid=os.getpid())
    try:
        worker.run()
    except Exception:  # noqa: BLE001 (the checker reports it)
        traceback.print_exc()
        worker.journal.write("crash", trace=traceback.format_exc()[-2000:])
    until = time.monotonic() + _THREADS_END_S
    left = [each for each in threading.enumerate() if each not in before]
    for thread in left:
        thread.join(max(0.0, until - time.monotonic()))
    alive = [thread.name for thread in left if thread.is_alive()]
    worker.journal.write("stop", threads=alive)
