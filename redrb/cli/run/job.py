"""The job that a run starts: its recipe, and the commands of its workers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redrb.connection import Client
from redrb.connection.client import scan
from redrb.environment import PREFIX, child_environment
from redrb.errors import ConfigError, UnknownTask
from redrb.keys import registry_key
from redrb.options import flag_of, shown, variable_of
from redrb.recipe.recipe import Recipe
from redrb.stream.task.removal import remove_task
from redrb.watch.state.alive import task_use
from redrb.weights.inspection.listing import remove_weights

TRAINER = "trainer"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe with its settings, and how its workers are started.

    Attributes:
        title: The command, for people, such as "redrb run sorting".
        name: The recipe, as workers are to load it.
        given: Settings that workers get as flags; they get the others from the sources that this
            process has: the recipe, a TOML file, variables.
        inherits: Whether workers get this process's variables `REDRB_*`.
        most_seconds: Seconds after which the run ends a trainer that has not ended, once it has
            not got on for `most_silent_s`; None: never.
    """

    title: str
    name: str
    recipe: Recipe
    given: Mapping[str, Any]
    settings_file: str = ""
    makers: int
    restarts: int
    inherits: bool = True
    most_seconds: float | None = None
    most_silent_s: float = 0.0

    @property
    def maker_names(self) -> list[str]:
        """Names of the makers."""
        return [f"maker-{number}" for number in range(1, self.makers + 1)]

    @property
    def workers(self) -> str:
        """Number of workers of each kind, for people."""
        return f"{self.makers} maker{'s' if self.makers > 1 else ''}, 1 trainer"

    def command(self, worker: str, *, trained_s: float = 0.0) -> list[str]:
        """Return the command of a worker, after `python -m`.

        `trained_s` are the seconds for which trainers of this run have trained, for its time limit.
        """
        recipe = self.recipe
        flags = dict(self.given)
        if worker == TRAINER and recipe.max_seconds and trained_s:
            flags["max_seconds"] = max(recipe.max_seconds - trained_s, 0.001)
        flags |= {"worker": worker, "metrics": "-"}
        module = "redrb.cli.processes.trainer" if worker == TRAINER else "redrb.cli.processes.maker"
        file = [f"--settings={self.settings_file}"] if self.settings_file else []
        words = [f"{flag_of(name)}={shown(value)}" for name, value in flags.items()]
        return [module, self.name, *file, *words]

    def environment(self, url: str) -> dict[str, str]:
        """Return the variables of a worker.

        The URL is one of them and no flag: it may have a password.
        """
        without = "" if self.inherits else PREFIX
        return child_environment(without=without, **{variable_of("url"): url})


def delete_job(client: Client, recipe: Recipe) -> None:
    """Delete the task and the weights of a job; raises TaskInUse if its workers still run."""
    namespace, trainer = recipe.namespace, recipe.weights_name
    with suppress(UnknownTask):
        task_use(client, recipe.task_name, namespace=namespace).check(namespace)
        remove_task(client, recipe.task_name, namespace=namespace)
    for name in (trainer, recipe.reference_name):
        with suppress(ConfigError):  # nothing is published under this name
            remove_weights(client, name, namespace=namespace)
    _delete(client, f"redrb:{{{namespace}:trainer:{trainer}}}:*")


def delete_namespace(client: Client, namespace: str) -> None:
    """Delete all keys of a namespace that one run has made for itself."""
    _delete(client, f"redrb:{{{namespace}:*")
    registry = registry_key(namespace)
    client.at(registry).execute("UNLINK", registry)


def _delete(client: Client, pattern: str) -> None:
    for server in client.primaries():
        for key in scan(server, pattern):
            client.at(key).execute("UNLINK", key)
