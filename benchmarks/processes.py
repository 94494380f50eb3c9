"""Processes of a benchmark, of which functions are asked for by name."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

TIMEOUT_S = 180
END_S = 5


class ProcessFailed(Exception):
    """A process of the benchmark failed, or did not answer; its traceback is on stderr."""


class Worker:
    """A spawned process that holds one object, whose methods are called by name."""

    def __init__(self, made: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, made, arguments), daemon=True)
        self._process.start()
        other.close()

    def ask(self, name: str, *arguments: Any) -> None:
        """Send a call, whose result `result` waits for."""
        self._pipe.send((name, arguments))

    def result(self) -> Any:
        """Wait for the result of the oldest call that has not been waited for.

        Raises:
            ProcessFailed: The process failed, or did not answer in time.
        """
        if not self._pipe.poll(TIMEOUT_S):
            raise ProcessFailed("a process of the benchmark did not answer")
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise ProcessFailed("a process of the benchmark failed") from None

    def close(self) -> None:
        """Let it end in good order, so that its host cache is cleared."""
        self._pipe.close()

    def end(self) -> None:
        """Wait a moment until it has ended, and kill it then."""
        self._process.join(END_S)
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, made: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    served = made(*arguments)
    pipe.send(None)
    while True:
        try:
            name, given = pipe.recv()
        except (EOFError, ConnectionError):
            return
        result = getattr(served, name)(*given)
        with suppress(BrokenPipeError):
            pipe.send(result)


@contextmanager
def started(workers: Sequence[Callable[[], Worker]]) -> Iterator[list[Worker]]:
    """Start processes, wait until all are ready, and end them."""
    running: list[Worker] = []
    try:
        for start in workers:
            running.append(start())
        for worker in running:
            worker.result()
        yield running
    finally:
        for worker in running:
            worker.close()
        for worker in running:
            worker.end()
