"""Names in the registry of a namespace whose task, table or weights do not exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from redrb.connection import Client
from redrb.errors import StoreDenied
from redrb.keys import TableKeys, TaskKeys, WeightKeys, is_name, is_task
from redrb.registry import Kind, Registry
from redrb.watch.state.findings.wording import finding_of, redrb_command
from redrb.watch.state.model import Finding, State

MOST_NAMES = 200
"""Names of each kind that one run of doctor reports, at most, of those that name nothing."""


@dataclass(frozen=True, slots=True)
class LeftName:
    """A name in the registry that names nothing."""

    kind: Kind
    name: str


def left_names(client: Client, state: State) -> list[LeftName]:
    """Return names that name nothing, of those that the user may look up.

    Names of what the state has are not looked up.
    """
    registry = Registry(client, state.namespace)
    known: dict[Kind, set[str]] = {
        "task": {task.name for task in state.tasks},
        "table": {table.name for table in state.tables},
        "weights": {weights.name for weights in state.weights if weights.version},
    }

    def left(kind: Kind) -> Iterator[LeftName]:
        usable = is_task if kind == "task" else is_name
        for name in filter(usable, registry.names(kind)):
            if name not in known[kind] and not _exists(client, state.namespace, kind, name):
                yield LeftName(kind, name)

    return [name for kind in known for name in islice(left(kind), MOST_NAMES)]


def unread_tasks(client: Client, state: State) -> list[str]:
    """Return names of tasks that have keys, and that the state lacks: their settings are lost."""
    known = {task.name for task in state.tasks}
    return [
        name
        for name in filter(
            is_task, islice(Registry(client, state.namespace).names("task"), MOST_NAMES)
        )
        if name not in known and _exists(client, state.namespace, "task", name)
    ]


def find(state: State, names: Iterable[LeftName]) -> Iterator[Finding]:
    """Yield the findings about names."""
    for left in names:
        do = "do" if left.kind == "weights" else "does"
        text = f"The registry names {left.kind} {left.name!r}, which {do} not exist."
        command = redrb_command(state, "doctor", "--repair")
        yield finding_of("name-without-task", f"{left.kind} {left.name}", text, command)


def remove_name(client: Client, namespace: str, left: LeftName) -> tuple[str, bool]:
    """Remove a name, unless another process has created what it names meanwhile.

    Returns:
        What was done, and whether nothing is left to do: the user may lack permission.
    """
    registry, what = Registry(client, namespace), f"the name of {left.kind} {left.name}"
    kept = f"kept {what} in the registry: it exists now", True
    if _exists(client, namespace, left.kind, left.name):
        return kept
    registry.remove(left.kind, left.name)
    if _exists(client, namespace, left.kind, left.name):  # created between the two requests
        registry.add(left.kind, left.name)
        return kept
    removed = not registry.has(left.kind, left.name)
    return f"{'removed' if removed else 'could not remove'} {what} from the registry", removed


def _exists(client: Client, namespace: str, kind: Kind, name: str) -> bool:
    """Return whether a name names something, or cannot be looked up."""
    if kind == "task":
        task = TaskKeys.of(namespace, name)
        names = [task.task, *task.contents]
    elif kind == "table":
        names = [TableKeys.of(namespace, name).task]
    else:
        keys = WeightKeys.of(namespace, name)
        names = [keys.versions, f"{keys.prefix}fence"]
    try:
        return bool(client.at(names[0]).execute("EXISTS", *names))
    except StoreDenied:
        return True
