"""Checkpoints of a run: a mark in each partition, and a file that names it."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

from redrb.compat.transfer_queue.queue import CREATED, Partition, Queue
from redrb.errors import ConfigError
from redrb.staging import replacing
from redrb.table import Restored
from redrb.table.table import Later

_FILE = "redrb.json"

_log = logging.getLogger("redrb")


def save(queue: Queue, checkpoint_dir: str | Path, **notes: object) -> None:
    """Mark all partitions, and write the file, with further notes of the framework."""
    queue.expect_checkpoints()
    mark = f"checkpoint-{uuid.uuid4().hex}"
    marked = {name: queue.partition(name).table.mark(mark) for name in queue.names()}
    content = {"mark": mark, "namespace": queue.namespace, "partitions": sorted(marked), **notes}
    path = Path(checkpoint_dir) / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(content, indent=2).encode())


def load(
    queue: Queue, checkpoint_dir: str | Path, later: Later, *, exact: Collection[str] = ()
) -> tuple[dict[str, tuple[Partition, Restored]], dict[str, Any]]:
    """Return all partitions to the mark that the file names.

    Returns:
        The partitions with what was done, and the notes that `save` got.

    Args:
        exact: Partitions whose later rows are dropped in any case.
    """
    path = Path(checkpoint_dir) / _FILE
    if not path.exists():
        if (path.parent / "controller_state.pkl").exists():
            raise ConfigError(
                f"{path.parent} was written by TransferQueue, and redrb cannot read it: resume "
                "once more without redrb, or delete the folder to resume without its rows."
            )
        raise FileNotFoundError(f"no checkpoint of redrb: {path} is missing.")
    content = json.loads(path.read_text())
    queue.expect_checkpoints()
    names = {*content["partitions"], *queue.names()}
    marks = {name: queue.partition(name).table.marks() for name in names}
    for name in content["partitions"]:
        if content["mark"] not in marks[name]:
            raise ConfigError(
                f"{path}: partition {name!r} at {queue.where} no longer has this checkpoint, or "
                "never had: Redis keeps the newest two, but none newer than one that was loaded, "
                f"and this one is of namespace {content['namespace']!r}. Resume from a newer one, "
                "or delete the file to resume without its rows."
            )
    loaded: dict[str, tuple[Partition, Restored]] = {}
    for name in sorted(names):
        mark = content["mark"] if name in content["partitions"] else CREATED
        if mark not in marks[name]:  # it is of a run without checkpoints, and stays empty
            continue
        partition = queue.partition(name)
        restored = partition.table.restore(mark, "drop" if name in exact else later)
        loaded[name] = partition, restored
        if max(marks[name].values()) > marks[name][mark]:
            # the newest one was not noted elsewhere: this one must outlive it, and the next save
            partition.table.mark(mark)
        _log.warning(
            "partition %s is at its checkpoint again. Cleared rows that came back: %d; dropped: %d",
            name,
            restored.back,
            restored.dropped,
        )
    return loaded, content
