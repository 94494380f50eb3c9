"""`redrb-trainer`: takes full batches, trains PPO on them, acknowledges them, publishes weights.

It starts from the newest published weights; the first trainer of a run makes the warm start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn

from redrb.errors import ConfigError, RedrbError
from redrb.options import add_options, settings_from
from workers.ending import end
from workers.metrics_log import MetricsLog
from workers.settings import PPOSettings, RunSettings, TrainerSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Train until the target is reached or a signal comes; returns the exit status."""
    parser = argparse.ArgumentParser(prog="redrb-trainer", description=__doc__)
    add_options(parser, RunSettings, TrainerSettings, PPOSettings)
    options = parser.parse_args(arguments)
    try:
        run = settings_from(options, RunSettings)
        settings = settings_from(options, TrainerSettings)
        ppo = settings_from(options, PPOSettings)
    except ConfigError as error:
        print(f"redrb-trainer: {error}", file=sys.stderr)
        return 2
    try:
        reason = _work(run, settings, ppo)
    except RedrbError as error:
        print(f"redrb-trainer {settings.worker}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"redrb-trainer {settings.worker} ends: {reason}", file=sys.stderr)
    return 0


def _work(run: RunSettings, settings: TrainerSettings, ppo: PPOSettings) -> str:
    """Train, and return why training ended."""
    from redrb.runtime.stopping import leaving_on_signals

    with ExitStack() as scope:
        with leaving_on_signals():
            import torch

            import redrb
            from workers.sorting.trainer import SortingTrainer

            torch.set_num_threads(run.threads)
            client = scope.enter_context(redrb.connect(run.url, min_replicas=run.min_replicas))
            metrics = scope.enter_context(MetricsLog(run.metrics, worker=settings.worker))
            trainer = scope.enter_context(SortingTrainer(client, run, settings, ppo, metrics))
            trainer.begin()
        trainer.work()
        reason = trainer.why_over()
        metrics.write("end", why=reason)
    return reason


def run() -> NoReturn:
    """Run the command `redrb-trainer`."""
    end(main())


if __name__ == "__main__":
    run()
