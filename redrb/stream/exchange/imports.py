"""Put exported groups into a task, as new ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from redrb.connection import Client
from redrb.errors import ConfigError, DecodeError
from redrb.experience import BufferItem, Status
from redrb.experience.records import TENSOR_FIELDS, named_tensors
from redrb.keys import TaskKeys
from redrb.orders import Order
from redrb.stream import ExperienceStream
from redrb.stream.exchange.json_values import from_json
from redrb.stream.exchange.layout import (
    ABOUT,
    FORMAT,
    GROUPS,
    MAX_LINE_BYTES,
    is_shard,
    key_of,
)
from redrb.stream.saving.records import declared_tags
from redrb.stream.saving.snapshot import PAGE_BYTES, PAGE_GROUPS
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore
from redrb.weights.files.safetensors import safetensors_torch


@dataclass(frozen=True, slots=True)
class Imported:
    """What was imported.

    Attributes:
        groups: Groups that were put.
        archived: Groups of the history, which are not put.
    """

    groups: int
    archived: int


def import_task(
    client: Client,
    task: str,
    directory: str | Path,
    *,
    namespace: str = "default",
    order: str | Order | None = None,
    timeout: float | None = None,
) -> Imported:
    """Put the groups of an exported directory into a task, by the ordinary `put`.

    They are new groups: ids and counters start anew, in the order of the lines; status, priority,
    tags and samples are those of the export, and its history is left out. A new task gets the
    order and the tags of the export. The directory is checked before anything is put.

    Args:
        client: What `redrb.connect` returned.
        task: Name of the task, new or not.
        directory: What `export_task` has made, or anybody in the same form.
        namespace: The task's namespace.
        order: The task's order, where it is somebody's own.
        timeout: Seconds that a put waits for room; None: for ever.

    Raises:
        ConfigError: The directory cannot be read, or safetensors is missing.
        DecodeError: The directory is malformed, or of a newer format; nothing was put.
        TaskMismatch: The task has another order than the one given.
        RecordError: A sample is none that `put` takes, such as one whose reward is nan; what was
            put before it stays.
        StoreFull, StoreUnavailable: `stored` says how many groups were put before.
    """
    source = _Source(Path(directory))
    for line in source.lines():
        source.check(line)
    scripts = TaskScripts(TaskStore(client, task, TaskKeys.of(namespace, task)))
    tags = None
    if not scripts.stats("default"):
        order, tags = order or source.order, source.tags or None
    put = archived = 0
    with ExperienceStream(client, task, namespace=namespace, order=order, tags=tags) as stream:
        declared = set(declared_tags(scripts.open({}))).intersection(source.tags)
        waiting = (line for line in source.lines() if line.get("archived_ms") is None)
        for given, lines in groupby(waiting, lambda line: _given(line, declared)):
            options = json.loads(given)
            for groups in _parts(source.items(line) for line in lines):
                put += len(stream.put_many(groups, timeout=timeout, **_options(options)))
        archived = source.archived
    return Imported(put, archived)


def _parts(groups: Iterator[list[BufferItem]]) -> Iterator[list[list[BufferItem]]]:
    """Cut groups into lists that are put together, of bounded size."""
    part: list[list[BufferItem]] = []
    nbytes = 0
    for group in groups:
        part.append(group)
        nbytes += sum(tensor.nbytes for item in group for tensor in named_tensors(item).values())
        if len(part) == PAGE_GROUPS or nbytes >= PAGE_BYTES:
            yield part
            part, nbytes = [], 0
    if part:
        yield part


def _given(line: Mapping[str, Any], declared: set[str]) -> str:
    """Return what put is told of a group, so that groups of which it is the same go together."""
    tags = {name: line["tags"].get(name) for name in sorted(declared)}
    return json.dumps([line["status"], line["priority"], tags])


def _options(given: list[Any]) -> dict[str, Any]:
    status, priority, tags = given
    return {"status": Status(status), "priority": priority, "tags": tags or None}


class _Source:
    """An exported directory, read line by line."""

    def __init__(self, directory: Path) -> None:
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
        """Yield the groups."""
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
        """Check one group, and that its tensors are there."""
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
            _item(sample, own, line["group_id"])
            for sample, own in zip(line["samples"], tensors, strict=True)
        ]

    def _names_in(self, shard: str | None) -> frozenset[str]:
        if shard is None:
            return frozenset()
        self._open(shard)
        return self._names

    def _open(self, shard: str) -> Any:
        """Return a file of tensors, which are read when they are asked for."""
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
        raise DecodeError(f"{path} is no file of tensors: {error}.") from error


def _keys(line: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    """Yield sample, field and name in the file of each tensor of a group."""
    for index, sample in enumerate(line["samples"]):
        for name in sample["tensors"]:
            yield index, name, key_of(line["id"], index, name)


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    """Return a line, checked, with what it leaves out."""
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
    for name, fine in checks.items():
        if not fine:
            raise DecodeError(f"{where} is malformed: {name} is {line.get(name)!r:.80}.")
    return line


def _parsed_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "policy_version": None,
        "status": Status.COMPLETED,
        "tags": {},
        "extras": {},
    }
    own = {**defaults, **sample}
    own["status"] = Status(own["status"])
    for name, kind in (("tags", dict), ("extras", dict), ("tensors", list)):
        if not isinstance(own[name], kind):
            raise ValueError(f"{name} of a sample")  # noqa: TRY004 (of a file, not of a caller)
    if not isinstance(own["policy_version"], int | None):
        raise ValueError("policy_version of a sample")  # noqa: TRY004
    if not all(isinstance(name, str) for name in own["tensors"]):
        raise ValueError("tensors of a sample")
    return own


def _item(
    sample: Mapping[str, Any], tensors: dict[str, Tensor], group_id: str | None
) -> BufferItem:
    own: dict[str, Any] = {name: tensors.pop(name, None) for name in TENSOR_FIELDS}
    return BufferItem(
        **own,
        tensors=tensors,
        policy_version=sample["policy_version"],
        status=sample["status"],
        group_id=group_id,
        tags=from_json(sample["tags"]),
        extras=from_json(sample["extras"]),
    )
