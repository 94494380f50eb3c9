"""`save_checkpoint`, `load_checkpoint`, and what they do with verl's prompts and trajectories."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from redrb import environment
from redrb.checks import check_choice
from redrb.compat.transfer_queue.checkpoint import load, save
from redrb.compat.transfer_queue.process import LATER
from redrb.compat.transfer_queue.queue import Partition
from redrb.compat.transfer_queue.session import opened
from redrb.table import Restored
from redrb.table.table import Later

_VALIDATION = "val"
"""Partition for validation, whose rows belong to the weights of one moment."""

_IN_FLIGHT = ("pending", "running")
"""Status of a prompt that is being generated."""

_TRAJECTORY = re.compile(r"(.+)_[0-9]+_[0-9]+")
"""Key of a trajectory: that of its prompt, session and index."""

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
    save(queue, checkpoint_dir, user_metadata=dict(metadata or {}), ended=ended)


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
    loaded, notes = load(opened(), checkpoint_dir, cast("Later", chosen), exact=[_VALIDATION])
    for name, (partition, restored) in loaded.items():
        if chosen == "drop" or name == _VALIDATION:
            _run_again(partition, notes.get("ended", {}).get(name, []))
        _say_later(name, partition, restored)
        orphans = _orphans(partition)
        if orphans:
            partition.table.clear(orphans)
            _log.warning(
                "partition %s: %d trajectories without a prompt were cleared", name, len(orphans)
            )


def _ended_prompts(partition: Partition) -> list[str]:
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
    found = _TRAJECTORY.fullmatch(key)
    return None if found is None else found[1]
