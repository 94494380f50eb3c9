"""The picture of the whole namespace: the height of the terminal is shared by importance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from redrb.commands.top.columns import Table, rows_within
from redrb.commands.top.findings import FindingList
from redrb.commands.top.place import Place
from redrb.commands.top.staleness import staleness_table
from redrb.commands.top.tables import task_table, weights_table, worker_table
from redrb.commands.top.text import line
from redrb.state.history import History
from redrb.state.view import View


@dataclass
class Section:
    """Some lines of the picture.

    Attributes:
        needs: Lines that it needs to show everything.
        least: Lines below which it is of no use.
        weight: Its share of the height, against those of other sections.
        importance: Sections with a larger number are the first to get their least lines.
        draw: Returns at most so many lines.
        given: Lines that it gets.
    """

    needs: int
    least: int
    weight: int
    importance: int
    draw: Callable[[int], list[Text]]
    given: int = field(default=0)


def overview(
    view: View, history: History, place: Place, width: int | None, height: int | None
) -> list[Text]:
    """Return the lines of the picture, without its heading.

    Args:
        view: The newest view.
        history: Figures of the last looks.
        place: What is selected.
        width: Columns of the terminal; None: no limit.
        height: Lines; None: all that there is.
    """
    sections = _sections(view, history, place, width)
    if height is not None:
        _share(sections, height)
    shown = [each.draw(each.needs if height is None else each.given) for each in sections]
    shown = [lines for lines in shown if lines]
    spare = height is None or sum(map(len, shown)) + len(shown) - 1 <= height
    made: list[Text] = []
    for lines in shown:
        made += [line(), *lines] if spare and made else lines
    return made


def _sections(view: View, history: History, place: Place, width: int | None) -> list[Section]:
    """Return the sections from top to bottom."""
    state = view.state
    marked = place.finding if place.listed == "findings" else -1
    findings = FindingList(view.findings, width, marked)
    last = Section(
        1 + findings.full, 3, 3, 3, lambda room: [findings.head, *findings.lines(room - 1)]
    )
    if not view.findings:
        last = Section(1, 1, 1, 3, lambda _: [findings.head])
    if state is None:
        return [last]
    if not (state.tasks or state.weights):
        text = "This namespace has no tasks and no weights; --namespace names another one."
        return [Section(1, 1, 1, 4, lambda _: [line(text[:width])]), last]
    task = place.task_in(state)
    chosen = place.worker_in(state) if place.listed == "workers" else None
    name = place.task or (task.name if task else "")
    tasks = task_table(
        state.tasks, state.tasks_total, history, width, task.name if task and width else ""
    )
    if width is None and not place.task:
        workers = [worker_table(each, each.name, None) for each in state.tasks if each.workers]
    else:
        workers = [worker_table(task, name, width, chosen.name if chosen else "")]
    row = [each.name for each in state.tasks].index(task.name) if task else 0
    at = [each.name for each in task.workers].index(chosen.name) if task and chosen else 0
    sections = [_of_table(tasks, 3, 4, row)]
    sections += [_of_table(table, 3, 2, at) for table in workers]
    if state.weights:
        sections.append(_of_table(weights_table(state, width), 1, 1, 0))
    sections.append(last)
    if task is not None and task.main is not None:
        table = staleness_table(task.name, task.main.staleness, width)
        sections.append(
            Section(1 + len(table.rows), 0, 0, 0, lambda room: rows_within(table, room, 0))
        )
    return sections


def _of_table(table: Table, weight: int, importance: int, marked: int) -> Section:
    needs = 1 + len(table.rows)
    return Section(needs, 2, weight, importance, lambda room: rows_within(table, room, marked))


def _share(sections: Sequence[Section], height: int) -> None:
    """Give each section its lines: the least that it needs, then in proportion to weights.

    Sections of weight 0 get what is left, if that is all that they need.
    """
    room = height
    for section in sorted(sections, key=lambda each: -each.importance):
        if section.weight and room >= (least := min(section.needs, section.least)):
            section.given = least
            room -= least
    while room > 0:
        wanting = [each for each in sections if each.weight and 0 < each.given < each.needs]
        if not wanting:
            break
        min(wanting, key=lambda each: each.given / each.weight).given += 1
        room -= 1
    for section in sections:
        if not section.weight and room > section.needs + len(sections):
            section.given = section.needs
            room -= section.needs
