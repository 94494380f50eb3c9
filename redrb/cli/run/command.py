"""`redrb run`: runs the whole job of a recipe on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from redrb.cli.arguments import Commands, add_flag
from redrb.cli.top import is_live
from redrb.errors import ConfigError
from redrb.options import Settings, add_options, option, settings_from

if TYPE_CHECKING:
    from redrb.cli.run.job import Job
    from redrb.cli.run.run import Run
    from redrb.recipe.command_line import Parsed
    from redrb.watch.state.observer import Observer

HELP = "run the whole job of a recipe on this machine: server, makers and trainer"

DESCRIPTION = (
    "Run the whole job of a recipe on this machine: a server (or that of --url), makers and the "
    "trainer, with the commands that a cluster uses. Processes that die are restarted. Ctrl-C ends "
    "all in order, a second one at once; the next run goes on from there. Exit status: 0 when the "
    "trainer has reached its end, 1 when a process was given up, 2 when an argument or the recipe "
    "is wrong, 130 after Ctrl-C."
)

_OF_THE_RUN = ("worker", "metrics")
"""Settings that a run gives to each of its workers."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings(Settings):
    """The options of `redrb run` beside the settings of its recipe."""

    makers: int = option(2, "maker processes", least=1)
    out: str = option(
        "",
        "folder for metrics, logs, checkpoints, and the data of a Redis that is started "
        "here; default: runs/ and the recipe's class in lower case",
    )
    restarts: int = option(
        4,
        "restarts of a process, one after another, that ends within a minute each time; then it is "
        "given up",
        least=0,
    )
    on: str = option(
        "",
        "run the workers on a Ray cluster: ray://HOST:10001, HOST:6379, or auto on one of its "
        "nodes; --url names a Redis that all nodes reach",
    )
    gpus_per_maker: float = option(0.0, "with --on: GPUs of each maker", least=0)
    trainer_gpus: float = option(
        -1.0, "with --on: GPUs of the trainer; -1: 1 if the cluster has any", least=-1
    )
    serve: str = option(
        "",
        "with --on: command of an inference server that each maker starts beside itself, such as "
        "'vllm serve MODEL'; its port and redrb's weight transfer backend are added",
    )


def add_to(commands: Commands) -> None:
    """Add the command's line of help; `main` reads its arguments."""
    commands.add_parser("run", help=HELP, add_help=False)


def main(words: Sequence[str]) -> int:
    """Run the command; its flags are its own and those of the recipe."""
    from redrb.recipe.command_line import parse

    parsed = parse("redrb run", DESCRIPTION, words, extend=_extend)
    settings = settings_from(parsed.options, LaunchSettings)
    from redrb.cli.run.folder import RunFolder
    from redrb.cli.run.run import Run

    folder = RunFolder(Path(settings.out or f"runs/{parsed.recipe.name}"))
    job = job_of(parsed, settings, folder.checkpoints)
    ray = None
    if settings.on:
        from redrb.cli.run.ray_job import RayJob, job_on_ray

        job, brought = job_on_ray(parsed, job)
        ray = RayJob(
            settings.on,
            job,
            folder=brought,
            out=folder.path,
            gpus_per_maker=settings.gpus_per_maker,
            trainer_gpus=settings.trainer_gpus,
            serve=settings.serve,
        )
    options = parsed.options
    return Run(
        job, folder, fresh=options.fresh, as_json=options.json, show=job_screen(), ray=ray
    ).run()


def job_screen() -> Callable[[Run, Observer, str], None] | None:
    """Return the function that shows a run on this terminal; None: it is none."""
    if not is_live():
        return None
    from redrb.cli.run.screen import show_job

    return show_job


def parser() -> argparse.ArgumentParser:
    """Return a parser with the flags that the command has with any recipe."""
    from redrb.recipe.command_line import general_parser

    return general_parser("redrb run", DESCRIPTION, extend=_extend)


def job_of(parsed: Parsed, settings: LaunchSettings, checkpoints: Path) -> Job:
    """Return the job of a command line.

    `checkpoints` is the folder for them, unless the recipe or another source names one.

    Raises:
        ConfigError: A setting is given that the run gives to its workers.
    """
    from redrb.cli.run.job import Job
    from redrb.recipe.settings import settings_of

    options, recipe = vars(parsed.options), parsed.recipe
    given = {name: options[name] for name in settings_of(type(recipe)) if name in options}
    for name in _OF_THE_RUN:
        if name in given:
            raise ConfigError(
                f"--{name} is for one worker: `redrb run` names its workers, and writes the "
                "metrics of each to a file in the folder of --out."
            )
    given.pop("url", None)  # workers get the URL of the server in a variable
    changes = {}
    if parsed.origins["namespace"] == "default":
        changes["namespace"] = recipe.name
    if not (recipe.checkpoints or settings.on):  # other nodes do not have this folder
        changes["checkpoints"] = str(checkpoints)
    elif (
        recipe.checkpoints
        and options["fresh"]
        and any(Path(recipe.checkpoints).rglob("checkpoint-*.pt"))
    ):
        raise ConfigError(
            f"--fresh deletes only what runs make in their folder: the checkpoints in "
            f"{recipe.checkpoints} are from {parsed.origins['checkpoints']}, delete them "
            "yourself."
        )
    return Job(
        title=f"redrb run {parsed.name}",
        name=parsed.name,
        recipe=replace(recipe, **changes),
        given={**given, **changes},
        settings_file=options["settings"] or "",
        makers=settings.makers,
        restarts=settings.restarts,
    )


def _extend(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    add_options(group, LaunchSettings)
    add_flag(
        group,
        "--fresh",
        "begin anew: delete the task, the weights, and what earlier runs made in the folder",
    )
    add_flag(group, "--json", "end with one line of JSON")
