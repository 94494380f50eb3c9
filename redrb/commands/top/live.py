"""The live picture: drawn again for a new state, a key, a new size, and each second."""

from __future__ import annotations

import io
import threading

from rich.console import Console
from rich.text import Text

from redrb.commands.top.full_screen import FullScreen
from redrb.commands.top.keys import keys_in
from redrb.commands.top.picture import picture
from redrb.commands.top.place import Place
from redrb.state.observer import Observer

_AGE_S = 1.0
"""Seconds after which the picture is drawn again, because figures have become older."""

_JOIN_S = 2.0


def watch(observer: Observer, screen: FullScreen, place: Place, where: str) -> int:
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
        return _loop(observer, screen, place, where)
    finally:
        over.set()
        follower.join(_JOIN_S)


def _loop(observer: Observer, screen: FullScreen, place: Place, where: str) -> int:
    console = Console(file=io.StringIO(), force_terminal=True, highlight=False)
    while True:
        width, height = screen.size
        view = observer.newest()
        lines = picture(view, observer.history, place, where, width=width, height=height)
        screen.draw([encoded(console, each) for each in lines])
        data = screen.read(_AGE_S)
        if data is None:
            return 0
        for key in keys_in(data):
            after = place.after(key, view)
            if after is None:
                return 0
            place = after


def encoded(console: Console, line: Text) -> str:
    """Return a line with the escape codes of its styles; without colour where users want none."""
    with console.capture() as printed:
        console.print(line, end="", soft_wrap=True)
    return printed.get()
