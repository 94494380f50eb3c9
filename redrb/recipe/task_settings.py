"""The settings that workers of a recipe give their task."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from redrb.stream import TaskSettings
from redrb.stream.orders import known_order
from redrb.stream.task.settings import may_give_rights
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import StoredSettings, read_settings
from redrb.train.world import world_size_here

if TYPE_CHECKING:
    from redrb.connection import Client
    from redrb.recipe.recipe import Recipe
_log = logging.getLogger("redrb")


_DEFAULTS = {"limit": "0", "order": "fifo", "max_staleness": "none"}


def settings_of_trainer(client: Client, recipe: Recipe) -> TaskSettings:
    """Return the implied settings of the trainer: they replace those of earlier runs.

    So a run goes on with another limit or batch size. Settings that a user gave with `redrb set`
    stay; a warning names those that differ from the recipe's.
    """
    wanted, stored = _settings(client, recipe)
    if may_give_rights(wanted.as_stored()):
        wanted = replace(wanted, groups_per_version=recipe.groups * world_size_here())
    if stored is not None:
        replaced = stored.implied & wanted.as_stored().keys()
        for name, here, there in _differing(wanted, stored):
            if name not in replaced:
                _log.warning(
                    "task %r has %s=%s, which stays; this run was given %s. To change it: "
                    "redrb set %s %s=%s --namespace %s",
                    recipe.task_name,
                    name,
                    there,
                    here,
                    recipe.task_name,
                    name,
                    here,
                    recipe.namespace,
                )
    return wanted


def settings_of_maker(client: Client, recipe: Recipe) -> TaskSettings:
    """Return the implied settings of a maker: those that the task has, or those of a new task.

    A maker that is started with other flags than the trainer changes nothing: a warning says so.
    """
    wanted, stored = _settings(client, recipe)
    if stored is None:
        return wanted
    for name, here, there in _differing(wanted, stored):
        _log.warning(
            "task %r has %s=%s, and this maker was given %s: the setting of the trainer, or of "
            "`redrb set`, holds",
            recipe.task_name,
            name,
            there,
            here,
        )
    limit, most = stored.values.get("limit"), stored.values.get("max_staleness")
    return TaskSettings(
        limit=None if limit is None else int(limit),
        max_staleness=None if most is None else int(most),
        order=known_order(stored.values.get("order", "")),
    )


def _settings(client: Client, recipe: Recipe) -> tuple[TaskSettings, StoredSettings | None]:
    wanted = TaskSettings(limit=recipe.limit, **recipe.stream_settings)
    return wanted, read_settings(TaskStore.of(client, recipe.namespace, recipe.task_name))


def _differing(wanted: TaskSettings, stored: StoredSettings) -> Iterator[tuple[str, str, str]]:
    given = wanted.as_stored()
    for name, default in _DEFAULTS.items():
        here, there = given.get(name, default), stored.values.get(name, default)
        if here != there:
            yield name, here, there
