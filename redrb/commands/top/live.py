"""The live picture: drawn again for a new state, a key, a new size, and each second."""

from __future__ import annotations

import io
import threading

from rich.console import Console
from rich.text import Text

from redrb.commands.top.full_screen import FullScreen
from redrb.commands.top.group_reader import GroupReader, Wanted
from redrb.commands.top.keys import keys_in
from redrb.commands.top.picture import picture
from redrb.commands.top.place import Place
from redrb.state.observer import Observer
from redrb.state.view import View

_AGE_S = 1.0
"""Seconds after which the picture is drawn again, because figures have become older."""

_JOIN_S = 2.0


def watch(
    observer: Observer, groups: GroupReader, screen: FullScreen, place: Place, where: str
) -> int:
    """Show the live picture until the user ends it; returns the exit status."""
    over = threading.Event()

    def follow() -> None:
        view = observer.newest()
        while not over.is_set():
            view = observer.wait(view.number, _AGE_S, error=view.error)
            screen.wake()

    follower = threading.Thread(target=follow, name="redrb-top", daemon=True)
    follower.start()
    try:
        return _loop(observer, groups, screen, place, where)
    finally:
        over.set()
        groups.close()
        follower.join(_JOIN_S)


def _loop(
    observer: Observer, groups: GroupReader, screen: FullScreen, place: Place, where: str
) -> int:
    console = Console(file=io.StringIO(), force_terminal=True, highlight=False)
    while True:
        width, height = screen.size
        view = observer.newest()
        found = groups.show(_wanted(place, view))
        lines = picture(
            view, observer.history, place, where, found=found, width=width, height=height
        )
        screen.draw([encoded(console, each) for each in lines])
        data = screen.read(_AGE_S)
        if data is None:
            return 0
        for key in keys_in(data):
            after = place.after(key, view, found.ids)
            if after is None:
                return 0
            place, found = after, groups.show(_wanted(after, view))


def _wanted(place: Place, view: View) -> Wanted | None:
    """Return the groups that a place shows; None if it shows none."""
    if place.page not in ("groups", "group"):
        return None
    task = place.task_in(view.state)
    consumers = task.main.name if task and task.main else "default"
    opened = place.group if place.page == "group" else 0
    return Wanted(place.task, consumers, place.status, opened)


def encoded(console: Console, line: Text) -> str:
    """Return a line with the escape codes of its styles; without colour where users want none."""
    with console.capture() as printed:
        console.print(line, end="", soft_wrap=True)
    return printed.get()
