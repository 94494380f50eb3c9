"""A worker's process: its recipe and its errors, its end and its status."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NoReturn

from redrb import environment
from redrb.errors import ConfigError, RedrbError, StoreDenied, WeightMismatch

if TYPE_CHECKING:
    from redrb.connection import Client
    from redrb.recipe.recipe import Recipe

WATCHER = "redrb-run-watcher"
"""Name of the thread that waits for the end of `redrb run`; Python may stop it where it is."""

WRONG_CONFIGURATION = 2
"""Exit status of a worker that would fail in the same way if it were started again."""


def run_recipe(
    program: str,
    description: str | None,
    arguments: Sequence[str] | None,
    begin: Callable[[Recipe, Client, ExitStack], Callable[[], str | None]],
    *,
    worker: str,
) -> int:
    """Run a worker of the recipe that a command line names, until it ends or a signal comes.

    Args:
        arguments: The command line without the program; None: that of this process.
        begin: Makes the worker, whose end is left to the stack, and returns its work, a function
            that says why the work is over, if that is to be printed. A signal meanwhile ends the
            process at once.

    Returns:
        The exit status.
    """
    from redrb.recipe.command_line import parse

    words = sys.argv[1:] if arguments is None else arguments
    try:
        recipe: Recipe = parse(program, description, words, worker=worker).recipe
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    try:
        with ExitStack() as scope:
            with leaving_on_signals():
                import torch

                import redrb

                torch.set_num_threads(recipe.threads)
                client = scope.enter_context(
                    redrb.connect(recipe.url, min_replicas=recipe.min_replicas)
                )
                work = begin(recipe, client, scope)
            reason = work()
    except RedrbError as error:
        print(f"{program} {recipe.worker}: {error}", file=sys.stderr)
        return exit_status(error)
    if reason:
        print(f"{program} {recipe.worker} ends: {reason}", file=sys.stderr)
    return 0


def say_begun(program: str, recipe: Recipe, client: Client, how: str = "") -> None:
    """Say on which task a worker begins, unless standard output shows its event `start`."""
    if recipe.metrics != "-":
        task = f"task {recipe.task_name!r} of namespace {recipe.namespace!r} at {client.where}"
        print(f"{program} {recipe.worker} begins: {task}{how}", file=sys.stderr)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """In this block SIGTERM and Ctrl-C end the process with status 0.

    For the start of a process, before it leases or makes anything. Main thread only.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    # an exception would not do: one that is raised during garbage collection is lost
    before = [signal.signal(number, lambda *_: os._exit(0)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def exit_status(error: RedrbError) -> int:
    """Return the exit status of a worker that an error ends: 2 if a restart would not help, else 1.

    A restart changes neither settings, nor the shapes of published weights and of the model, nor
    what the user of Redis may do.
    """
    final = isinstance(error, ConfigError | WeightMismatch | StoreDenied)
    return WRONG_CONFIGURATION if final else 1


def end(status: int) -> NoReturn:
    """End this process with a status, at once if a thread might still run when Python ends.

    A thread that waits for Redis is a daemon, which Python stops wherever it is when the
    interpreter ends. In the middle of C++ code, such as torch's, this would abort the process; so
    would a thread of gloo that still holds a tensor of the last collective
    (https://github.com/pytorch/pytorch/pull/179291), which outlives the process group if a model
    was sharded. What the worker holds is closed by now, so nothing is lost without Python's own
    end.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it would change the status, and nothing else
    ranks = environment.variable("WORLD_SIZE", "1") != "1"
    if ranks or any(each.daemon and each.name != WATCHER for each in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    gc.freeze()  # spares the interpreter's last collection, which takes 0.4 s with torch
    sys.exit(status)
