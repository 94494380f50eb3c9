"""`redrb-stage`: takes groups from one task, calls a function with them, forwards them to another.

Any number of stages may run; one may start late, end or die at any time.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from redrb.cli.processes.lifetime import end, exit_status, leaving_on_signals
from redrb.connection.deadline import Deadline
from redrb.errors import ConfigError, RedrbError, UnknownTask
from redrb.keys import check_name
from redrb.options import (
    CommandParser,
    Settings,
    add_options,
    flag_of,
    option,
    settings_from,
    url_option,
    variable_of,
)


@dataclass(frozen=True, kw_only=True)
class StageSettings(Settings):
    """Options of a stage."""

    url: str = url_option(
        "where Redis is, e.g. redis://host:6379/0; a password only in the variable"
    )
    namespace: str = option("default", "keeps experiments on one server apart")
    from_: str = option("", "task that groups are taken from")
    to: str = option("", "task that they are forwarded to")
    group: str = option("default", "consumer group of the stage; each gets every group of samples")
    batch: int = option(16, "most groups of a batch", least=1)
    batched: bool = option(
        False, "call the function with a list of groups, which returns a result for each"
    )
    lease_ms: int = option(
        10_000,
        "ms without a heartbeat after which other stages take over this one's leases",
        least=100,
    )
    min_replicas: int = option(
        0, "replicas of Redis that must have received a group before it leaves its task", least=0
    )
    stop_timeout: float = option(
        20.0, "seconds that the stage may spend on Redis after SIGTERM or Ctrl-C", least=0
    )
    threads: int = option(1, "CPU threads of torch", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("from_", "to"):
            if not getattr(self, name):
                raise ConfigError(f"{flag_of(name)} TASK (or {variable_of(name)}) is missing.")
        for name in ("namespace", "from_", "to", "group"):
            check_name(flag_of(name), getattr(self, name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a stage until a signal comes; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        settings = settings_from(options, StageSettings)
        _work(options.function, settings)
    except RedrbError as error:
        print(f"redrb-stage: {error}", file=sys.stderr)
        return exit_status(error)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of its arguments."""
    made = CommandParser(prog="redrb-stage", description=__doc__)
    made.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="function of a group's samples, which returns the samples to forward, or None to "
        "filter the group; a class is made without arguments, and its object is called",
    )
    add_options(made, StageSettings)
    return made


def _work(function: str, settings: StageSettings) -> None:
    with ExitStack() as scope:
        with leaving_on_signals():
            import torch

            import redrb
            from redrb.stream.task.lookup import existing_task
            from redrb.train.stage import Stage

            torch.set_num_threads(settings.threads)
            found = _found(function)
            client = scope.enter_context(
                redrb.connect(settings.url, min_replicas=settings.min_replicas)
            )
            try:
                existing_task(client, settings.from_, namespace=settings.namespace)
            except UnknownTask as error:  # its name may be mistyped
                text = f"redrb-stage: {error} The stage creates it and waits for groups."
                print(text, file=sys.stderr)
            source, target = (
                scope.enter_context(
                    redrb.ExperienceStream(
                        client,
                        task,
                        namespace=settings.namespace,
                        group=settings.group,
                        lease_ms=settings.lease_ms,
                    )
                )
                for task in (settings.from_, settings.to)
            )
            source.worker.role = "stage"
            source.worker.begins()  # a class may load a model for long
            stage = Stage(
                source,
                target,
                found() if isinstance(found, type) else found,
                batch=settings.batch,
                batched=settings.batched,
                stop_timeout=settings.stop_timeout,
            )
        with Deadline(budget=stage.ending), scope.pop_all():
            stage.run()


def _found(name: str) -> Callable[..., Any]:
    """Return the object `MODULE:FUNCTION`; modules in the working directory are found."""
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise ConfigError(f"{name!r} is no function: write MODULE:FUNCTION.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name!r} cannot be imported: {error}.") from error
    if isinstance(found, type):
        try:
            with suppress(ValueError):  # a class of C that does not say
                inspect.signature(found).bind()
        except TypeError as error:
            text = f"{name!r} needs arguments: give a class that is made without any."
            raise ConfigError(text) from error
    if not callable(found):
        raise ConfigError(f"{name!r} is no function: its type is {type(found).__name__}.")
    return found  # type: ignore[no-any-return]


def run() -> NoReturn:
    """Run the command `redrb-stage`."""
    end(main())


if __name__ == "__main__":
    run()
