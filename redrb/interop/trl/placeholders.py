"""`placeholder_prompts`: the dataset of a TRL trainer whose prompts are in a task."""

from __future__ import annotations

from typing import Any

from redrb.checks import checked_int


def placeholder_prompts(groups: int) -> Any:
    """Return a dataset for `train_dataset`: one row stands for one group of a task.

    TRL's trainers need a dataset and count epochs by it. The makers choose the real prompts.

    Args:
        groups: Rows of the dataset.

    Raises:
        ConfigError: `groups` is not a positive int.
    """
    from datasets import Dataset

    rows = checked_int("groups", groups, 1)
    return Dataset.from_dict({"prompt": ["(the prompt is in the task)"] * rows})
