"""`import_task`: puts the groups of an exported directory into a task, as new groups."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from redrb.connection import Client
from redrb.experience import BufferItem, Status
from redrb.experience.records import named_tensors
from redrb.orders import Order
from redrb.stream import ExperienceStream
from redrb.stream.exchange.source import ExportedSource
from redrb.stream.saving.records import declared_tags
from redrb.stream.saving.snapshot import PAGE_BYTES, PAGE_GROUPS
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore


@dataclass(frozen=True, slots=True)
class Imported:
    """The groups of an import, in numbers.

    Attributes:
        groups: Groups that were put.
        archived: Groups of the history; they are not put.
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

    They become new groups with new ids, in the order of the lines; status, priority, tags and
    samples are those of the export. Its history is left out. A new task gets the order and the tags
    of the export. The whole directory is checked before the first put.

    Args:
        client: The client that `redrb.connect` returned.
        task: Name of the task, new or not.
        directory: A directory of `export_task`, or of another tool in the same form.
        namespace: The task's namespace.
        order: The task's order, if it is an `Order` object.
        timeout: Seconds that each put waits for room; None waits for ever.

    Raises:
        ConfigError: The directory cannot be read, or safetensors is missing.
        DecodeError: The directory is malformed, or of a newer format; nothing was put.
        TaskMismatch: The task has another order than the one given.
        RecordError: `put` refuses a sample, for example because its reward is nan; groups that were
            put before it stay.
        StoreFull, StoreUnavailable: `stored` is the number of groups that the failed put stored.
    """
    source = ExportedSource(Path(directory))
    for line in source.lines():
        source.check(line)
    scripts = TaskScripts(TaskStore.of(client, namespace, task))
    tags = None
    if not scripts.stats("default"):
        order, tags = order or source.order, source.tags or None
    put = archived = 0
    with ExperienceStream(
        client, task, namespace=namespace, order=order, tags=tags, checks=()
    ) as stream:
        declared = set(declared_tags(scripts.open({}))).intersection(source.tags)
        waiting = (line for line in source.lines() if line.get("archived_ms") is None)
        for options, lines in groupby(waiting, lambda line: _options_as_json(line, declared)):
            for groups in _pages(source.items(line) for line in lines):
                put += len(stream.put_many(groups, timeout=timeout, **_options(options)))
        archived = source.archived
    return Imported(put, archived)


def _pages(groups: Iterator[list[BufferItem]]) -> Iterator[list[list[BufferItem]]]:
    """Cut groups into lists of bounded size; each list is one put."""
    page: list[list[BufferItem]] = []
    nbytes = 0
    for group in groups:
        page.append(group)
        nbytes += sum(tensor.nbytes for item in group for tensor in named_tensors(item).values())
        if len(page) == PAGE_GROUPS or nbytes >= PAGE_BYTES:
            yield page
            page, nbytes = [], 0
    if page:
        yield page


def _options_as_json(line: Mapping[str, Any], declared: set[str]) -> str:
    """Return the options of a group's put; groups with equal options are put together."""
    tags = {name: line["tags"].get(name) for name in sorted(declared)}
    return json.dumps([line["status"], line["priority"], tags])


def _options(text: str) -> dict[str, Any]:
    status, priority, tags = json.loads(text)
    return {"status": Status(status), "priority": priority, "tags": tags or None}
