"""Write what a task stores as JSON lines and safetensors, for tools that know nothing of redrb."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from torch import Tensor

from redrb.codec import decode_items, parse_group
from redrb.connection import Client
from redrb.errors import ConfigError, DecodeError
from redrb.experience import BufferItem
from redrb.experience.records import named_tensors
from redrb.experience.status import group_status
from redrb.keys import TaskKeys, check_name
from redrb.stream.exchange.json_values import to_json
from redrb.stream.exchange.layout import (
    ABOUT,
    FORMAT,
    GROUPS,
    SHARD_BYTES,
    key_of,
    shard_name,
)
from redrb.stream.saving.records import GroupRecord
from redrb.stream.saving.snapshot import TaskReader
from redrb.stream.task.store import TaskStore
from redrb.stream.task.tags import BEYOND_NUMBERS
from redrb.weights.files.safetensors import safetensors_torch

Line: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was exported.

    Attributes:
        directory: Where to.
        groups: Groups, history included.
        archived: Those of them that are history.
        shards: Files of tensors.
        unreadable: Ids of groups that cannot be decoded: they are left out.
    """

    directory: Path
    groups: int
    archived: int
    shards: int
    unreadable: tuple[int, ...]


def export_task(
    client: Client,
    task: str,
    directory: str | Path,
    *,
    namespace: str = "default",
    group: str = "default",
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write all groups of a task, history included, into a new directory.

    Nothing is taken, and others may go on meanwhile: what is stored from the beginning to the end
    is exported, once. Memory: twice one file of tensors, and the strings that tags had.

    Args:
        client: What `redrb.connect` returned.
        task: Name of the task.
        directory: Where to; it must not exist yet, or be empty. It appears when it is complete.
        namespace: The task's namespace.
        group: Consumer group whose view of a group's status is told.
        shard_bytes: Bytes of tensors a file.

    Raises:
        ConfigError: No such task, a directory that holds something, or no safetensors.
        StoreUnavailable: Redis stayed away; there is no directory then.
    """
    safetensors_torch()
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already: export into a new directory.")
    check_name("consumer group", group)
    store = TaskStore(client, task, TaskKeys.of(namespace, task))
    reader = TaskReader(store, time.time_ns() // 1_000_000)
    with _appearing(target) as fresh:
        export = _Export(reader, fresh, group, shard_bytes)
        export.run()
    return Exported(
        directory=target,
        groups=export.groups,
        archived=export.archived,
        shards=export.shards.number,
        unreadable=tuple(export.unreadable),
    )


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Make a directory that gets its name when the block ends well."""
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        fresh.mkdir()
        try:
            yield fresh
            fresh.replace(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from error


class _Shards:
    """Files of tensors, of bounded size; a group is never in two."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        self.number = 0
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._nbytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> str:
        """Take a group's tensors; returns the name of their file."""
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._nbytes + nbytes > self._shard_bytes:
            self.flush()
        for name, tensor in tensors.items():
            self._tensors[name] = tensor.clone().contiguous()  # decoded ones share their memory
        self._nbytes += nbytes
        return shard_name(self.number)

    def flush(self) -> None:
        """Write what was taken."""
        if self._tensors:
            path = self._directory / shard_name(self.number)
            safetensors_torch().save_file(self._tensors, path)
            self.number += 1
            self._tensors, self._nbytes = {}, 0


class _Export:
    def __init__(self, reader: TaskReader, directory: Path, group: str, shard_bytes: int) -> None:
        self.groups = 0
        self.archived = 0
        self.unreadable: list[int] = []
        self.shards = _Shards(directory, shard_bytes)
        self._reader = reader
        self._directory = directory
        names = [own.name for own in reader.header.groups]
        self._place = names.index(group) if group in names else -1
        self._names = reader.header.tags
        self._terms = self._read_terms() if self._names else {}

    def run(self) -> None:
        """Write everything."""
        with (self._directory / GROUPS).open("w", encoding="utf-8") as file:
            for record, payload in self._reader.groups():
                self._write(file, record, payload)
        self.shards.flush()
        header = self._reader.header
        about = {
            "format": FORMAT,
            "task": header.task,
            "order": header.settings.get("order", "fifo"),
            "tags": list(self._names),
            "groups": self.groups,
            "archived": self.archived,
            "shards": self.shards.number,
            "unreadable": self.unreadable,
        }
        text = json.dumps(about, indent=1)
        (self._directory / ABOUT).write_text(text + "\n", encoding="utf-8")

    def _write(self, file: TextIO, record: GroupRecord, payload: bytes) -> None:
        try:
            items = decode_items(parse_group(payload))
        except DecodeError:
            self.unreadable.append(record.seq)
            return
        tensors = {
            key_of(record.seq, index, name): tensor
            for index, item in enumerate(items)
            for name, tensor in named_tensors(item).items()
        }
        line = self._line(record, items, self.shards.add(tensors) if tensors else None)
        file.write(json.dumps(line, allow_nan=False) + "\n")
        self.groups += 1
        self.archived += record.archived != ""

    def _line(self, record: GroupRecord, items: list[BufferItem], shard: str | None) -> Line:
        facts: Mapping[str, Any] = record.facts or {}
        versions = [item.policy_version for item in items if item.policy_version is not None]
        return {
            "id": record.seq,
            "status": self._status(record, facts, items),
            "policy_version": facts.get("version", min(versions, default=None)),
            "priority": float(facts["priority"]) if "priority" in facts else None,
            "reads": facts.get("reads", 0),
            "group_id": items[0].group_id,
            "archived_ms": int(record.archived) if record.archived else None,
            "tags": self._tags(facts.get("tags", {})),
            "shard": shard,
            "samples": list(map(_sample, items)),
        }

    def _status(
        self, record: GroupRecord, facts: Mapping[str, Any], items: list[BufferItem]
    ) -> str:
        """Return the status in which a group waits for the consumer group, or its own."""
        for need in record.needs:
            if need.place == self._place and need.moved:
                return need.moved
        return facts.get("status") or str(group_status(item.status for item in items))

    def _tags(self, scores: Mapping[str, float]) -> dict[str, str | float]:
        """Return the declared tags that a group has."""
        found: dict[str, str | float] = {}
        for name in self._names:
            if (score := scores.get(name)) is None:
                continue
            if score >= BEYOND_NUMBERS:
                found[name] = self._terms[name, str(round(score / BEYOND_NUMBERS))]
            else:
                found[name] = int(score) if float(score).is_integer() else score
        return found

    def _read_terms(self) -> dict[tuple[str, str], str]:
        found = {}
        for part in self._reader.terms():
            for term, number in part.items():
                name, _, text = term.partition("\n")
                found[name, number] = text
        return found


def _sample(item: BufferItem) -> Line:
    return {
        "policy_version": item.policy_version,
        "status": str(item.status),
        "tags": to_json(item.tags),
        "extras": to_json(item.extras),
        "tensors": list(named_tensors(item)),
    }
