"""A plugin of pytest: puts redrb in the place of the store that a project's tests import.

A module of its own, since the projects have packages named `tests`, too.
"""

from __future__ import annotations

import os
import sys
import uuid
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

import redrb
from redrb.compat.transfer_queue import guard, install
from redrb.compat.transfer_queue.process import is_installed
from redrb.compat.transfer_queue.queue import Queue


class Controller(guard.Guard):
    """The actor of a run, with what TransferQueue's tests ask its controller."""

    def __init__(self, run: str, where: str) -> None:
        super().__init__(run, where)
        self._queue = Queue(redrb.connect(), os.environ["REDRB_NAMESPACE"], None)

    def list_partitions(self) -> list[str]:
        return self._queue.names()

    def clear_partition(self, partition_id: str) -> None:
        self._queue.partition(partition_id).table.clear()

    def get_partition_snapshot(self, partition_id: str) -> SimpleNamespace | None:
        partition = self._queue.known(partition_id)
        if partition is None:
            return None
        rows = partition.rows()
        numbers = dict(zip(rows, partition.table.numbers(list(rows)), strict=True))
        columns = partition.table.columns(list(rows))
        names = sorted({name for found in columns for name in found or {}})
        produced = torch.zeros(max(numbers.values(), default=0) + 1, len(names), dtype=torch.int8)
        for number, found in zip(numbers.values(), columns, strict=True):
            for name in found or {}:
                produced[number, names.index(name)] = 1
        return SimpleNamespace(
            keys_mapping=numbers,
            global_indexes=set(numbers.values()),
            custom_meta={numbers[key]: tags for key, tags in rows.items()},
            field_name_mapping={name: place for place, name in enumerate(names)},
            production_status=produced,
        )


install()
guard.Guard = Controller  # type: ignore[misc]

if find_spec("nemo_rl"):
    from nemo_rl.data_plane.adapters import noop

    from redrb.compat.nemo_rl import RedrbDataPlaneClient

    def _client(*_: Any) -> RedrbDataPlaneClient:
        return RedrbDataPlaneClient(namespace=uuid.uuid4().hex)

    noop.NoOpDataPlaneClient = _client


def pytest_sessionfinish() -> None:
    """Fail where the tests have put their own store back."""
    assert is_installed(), f"transfer_queue is {sys.modules.get('transfer_queue')}"
