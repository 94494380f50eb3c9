"""`export_task`: writes a task's groups as JSON lines and safetensors, for other tools."""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias

from msgpack import ExtType
from torch import Tensor

from redrb.codec import decode_items, parse_group
from redrb.connection import Client
from redrb.errors import ConfigError, DecodeError
from redrb.experience import BufferItem
from redrb.experience.records import named_tensors
from redrb.experience.status import group_status
from redrb.keys import check_name
from redrb.staging import staging
from redrb.stream.saving.records import GroupRecord
from redrb.stream.saving.snapshot import TaskReader
from redrb.stream.task.lookup import existing_task
from redrb.weights.files.safetensors import safetensors_torch

Line: TypeAlias = dict[str, Any]

_FORMAT: Final = 1
_SHARD_BYTES: Final = 256 << 20
"""Most bytes of tensors in one file, unless a single group is larger."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The contents of an exported directory, in numbers.

    Attributes:
        directory: The directory.
        shards: Files of tensors.
        unreadable: Ids of groups that are left out because they cannot be decoded.
    """

    directory: Path
    groups: int
    shards: int
    unreadable: tuple[int, ...]


def export_task(
    client: Client,
    task: str,
    directory: str | Path,
    *,
    namespace: str = "default",
    group: str = "default",
    shard_bytes: int = _SHARD_BYTES,
) -> Exported:
    """Write all groups of a task into a new directory.

    The groups are not leased, and makers and trainers may go on: groups that are stored from the
    beginning to the end are exported, once. It needs memory for two files of tensors, and for the
    strings that tags had.

    Args:
        client: The client that `redrb.connect` returned.
        task: Name of the task.
        directory: A directory that is empty or does not exist; it appears when it is complete.
        namespace: The task's namespace.
        group: Consumer group whose view of each group's status is exported.
        shard_bytes: Bytes of tensors in one file.

    Raises:
        UnknownTask: There is no such task.
        ConfigError: The directory is not empty, or safetensors is missing.
        StoreUnavailable: Redis stayed away; no directory was made.
    """
    safetensors_torch()
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already: export into a new directory.")
    check_name("consumer group", group)
    now_ms = time.time_ns() // 1_000_000
    reader = TaskReader(existing_task(client, task, namespace=namespace), now_ms)
    with _appearing(target) as fresh:
        export = _Export(reader, fresh, group, shard_bytes)
        export.run()
    return Exported(
        directory=target,
        groups=export.groups,
        shards=export.shards.number,
        unreadable=tuple(export.unreadable),
    )


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Make a directory that gets its name when the block ends without an error."""
    try:
        with staging(target) as folder:
            fresh = folder / target.name
            fresh.mkdir()
            yield fresh
            fresh.replace(target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from error


class _Shards:
    """Writes files of tensors, of bounded size; all tensors of a group are in one file."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        self.number = 0
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._nbytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> str:
        """Add a group's tensors; returns the name of their file."""
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._nbytes + nbytes > self._shard_bytes:
            self.flush()
        for name, tensor in tensors.items():
            self._tensors[name] = tensor.clone().contiguous()  # decoded tensors share memory
        self._nbytes += nbytes
        return self._name()

    def _name(self) -> str:
        return f"tensors-{self.number:05d}.safetensors"

    def flush(self) -> None:
        """Write the tensors that were added since the last file."""
        if self._tensors:
            path = self._directory / self._name()
            safetensors_torch().save_file(self._tensors, path)
            self.number += 1
            self._tensors, self._nbytes = {}, 0


class _Export:
    """Writes one directory."""

    def __init__(self, reader: TaskReader, directory: Path, group: str, shard_bytes: int) -> None:
        self.groups = 0
        self.unreadable: list[int] = []
        self.shards = _Shards(directory, shard_bytes)
        self._reader = reader
        self._directory = directory
        names = reader.header.groups
        self._place = names.index(group) if group in names else -1
        self._names = reader.header.tags

    def run(self) -> None:
        """Write everything."""
        with (self._directory / "groups.jsonl").open("w", encoding="utf-8") as file:
            for record, payload in self._reader.groups():
                self._write(file, record, payload)
        self.shards.flush()
        header = self._reader.header
        about = {
            "format": _FORMAT,
            "task": header.task,
            "order": header.settings.get("order", "fifo"),
            "tags": list(self._names),
            "groups": self.groups,
            "shards": self.shards.number,
            "unreadable": self.unreadable,
        }
        text = json.dumps(about, indent=1)
        (self._directory / "export.json").write_text(text + "\n", encoding="utf-8")

    def _write(self, file: TextIO, record: GroupRecord, payload: bytes) -> None:
        try:
            items = decode_items(parse_group(payload))
        except DecodeError:
            self.unreadable.append(record.seq)
            return
        tensors = {
            f"{record.seq}/{index}/{name}": tensor
            for index, item in enumerate(items)
            for name, tensor in named_tensors(item).items()
        }
        line = self._line(record, items, self.shards.add(tensors) if tensors else None)
        file.write(json.dumps(line, allow_nan=False) + "\n")
        self.groups += 1

    def _line(self, record: GroupRecord, items: list[BufferItem], shard: str | None) -> Line:
        facts: Mapping[str, Any] = record.facts
        need = next((need for need in record.needs if need.place == self._place), None)
        at_put = facts.get("status") or str(group_status(item.status for item in items))
        versions = [item.policy_version for item in items if item.policy_version is not None]
        return {
            "id": record.seq,
            "status": (need and need.moved) or at_put,  # in which it waits for the consumer group
            "policy_version": facts.get("version", min(versions, default=None)),
            "priority": float(facts["priority"]) if "priority" in facts else None,
            "reads": need.reads if need else 0,
            "group_id": items[0].group_id,
            "tags": self._tags(facts.get("tags", {})),
            "shard": shard,
            "samples": list(map(_sample, items)),
        }

    def _tags(self, values: Mapping[str, str | float]) -> dict[str, str | float]:
        """Return the declared tags that a group has."""
        return {name: _whole(values[name]) for name in self._names if name in values}


def _whole(value: str | float) -> str | float:
    """Return a whole number as an int: Redis keeps numbers as doubles."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sample(item: BufferItem) -> Line:
    return {
        "policy_version": item.policy_version,
        "status": str(item.status),
        "tags": to_json(item.tags),
        "extras": to_json(item.extras),
        "tensors": list(named_tensors(item)),
    }


def to_json(value: Any) -> Any:
    """Return the JSON form of `value`.

    Bytes become `{"$bytes": base64}`, times `{"$datetime": ISO 8601}`, msgpack's own types
    `{"$ext": [code, base64]}`, numbers that are not finite
    `{"$float": "nan" | "inf" | "-inf"}`, and maps with keys that are bytes or begin with `$`
    `{"$map": [[key, value], ...]}`.
    """
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, datetime):
        return {"$datetime": value.isoformat()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, ExtType):
        return {"$ext": [value.code, base64.b64encode(value.data).decode()]}
    if isinstance(value, list | tuple):
        made = []
        for one in value:  # no comprehension: each of its levels would cost two of the stack
            made.append(to_json(one))
        return made
    return _map_to_json(value) if isinstance(value, dict) else value


def _map_to_json(value: dict[Any, Any]) -> dict[str, Any]:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        made = {}
        for key, one in value.items():
            made[key] = to_json(one)
        return made
    return {"$map": [[to_json(key), to_json(one)] for key, one in value.items()]}
