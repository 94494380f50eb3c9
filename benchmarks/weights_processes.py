"""Processes for the benchmark of weights: a plain copy over TCP, and readers."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

import redrb
from benchmarks.processes import Worker, started
from benchmarks.weights_state import content_of, large_model, memories, state_bytes

TIMEOUT_S = 120


class Sender:
    """Sends a state over a plain socket, as often as a byte asks for it."""

    def __init__(self, port: int, megabytes: int) -> None:
        self._channel = socket.create_connection(("127.0.0.1", port))
        self._model = large_model(megabytes)
        self._parts = memories(self._model)

    def run(self) -> None:
        while self._channel.recv(1):
            for part in self._parts:
                self._channel.sendall(part)


class TcpCopy:
    """Receives the bytes of a state from another process, over loopback."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def into(self, parts: Sequence[memoryview]) -> None:
        self._channel.sendall(b"!")
        for part in parts:
            while part:
                received = self._channel.recv_into(part)
                if not received:
                    raise SystemExit("the process that sends ended")
                part = part[received:]


@contextmanager
def tcp_copy(megabytes: int) -> Iterator[TcpCopy]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        started([lambda: Worker(Sender, server.getsockname()[1], megabytes)]) as (sender,),
    ):
        channel, _ = server.accept()
        with channel:
            sender.ask("run")
            yield TcpCopy(channel)


class Reader:
    """A maker: a model in memory, and subscribers of it."""

    def __init__(self, url: str, megabytes: int, barrier: Barrier) -> None:
        self._client = redrb.connect(url)
        self._model = large_model(megabytes)
        self._barrier = barrier
        self._subscribers: dict[tuple[str, bool], redrb.WeightSubscriber] = {}

    def _subscriber(self, name: str, *, host_cache: bool) -> redrb.WeightSubscriber:
        key = (name, host_cache)
        if key not in self._subscribers:
            self._subscribers[key] = redrb.WeightSubscriber(
                self._client, name, host_cache=host_cache
            )
        return self._subscribers[key]

    def load(self, name: str, host_cache: bool, together: bool) -> tuple[float, float, float, int]:
        """Load the newest version; without the host cache in place.

        Returns:
            When it began, when it was loaded, when all of it was read, and its hash.
        """
        subscriber = self._subscriber(name, host_cache=host_cache)
        if together:
            self._barrier.wait(TIMEOUT_S)
        began = time.monotonic()
        loaded = subscriber.poll(self._model, in_place=not host_cache)
        ended = time.monotonic()
        if loaded is None:
            raise SystemExit("there was no new version")
        if together:
            self._barrier.wait(TIMEOUT_S)  # a process that reads would delay others that load
        content = content_of(self._model)
        return began, ended, time.monotonic(), content

    def peak(self, name: str, tiny: str) -> tuple[int, int]:
        """Return by how much memory grows during a load in place, and bytes of the model."""
        small = {"tiny": torch.zeros(8)}
        self._subscriber(tiny, host_cache=False).poll(small, in_place=True)
        subscriber = self._subscriber(name, host_cache=False)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        if subscriber.poll(self._model, in_place=True) is None:
            raise SystemExit("there was no new version")
        return _status("VmHWM") - before, state_bytes(self._model)

    def watch(self, name: str, version: int, last: int) -> list[tuple[int, float]]:
        """Wait for versions after `version` up to `last`; returns which came when."""
        subscriber = self._subscriber(name, host_cache=False)
        seen: list[tuple[int, float]] = []
        self._barrier.wait(TIMEOUT_S)
        while version < last:
            version = subscriber.wait(newer_than=version, timeout=TIMEOUT_S).version
            seen.append((version, time.monotonic()))
        return seen


@contextmanager
def readers(url: str, megabytes: int, count: int) -> Iterator[list[Worker]]:
    barrier = multiprocessing.get_context("spawn").Barrier(count)
    with started([lambda: Worker(Reader, url, megabytes, barrier)] * count) as workers:
        yield workers


def _status(field: str) -> int:
    """Return a size in bytes from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")
