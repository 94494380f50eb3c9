"""The picture that is printed: all of a namespace, as wide and high as it needs."""

from __future__ import annotations

from rich.text import Text

from redrb.commands.top.findings import finding_lines, findings_head
from redrb.commands.top.heading import heading
from redrb.commands.top.staleness import staleness_table
from redrb.commands.top.tables import task_table, weights_table, worker_table
from redrb.commands.top.text import line
from redrb.state.history import History
from redrb.state.model import State, TaskState
from redrb.state.observer import View

NOTHING = "This namespace has no tasks and no weights; --namespace names another one."


def chosen_task(state: State, name: str) -> TaskState | None:
    """Return the task of a name, or without a name the first with workers; None if it is gone."""
    if name:
        return state.task(name)
    return next((task for task in state.tasks if task.workers), next(iter(state.tasks), None))


def picture(view: View, history: History, task: str, where: str) -> list[Text]:
    """Return the lines of a picture.

    `task` is the only one whose workers are shown; "": those of all.
    """
    blocks = [heading(view, where, None)]
    chosen = None
    if view.state is not None:
        chosen = chosen_task(view.state, task)
        blocks += _tables(view.state, history, task)
    findings = [each for finding in view.findings for each in finding_lines(finding, None)]
    blocks.append([findings_head(view.findings), *findings])
    if chosen is not None and chosen.main is not None:
        table = staleness_table(chosen.name, chosen.main.staleness, None)
        blocks.append([table.head, *table.rows])
    return [each for block in blocks for each in (*block, line())][:-1]


def _tables(state: State, history: History, task: str) -> list[list[Text]]:
    """Return the lines of the tables of tasks, workers and weights."""
    if not (state.tasks or state.weights):
        return [[line(NOTHING)]]
    tables = [task_table(state.tasks, state.tasks_total, history, None)]
    if task:
        tables.append(worker_table(state.task(task), task, None))
    else:
        tables += [worker_table(each, each.name, None) for each in state.tasks if each.workers]
    if state.weights:
        tables.append(weights_table(state, None))
    return [[table.head, *table.rows] for table in tables]
