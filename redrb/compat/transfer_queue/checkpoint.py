"""`save_checkpoint`, `load_checkpoint`: a mark in each partition, and a file that names it."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from redrb import environment
from redrb.checks import check_choice
from redrb.compat.transfer_queue.process import LATER
from redrb.compat.transfer_queue.queue import CREATED, Partition, Queue
from redrb.compat.transfer_queue.session import opened
from redrb.errors import ConfigError
from redrb.staging import replacing
from redrb.table import Restored
from redrb.table.table import Later

_FILE = "redrb.json"
_VALIDATION = "val"
"""verl's partition for validation, whose rows belong to the weights of one moment."""

_IN_FLIGHT = ("pending", "running")
"""Status of a prompt of verl that is being generated."""

_TRAJECTORY = re.compile(r"(.+)_[0-9]+_[0-9]+")
"""Key of a trajectory of verl: that of its prompt, session and index."""

_log = logging.getLogger("redrb")


def save_checkpoint(
    checkpoint_dir: str | Path,
    *,
    include_storage: bool = True,  # noqa: ARG001
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Mark this moment in Redis, and write a file of some hundred bytes that names the mark.

    The rows stay in Redis: those that the run clears from now on are kept until the second
    checkpoint after this one, so `load_checkpoint` can return to the newest two.

    Args:
        checkpoint_dir: A folder, which is made.
        include_storage: Without meaning: the rows are not copied.
        metadata: Kept in the file.

    Raises:
        OSError: The file cannot be written.
        StaleRun: A newer run has begun.
    """
    queue = opened()
    ended = {name: _ended_prompts(queue.partition(name)) for name in queue.names()}
    save(queue, checkpoint_dir, metadata or {}, ended)


def load_checkpoint(checkpoint_dir: str | Path, *, later: Later | None = None) -> None:
    """Return to a checkpoint: rows that were cleared after it are there again.

    Call it in the driver, right after `init`. Trajectories whose prompt is gone are cleared: they
    were trained in the step of the checkpoint, and verl would never sample them. Where later rows
    are dropped, prompts that were generated when the checkpoint was made have the status "running"
    again, so that verl generates them anew.

    Args:
        later: Rows that were put after the checkpoint: "keep", so that finished trajectories are
            trained, or "drop", as TransferQueue does. verl's data loader returns to the checkpoint,
            too, and gives the prompts of rows that are kept once more. Default: the variable
            REDRB_TRANSFER_QUEUE_LATER, or "keep". Those of verl's partition `val` are dropped.

    Raises:
        FileNotFoundError: There is no checkpoint in this folder.
        ConfigError: TransferQueue has written it; or it is older than the newest two, and its rows
            are gone; or `later` is neither.
    """
    chosen = environment.variable(LATER, "keep") if later is None else later
    check_choice(LATER if later is None else "later", chosen, ("keep", "drop"))
    loaded, ended = load(opened(), checkpoint_dir, cast("Later", chosen), exact=[_VALIDATION])
    for name, (partition, restored) in loaded.items():
        if chosen == "drop" or name == _VALIDATION:
            _run_again(partition, ended.get(name, []))
        _say_later(name, partition, restored)
        orphans = _orphans(partition)
        if orphans:
            partition.table.clear(orphans)
            _log.warning(
                "partition %s: %d trajectories without a prompt were cleared", name, len(orphans)
            )


def save(
    queue: Queue,
    checkpoint_dir: str | Path,
    metadata: Mapping[str, Any],
    ended: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Mark all partitions, and write the file.

    Args:
        ended: By partition, prompts whose generation had ended before; kept in the file.
    """
    queue.expect_checkpoints()
    mark = f"checkpoint-{uuid.uuid4().hex}"
    marked = {name: queue.partition(name).table.mark(mark) for name in queue.names()}
    content = {
        "mark": mark,
        "namespace": queue.namespace,
        "partitions": sorted(marked),
        "ended": ended or {},
        "user_metadata": dict(metadata),
    }
    path = Path(checkpoint_dir) / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(content, indent=2).encode())


def load(
    queue: Queue, checkpoint_dir: str | Path, later: Later, *, exact: Collection[str] = ()
) -> tuple[dict[str, tuple[Partition, Restored]], dict[str, list[str]]]:
    """Return all partitions to the mark that the file names.

    Returns:
        The partitions with what was done, and the prompts that had ended, as `save` got them.

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
            # verl did not note the newest checkpoint: this one must outlive it, and the next save
            partition.table.mark(mark)
        _log.warning(
            "partition %s is at its checkpoint again. Cleared rows that came back: %d; dropped: %d",
            name,
            restored.back,
            restored.dropped,
        )
    return loaded, content["ended"]


def _ended_prompts(partition: Partition) -> list[str]:
    """Return the prompts of verl that are not generated any more."""
    rows = partition.rows()
    return [
        key
        for key, tags in rows.items()
        if tags.get("is_prompt") and tags.get("status") not in _IN_FLIGHT
    ]


def _run_again(partition: Partition, ended: Collection[str]) -> None:
    """Give prompts that had not ended at the checkpoint the status that they had: running.

    What was generated of them since is dropped, and tags stay as they were set last. Without it
    verl would train such a prompt on the trajectories that are left, or on none.
    """
    rows = partition.rows()
    again = sorted({*_ended_prompts(partition)} - {*ended})
    if again:
        partition.put(again, {}, [rows[key] | {"status": "running"} for key in again])


def _say_later(name: str, partition: Partition, restored: Restored) -> None:
    """Log how many prompts are trained twice, as their rows are kept, and what dropping costs."""
    rows = partition.rows()
    prompts = [key for key, tags in rows.items() if tags.get("is_prompt")]
    numbers = zip(prompts, partition.table.numbers(prompts), strict=True)
    later = {key for key, number in numbers if number is not None and number > restored.newest}
    if later:
        made = sum(_prompt_of(key) in later for key in rows)
        _log.warning(
            "partition %s: what was put after the checkpoint stays (prompts: %d, trajectories: %d)."
            " verl's data loader gives these prompts once more, so they are trained "
            "twice. %s=drop drops them instead: then these trajectories are generated again",
            name,
            len(later),
            made,
            LATER,
        )


def _orphans(partition: Partition) -> list[str]:
    """Return verl's trajectories without a prompt. Rows of other frameworks have no prompts."""
    rows = partition.rows()
    prompts = {key for key, tags in rows.items() if tags.get("is_prompt")}
    return [
        key
        for key, tags in rows.items()
        if not tags.get("is_prompt")
        and (prompts or "seq_len" in tags)
        and (prompt := _prompt_of(key)) is not None
        and prompt not in prompts
    ]


def _prompt_of(key: str) -> str | None:
    """Return the key of the prompt of a trajectory of verl; None for another row."""
    found = _TRAJECTORY.fullmatch(key)
    return None if found is None else found[1]
