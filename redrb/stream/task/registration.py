"""Removes the name of a deleted task from the registry of its namespace."""

from __future__ import annotations

from redrb.connection import Client
from redrb.registry import Registry
from redrb.stream.task.store import TaskStore


def forget_name(client: Client, namespace: str, store: TaskStore) -> None:
    """Remove a deleted task's name, unless another process has created the task anew meanwhile."""
    registry = Registry(client, namespace)
    registry.remove("task", store.task)
    if store.client.execute("EXISTS", store.keys.task):
        registry.add("task", store.task)
