"""The list of a task's groups, and the page of one group with its samples."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from redrb.commands.group_screen import everything, row
from redrb.commands.top.columns import Column, fitted, rows_within
from redrb.commands.top.group_reader import Found
from redrb.commands.top.place import STATUS_KEYS, Place
from redrb.commands.top.text import BAD, DIM, GOOD, HEAD, WARN, line, time_of

_COLUMNS = (
    Column("GROUP", 8, left=True),
    Column("state", 15, left=True),
    Column("samples", 7, 2),
    Column("size", 8, 6),
    Column("version", 9, 1),
    Column("stale", 5, 2),
    Column("reward", 8),
    Column("range", 18, 5, left=True),
    Column("more", 12, 3, left=True),
)
_OLD_S = 10.0
_WIDE = 100
_NAMES = {"": "newest", "completed": "waiting"}


def groups_page(found: Found, place: Place, width: int | None, height: int | None) -> list[Text]:
    """Return the list of groups, of which one is selected."""
    lines = [_filters(place), *_remarks(found)]
    if found.page is None:
        return lines
    rows = [row(view) for view in found.page.groups]
    if not rows:
        return [*lines, line(("  The task has no such groups now.", DIM))]
    marked = found.ids.index(place.group_among(found.ids))
    table = fitted(_COLUMNS, rows, width, marked)
    room = 1 + len(rows) if height is None else max(0, height - len(lines))
    return [*lines, *rows_within(table, room, marked)]


def group_page(found: Found, place: Place, width: int | None) -> list[Text]:
    """Return everything of one group, in lines that fit."""
    lines = _remarks(found)
    if found.page is None:
        return lines
    for view in found.page.groups:
        if view.state == "gone":
            words = f"Group {place.group} was acknowledged or removed."
            return [*lines, line((words, WARN))]
        for each in everything(view):
            lines += _wrapped(each, width or _WIDE)
    return lines


def _filters(place: Place) -> Text:
    """Return the line of keys that choose which groups are listed."""
    parts: list[tuple[str, str]] = []
    for key, status in STATUS_KEYS.items():
        name = _NAMES.get(status, status)
        chosen = status == place.status
        parts.append((f"  {key} {f'[{name}]' if chosen else name}", HEAD if chosen else DIM))
    return line(*parts)


def _remarks(found: Found) -> list[Text]:
    """Return how old the groups are, and why they could not be read."""
    made = []
    if found.page is not None:
        old = bool(found.error) or found.age_s >= _OLD_S
        made.append(line((f"  read {time_of(found.age_s)} ago", BAD if old else GOOD)))
        made += [line((f"  {note}", WARN)) for note in found.page.notes]
    elif not found.error:
        made.append(line(("  reading ...", DIM)))
    if found.error:
        made.append(line((f"  Groups cannot be read: {found.error}", BAD)))
    return made


def _wrapped(words: Text, width: int) -> list[Text]:
    """Return a text in lines of at most `width` columns."""
    if not words.plain:
        return [line()]
    console = Console(width=max(2, width))
    return list(words.wrap(console, max(2, width), overflow="fold", tab_size=4))
