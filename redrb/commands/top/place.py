"""`Place`: the page and the rows that a user has chosen, and how keys change them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from redrb.state.finding import Finding
from redrb.state.model import State, TaskState, WorkerState
from redrb.state.view import View

Page: TypeAlias = Literal["all", "task", "worker", "finding", "groups", "group", "help"]
Listed: TypeAlias = Literal["tasks", "workers", "findings"]

_LISTS: tuple[Listed, ...] = ("tasks", "workers", "findings")
_PAGES: dict[Listed, Page] = {"tasks": "task", "workers": "worker", "findings": "finding"}
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10}
_ENDS = {"home": 0, "end": -1}
STATUS_KEYS = {"n": "", "w": "completed", "l": "leased", "d": "dead"}
"""Keys of the list of groups -> the groups that it shows; "": the newest ones."""


@dataclass(frozen=True)
class Place:
    """What a user looks at.

    Rows are chosen by name, so that a choice survives a new state.

    Attributes:
        page: All of the namespace; one task, worker or finding; a task's groups, or one of them.
        listed: The list in which keys select a row.
        task: Name of the chosen task; "": the first with workers.
        worker: Name of the chosen worker; "": the first of the task.
        finding: Number of the chosen finding.
        offset: Lines of a page that are above the screen.
        status: Groups that the list of groups shows, a value of `STATUS_KEYS`.
        group: Id of the chosen group; 0: the first of the list.
    """

    page: Page = "all"
    listed: Listed = "tasks"
    task: str = ""
    worker: str = ""
    finding: int = 0
    offset: int = 0
    status: str = ""
    group: int = 0

    def task_in(self, state: State | None) -> TaskState | None:
        """Return the chosen task; None if it is not there."""
        if state is None:
            return None
        if self.task:
            return state.task(self.task)
        return next((task for task in state.tasks if task.workers), next(iter(state.tasks), None))

    def worker_in(self, state: State | None) -> WorkerState | None:
        """Return the chosen worker of the chosen task; None if it is not there."""
        task = self.task_in(state)
        if task is None:
            return None
        found = (worker for worker in task.workers if worker.name == self.worker)
        return next(found, next(iter(task.workers), None))

    def finding_in(self, findings: Sequence[Finding]) -> Finding | None:
        """Return the chosen finding; None if there are none."""
        return findings[min(self.finding, len(findings) - 1)] if findings else None

    def group_among(self, groups: Sequence[int]) -> int:
        """Return the id of the chosen group in a list; the first if it is not there, 0 if none."""
        return self.group if self.group in groups else next(iter(groups), 0)

    def after(self, key: str, view: View, groups: Sequence[int] = ()) -> Place | None:
        """Return the place after a key was pressed; None: the user wants to end.

        Args:
            key: Name of the key.
            view: The view that was shown.
            groups: Ids of the groups that were listed.
        """
        if key == "q" and self.page != "help":
            return None
        if key in ("?", "h"):
            return replace(self, page="all" if self.page == "help" else "help", offset=0)
        if key in ("escape", "backspace", "left", "q"):
            return replace(self, page="groups" if self.page == "group" else "all", offset=0)
        if self.page == "groups":
            return self._among_groups(key, groups)
        if key == "g" and self.page in ("all", "task"):
            task = self.task_in(view.state)
            return replace(self, page="groups", task=task.name, group=0) if task else self
        if self.page != "all":
            return self._scrolled(key)
        if key in ("tab", "back tab"):
            step = 1 if key == "tab" else -1
            return replace(self, listed=_LISTS[(_LISTS.index(self.listed) + step) % len(_LISTS)])
        if key in ("enter", "right"):
            known = {
                "tasks": self.task_in(view.state),
                "workers": self.worker_in(view.state),
                "findings": self.finding_in(view.findings),
            }
            there = known[self.listed] is not None
            return replace(self, page=_PAGES[self.listed]) if there else self
        return self._moved(key, view)

    def _among_groups(self, key: str, groups: Sequence[int]) -> Place:
        """Select or open a group, or list others."""
        if key in STATUS_KEYS:
            return replace(self, status=STATUS_KEYS[key], group=0)
        chosen = self.group_among(groups)
        if key in ("enter", "right"):
            return replace(self, page="group", group=chosen, offset=0) if chosen else self
        if not groups or (key not in _STEPS and key not in _ENDS):
            return self
        return replace(self, group=groups[_next(key, groups.index(chosen), len(groups))])

    def _scrolled(self, key: str) -> Place:
        if key == "home":
            return replace(self, offset=0)
        return replace(self, offset=max(0, self.offset + _STEPS.get(key, 0)))

    def _moved(self, key: str, view: View) -> Place:
        """Select another row of the list."""
        if key not in _STEPS and key not in _ENDS:
            return self
        if self.listed == "findings":
            return replace(self, finding=_next(key, self.finding, len(view.findings)))
        task = self.task_in(view.state)
        if self.listed == "workers":
            names = [worker.name for worker in task.workers] if task else []
            worker = self.worker_in(view.state)
            chosen = worker.name if worker else ""
        else:
            names = [each.name for each in view.state.tasks] if view.state else []
            chosen = task.name if task else ""
        if not names:
            return self
        at = names.index(chosen) if chosen in names else 0
        name = names[_next(key, at, len(names))]
        if self.listed == "workers":
            return replace(self, task=task.name if task else "", worker=name)
        return replace(self, task=name, worker="")


def _next(key: str, at: int, count: int) -> int:
    """Return the number of the row that a key leads to."""
    if key in _ENDS:
        return 0 if key == "home" else max(0, count - 1)
    return max(0, min(count - 1, at + _STEPS[key]))
