"""`ExportedSource`: reads an exported directory, and checks every line of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from redrb.errors import ConfigError, DecodeError
from redrb.experience import BufferItem, Status
from redrb.experience.records import TENSOR_FIELDS
from redrb.stream.exchange.json_values import from_json
from redrb.stream.exchange.layout import ABOUT, FORMAT, GROUPS, MAX_LINE_BYTES, is_shard, key_of
from redrb.weights.files.safetensors import safetensors_torch


class ExportedSource:
    """An exported directory, read line by line.

    Attributes:
        order: Name of the order of the exported task; None where it is not noted.
        tags: Names of its declared tags.
        archived: Groups of the history among the lines that were read last.
    """

    def __init__(self, directory: Path) -> None:
        """Read `export.json`.

        Raises:
            ConfigError: It cannot be read.
            DecodeError: It is malformed, or of a newer format.
        """
        self._directory = directory
        about = self._about()
        self.order = about.get("order")
        self.tags = about.get("tags", [])
        self.archived = 0
        self._shard: str | None = None
        self._opened: Any = None
        self._names: frozenset[str] = frozenset()
        if not isinstance(self.order, str | None) or not isinstance(self.tags, list):
            raise DecodeError(f"{directory / ABOUT} is malformed: order or tags.")

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the groups, checked.

        Raises:
            ConfigError: The file cannot be read.
            DecodeError: A line is malformed.
        """
        path = self._directory / GROUPS
        try:
            file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}.") from error
        self.archived = 0
        with file:
            for number in range(1, 1 << 62):
                text = file.readline(MAX_LINE_BYTES)
                if not text:
                    return
                line = _parsed(text, f"{path}, line {number}")
                self.archived += line.get("archived_ms") is not None
                yield line

    def check(self, line: Mapping[str, Any]) -> None:
        """Check the samples of a line, and that the file of tensors holds theirs.

        Raises:
            DecodeError: A tensor is missing, or a value cannot be read.
        """
        held = self._names_in(line["shard"])
        missing = [key for _, _, key in _keys(line) if key not in held]
        if missing:
            raise DecodeError(f"{self._directory / str(line['shard'])} has no tensor {missing[0]}.")
        for sample in line["samples"]:
            from_json(sample["tags"])
            from_json(sample["extras"])

    def items(self, line: Mapping[str, Any]) -> list[BufferItem]:
        """Return the samples of a group."""
        tensors: list[dict[str, Tensor]] = [{} for _ in line["samples"]]
        for index, name, key in _keys(line):
            tensors[index][name] = self._open(line["shard"]).get_tensor(key)
        return [
            _item(sample, fields, line["group_id"])
            for sample, fields in zip(line["samples"], tensors, strict=True)
        ]

    def _names_in(self, shard: str | None) -> frozenset[str]:
        if shard is None:
            return frozenset()
        self._open(shard)
        return self._names

    def _open(self, shard: str) -> Any:
        """Return a file of tensors; each tensor is read when it is used."""
        if shard != self._shard:
            self._opened = _opened(self._directory / shard)
            self._names = frozenset(self._opened.keys())
            self._shard = shard
        return self._opened

    def _about(self) -> dict[str, Any]:
        path = self._directory / ABOUT
        try:
            about = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error}. Give a directory of `redrb export`."
            ) from error
        except ValueError as error:
            raise DecodeError(f"{path} is not JSON: {error}.") from error
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise DecodeError(
                f"{path} is not of format {FORMAT}, the only one known here: upgrade redrb."
            )
        return about


def _opened(path: Path) -> Any:
    safetensors_torch()
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise DecodeError(f"{path} is not a safetensors file: {error}.") from error


def _keys(line: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    """Yield sample, field and name in the file of each tensor of a group."""
    for index, sample in enumerate(line["samples"]):
        for name in sample["tensors"]:
            yield index, name, key_of(line["id"], index, name)


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    """Return a line, checked, with the defaults of the fields that it leaves out."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{where} is not JSON: {error}.") from error
    defaults: dict[str, Any] = {
        "status": None,
        "priority": None,
        "group_id": None,
        "tags": {},
        "shard": None,
    }
    try:
        line = {**defaults, **line}
        line["status"] = Status(line["status"] or Status.COMPLETED)
        line["samples"] = [_parsed_sample(sample) for sample in line["samples"]]
    except (TypeError, ValueError, KeyError) as error:
        raise DecodeError(f"{where} is malformed: {error!r}.") from error
    checks = {
        "id": type(line.get("id")) is int,
        "priority": line["priority"] is None or isinstance(line["priority"], int | float),
        "group_id": line["group_id"] is None or isinstance(line["group_id"], str),
        "tags": isinstance(line["tags"], dict),
        "shard": is_shard(line["shard"]) or line["shard"] is None,
        "samples": bool(line["samples"]),
    }
    for name, valid in checks.items():
        if not valid:
            raise DecodeError(f"{where} is malformed: {name} is {line.get(name)!r:.80}.")
    return line


def _parsed_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "policy_version": None,
        "status": Status.COMPLETED,
        "tags": {},
        "extras": {},
    }
    parsed = {**defaults, **sample}
    parsed["status"] = Status(parsed["status"])
    for name, kind in (("tags", dict), ("extras", dict), ("tensors", list)):
        if not isinstance(parsed[name], kind):
            raise ValueError(f"{name} of a sample")  # noqa: TRY004 (of a file, not of a caller)
    if not isinstance(parsed["policy_version"], int | None):
        raise ValueError("policy_version of a sample")  # noqa: TRY004
    if not all(isinstance(name, str) for name in parsed["tensors"]):
        raise ValueError("tensors of a sample")
    return parsed


def _item(
    sample: Mapping[str, Any], tensors: dict[str, Tensor], group_id: str | None
) -> BufferItem:
    fields: dict[str, Any] = {name: tensors.pop(name, None) for name in TENSOR_FIELDS}
    return BufferItem(
        **fields,
        tensors=tensors,
        policy_version=sample["policy_version"],
        status=sample["status"],
        group_id=group_id,
        tags=from_json(sample["tags"]),
        extras=from_json(sample["extras"]),
    )
