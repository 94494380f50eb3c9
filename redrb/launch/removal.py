"""Deletion of a job's keys: the task, the weights, and what its processes keep beside them."""

from __future__ import annotations

from contextlib import suppress

from redrb.connection import Client
from redrb.connection.client import scan
from redrb.errors import ConfigError, UnknownTask
from redrb.keys import registry_key
from redrb.recipe.recipe import Recipe
from redrb.state.alive import task_use
from redrb.stream.task.removal import remove_task
from redrb.weights.inspection.removal import remove_weights


def delete_job(client: Client, recipe: Recipe) -> None:
    """Delete the task and the weights of a job; other keys of its namespace stay.

    Raises:
        TaskInUse: Workers of the job still run.
    """
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
