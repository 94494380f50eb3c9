"""Rows of data sets, from files of JSON lines or from Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redrb.checks import require_package
from redrb.errors import ConfigError

FILES = (".jsonl", ".json")
"""Ends of names of files with JSON lines."""


def data_rows(source: str, split: str = "train") -> Sequence[dict[str, Any]]:
    """Return the rows of a data set, dicts by column.

    Args:
        source: A file of JSON lines (`.jsonl`, `.json`); or a name of Hugging Face, or a folder
            that `datasets` can load, with the configuration after a colon: "openai/gsm8k:main".
        split: Split of Hugging Face, such as "train" or "test[:200]"; a file has none.

    Raises:
        ConfigError: The file cannot be read or has a line that is no JSON object; or the package
            `datasets` is not installed.
    """
    if source.endswith(FILES):
        return _rows_of_file(Path(source))
    require_package("datasets", extra="data")
    import datasets

    name, _, configuration = source.partition(":")
    loaded: Sequence[dict[str, Any]] = datasets.load_dataset(
        name, configuration or None, split=split
    )
    return loaded


def _rows_of_file(file: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"the data set {file} cannot be read: {why}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"line {number} of {file} is no JSON: {error}.") from error
        if not isinstance(row, dict):
            raise ConfigError(f"line {number} of {file} is no JSON object.")
        rows.append(row)
    if not rows:
        raise ConfigError(f"the data set {file} has no rows.")
    return rows
