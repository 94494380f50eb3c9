"""`redrb-maker`: samples completions with the newest weights, scores them, sends them to the task.

Any number of makers may run; one may start late, end or die at any time.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import uuid
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn

from redrb.errors import ConfigError, RedrbError
from redrb.options import add_options, settings_from
from workers.ending import end
from workers.metrics_log import MetricsLog
from workers.settings import MakerSettings, RolloutSettings, RunSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a maker until its steps are done or a signal comes; returns the exit status."""
    parser = argparse.ArgumentParser(prog="redrb-maker", description=__doc__)
    add_options(parser, RunSettings, MakerSettings, RolloutSettings)
    options = parser.parse_args(arguments)
    try:
        run = settings_from(options, RunSettings)
        settings = settings_from(options, MakerSettings)
        rollout = settings_from(options, RolloutSettings)
    except ConfigError as error:
        print(f"redrb-maker: {error}", file=sys.stderr)
        return 2
    name = settings.worker or _new_name()
    try:
        _work(name, run, settings, rollout)
    except RedrbError as error:
        print(f"redrb-maker {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _work(name: str, run: RunSettings, settings: MakerSettings, rollout: RolloutSettings) -> None:
    from redrb.runtime.stopping import leaving_on_signals

    with ExitStack() as scope:
        with leaving_on_signals():
            import torch

            import redrb
            from workers.sorting.maker import SortingMakerHolder, prompt_batches

            torch.set_num_threads(run.threads)
            client = scope.enter_context(redrb.connect(run.url, min_replicas=run.min_replicas))
            metrics = scope.enter_context(MetricsLog(run.metrics, worker=name))
            generator = torch.Generator().manual_seed(_seed(run.seed, name))
            metrics.write("start")
            maker = SortingMakerHolder(client, name, run, settings, rollout, metrics, generator)
            scope.enter_context(maker)
        maker.workingloop(
            lambda: prompt_batches(generator, settings.prompts, rollout.group_size),
            num_steps=settings.steps,
        )


def _new_name() -> str:
    """Return a unique name: containers repeat host names and process ids."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _seed(seed: int, name: str) -> int:
    """Return a seed for each maker, the same for the same name."""
    return zlib.crc32(f"{seed} {name}".encode())


def run() -> NoReturn:
    """Run the command `redrb-maker`."""
    end(main())


if __name__ == "__main__":
    run()
