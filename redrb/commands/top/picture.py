"""The picture: heading, the page that is chosen, and the keys; it never exceeds the terminal."""

from __future__ import annotations

from rich.text import Text

from redrb.commands.top.findings import finding_page
from redrb.commands.top.group_pages import group_page, groups_page
from redrb.commands.top.group_reader import Found
from redrb.commands.top.heading import heading
from redrb.commands.top.overview import overview
from redrb.commands.top.pages import help_page, task_page, worker_page
from redrb.commands.top.place import Page, Place
from redrb.commands.top.text import DIM, cut, line
from redrb.state.history import History
from redrb.state.view import View

_KEYS: dict[Page, str] = {
    "all": "  q end   ? help   Tab next list   arrows select   Enter show all   g groups",
    "groups": "  Escape back   arrows select   Enter show its samples   ? help   q end",
    "task": "  Escape back   arrows scroll   g groups   ? help   q end",
    "help": "  Escape back   arrows scroll   ? back   q back",
}
_SCROLLED = "  Escape back   arrows scroll   ? help   q end"


def picture(
    view: View,
    history: History,
    place: Place,
    where: str,
    *,
    found: Found | None = None,
    width: int | None = None,
    height: int | None = None,
) -> list[Text]:
    """Return the lines of a picture.

    Args:
        view: The newest view.
        history: Figures of the last looks.
        place: The page, and what is selected.
        where: Namespace and Redis.
        found: The groups, for the pages that show groups.
        width: Columns of the terminal; None: a picture for a file, as wide and high as it needs.
        height: Lines of the terminal.
    """
    top = heading(view, where, width)
    if width is None or height is None:
        return [*top, line(), *_body(view, history, place, found or Found(), None, None)]
    keys = _KEYS.get(place.page, _SCROLLED)
    room = height - len(top) - 1
    body = _body(view, history, place, found or Found(), width, max(0, room))
    lines = [*top[: max(1, height - 1)], *body]
    lines = lines[: height - 1]
    lines += [line()] * (height - 1 - len(lines))
    return [cut(each, width) for each in [*lines, line((keys, DIM))]]


def _body(
    view: View,
    history: History,
    place: Place,
    found: Found,
    width: int | None,
    height: int | None,
) -> list[Text]:
    """Return the lines of the page."""
    if place.page == "all":
        return overview(view, history, place, width, height)
    task = place.task_in(view.state)
    name = place.task or (task.name if task else "")
    if place.page == "groups":
        below = None if height is None else max(0, height - 1)
        title, lines = f"GROUPS of task {name}", groups_page(found, place, width, below)
    elif place.page == "group":
        title, lines = f"GROUP of task {name}", group_page(found, place, width)
    elif place.page == "task":
        title, lines = f"TASK {name}", task_page(task, name, history, width)
    elif place.page == "worker":
        title, lines = "WORKER", worker_page(place.worker_in(view.state), task)
    elif place.page == "finding":
        title, lines = "FINDING", finding_page(place.finding_in(view.findings), width)
    else:
        title, lines = "HELP", help_page()
    return [line((title, "bold")), *_scrolled(lines, place.offset, height)]


def _scrolled(lines: list[Text], offset: int, height: int | None) -> list[Text]:
    """Return the lines from `offset` on, but never less than a screen full."""
    if height is None:
        return lines
    room = max(1, height - 1)
    if len(lines) <= room:
        return lines
    first = max(0, min(offset, len(lines) - room + 1))
    below = len(lines) - first - room + 1
    if not below:
        return lines[first:]
    return [*lines[first : first + room - 1], line((f"    {below} more lines (arrows)", DIM))]
