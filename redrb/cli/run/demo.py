"""`redrb demo`: a run of the recipe `sorting` that leaves nothing in Redis."""

from __future__ import annotations

import argparse
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from redrb.cli.arguments import Commands, add_flag
from redrb.cli.run.command import LaunchSettings
from redrb.options import Settings, add_options, option, settings_from, url_option

STOP_TIMEOUT_S = 10.0
"""Seconds that a worker of the demo may spend on Redis after SIGTERM."""

HARD_END_S = 20.0
"""Seconds after the trainer's time limit, and without progress, after which the demo ends it."""

_OF_THE_RUN = ("url", "makers", "out")
"""Options of the demo that are no settings of its recipe, or no flags."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings(Settings):
    """The options of `redrb demo`; the workers run with their defaults otherwise."""

    url: str = url_option("use this Redis; default: start an embedded one")
    min_replicas: int = option(
        0, "replicas of Redis that must have received a put before it returns", least=0
    )
    makers: int = option(2, "maker processes", least=1)
    seed: int = option(0, "seed of the run", least=0, most=2**63 - 1)
    max_staleness: int = option(
        2, "most weight versions that a trained group may be behind; -1: no bound", least=-1
    )
    target_reward: float = option(
        0.97, "held-out reward at which the trainer ends; inf: none, it ends after --max-seconds"
    )
    max_seconds: float = option(90.0, "seconds of training after which it ends anyway", above=0)
    out: str = option("demo-run", "directory for the workers' metrics")


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "demo", help="train a small policy with makers and a trainer on this machine"
    )
    add_options(parser, DemoSettings)
    add_flag(parser, "--json", "end with one line of JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from redrb.cli.run.command import job_screen
    from redrb.cli.run.folder import RunFolder
    from redrb.cli.run.job import Job
    from redrb.cli.run.run import Run
    from redrb.recipe.examples.sorting import Sorting

    settings = settings_from(options, DemoSettings)
    given = {name: value for name, value in asdict(settings).items() if name not in _OF_THE_RUN} | {
        "namespace": f"demo-{int(time.time())}-{uuid.uuid4().hex[:8]}",
        "stop_timeout": STOP_TIMEOUT_S,
    }
    job = Job(
        title="redrb demo",
        name="sorting",
        recipe=Sorting(url=settings.url, **given),
        given=given,
        makers=settings.makers,
        restarts=LaunchSettings().restarts,
        inherits=False,  # settings for other runs do not change this one
        most_seconds=settings.max_seconds + HARD_END_S,
        most_silent_s=HARD_END_S,
    )
    folder = RunFolder(Path(settings.out))
    return Run(job, folder, temporary=True, as_json=options.json, show=job_screen()).run()
