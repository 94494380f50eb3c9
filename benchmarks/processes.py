"""Processes of a benchmark, of which functions are asked for by name."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch

TIMEOUT_S = 180
END_S = 5


class ProcessFailed(Exception):
    """A process of the benchmark failed, or did not answer; its traceback is on stderr."""


class Worker:
    """A spawned process that holds one object, whose methods are called by name.

    Attributes:
        pipe: Becomes readable with each result, and when the process ends.
    """

    def __init__(self, made: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, made, arguments), daemon=True)
        self._process.start()
        other.close()

    def ask(self, name: str, *arguments: Any) -> None:
        """Send a call, whose result `result` waits for.

        Raises:
            ProcessFailed: The process has ended.
        """
        try:
            self.pipe.send((name, arguments))
        except OSError:
            raise ProcessFailed("a process of the benchmark has ended") from None

    def result(self) -> Any:
        """Wait for the result of the oldest call that has not been waited for.

        Raises:
            ProcessFailed: The process failed, or did not answer in time.
        """
        if not self.pipe.poll(TIMEOUT_S):
            raise ProcessFailed("a process of the benchmark did not answer")
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            raise ProcessFailed("a process of the benchmark failed") from None

    def close(self) -> None:
        """Let it end in good order, so that its host cache is cleared."""
        self.pipe.close()

    def end(self) -> None:
        """Wait a moment until it has ended, and kill it then."""
        self._process.join(END_S)
        self._process.kill()
        self._process.join()


def results(workers: Sequence[Worker]) -> list[Any]:
    """Wait for a result of each worker, whichever is first.

    Raises:
        ProcessFailed: One failed, or did not answer in time; the others may still be at work.
    """
    unanswered = {worker.pipe: worker for worker in workers}
    found: dict[Worker, Any] = {}
    while unanswered:
        ready = wait(list(unanswered), TIMEOUT_S)
        if not ready:
            raise ProcessFailed("the processes of the benchmark did not answer")
        for pipe in ready:
            worker = unanswered.pop(cast(Any, pipe))
            found[worker] = worker.result()
    return [found[worker] for worker in workers]


def _serve(pipe: Connection, made: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    served = made(*arguments)
    pipe.send(None)
    while True:
        try:
            name, given = pipe.recv()
        except (EOFError, ConnectionError):
            if hasattr(served, "close"):
                served.close()
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
