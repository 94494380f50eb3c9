"""`--watch`: a command that looks at Redis looks again and again, until Ctrl-C."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout

from redrb import environment
from redrb.errors import RedrbError, StoreError
from redrb.words import counted, printable_lines

Run = Callable[[argparse.Namespace], int]

DEFAULT_S = 2.0
_LEAST_S = 0.1
LOOK_S = 2.0
"""Seconds that one look may take by default: then it has failed, and the next one tries again."""

_HOME, _END_OF_LINE, _END = "\x1b[H", "\x1b[K", "\x1b[J"


def add_watch(
    parser: argparse.ArgumentParser,
    *,
    default_s: float = DEFAULT_S,
    look_s: float | None = LOOK_S,
    repeats: bool = True,
) -> None:
    """Add the option to a command.

    `look_s` is for how long one look may take; None: the command sees to it. Without `repeats` the
    command reads `options.watch` itself, else its `run` is called for each look.
    """
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=default_s,
        metavar="SECONDS",
        help=f"look again and again until Ctrl-C, each {default_s:g} s or as many as given",
    )
    if repeats:
        parser.set_defaults(
            run=_repeated(parser.get_default("run"), look_s or threading.TIMEOUT_MAX)
        )


def has_screen() -> bool:
    """Return whether the output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and environment.variable("TERM", "dumb") not in ("dumb", "unknown")


def _repeated(run: Run, look_s: float) -> Run:
    """Return a function that runs a command once, or with `--watch` until Ctrl-C."""

    def looked(options: argparse.Namespace) -> int:
        if options.watch is None:
            return run(options)
        never = threading.Event()
        draw = has_screen() and not options.json
        while True:
            began = time.monotonic()
            _draw(run, options, look_s) if draw else _print(run, options, look_s)
            never.wait(max(0.0, began + options.watch - time.monotonic()))

    return looked


def _print(run: Run, options: argparse.Namespace, look_s: float) -> None:
    """Look once; that Redis is away is said, and the next look tries again."""
    from redrb.connection.deadline import Deadline

    try:
        with Deadline(at_most=look_s):
            run(options)
    except StoreError as error:
        print(f"redrb: {printable_lines(str(error))}", file=sys.stderr, flush=True)


def _draw(run: Run, options: argparse.Namespace, look_s: float) -> None:
    picture = _Picture()
    try:
        with redirect_stdout(picture), redirect_stderr(picture):
            _print(run, options, look_s)
    except RedrbError:
        print()  # the message of the error follows the last picture
        raise
    size = os.get_terminal_size(sys.stdout.fileno())
    width, height = size.columns or 80, size.lines or 24  # a terminal may not know its size
    heading = f"each {options.watch:g} s, at {time.strftime('%H:%M:%S')}; Ctrl-C ends"
    lines = [heading[:width], ""]
    for line in picture.getvalue().splitlines():
        lines += _folded(line, width)
    sys.stdout.write(_HOME + f"{_END_OF_LINE}\n".join(_within(lines, height)) + _END)
    sys.stdout.flush()


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width and line.isascii():
        return [line]
    from rich.console import Console
    from rich.text import Text

    return [part.plain for part in Text(line).wrap(Console(width=width), width, overflow="fold")]


def _within(lines: Sequence[str], height: int) -> list[str]:
    """Return lines that fit a terminal's height, the last of which says how many do not."""
    if len(lines) < height:
        return [*lines, ""]
    hidden = len(lines) - height + 2
    return [*lines[: height - 2], f"... {counted(hidden, 'more line')}", ""]


class _Picture(io.StringIO):
    """Text for a terminal: tables become as wide as it is."""

    def isatty(self) -> bool:
        return True


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _LEAST_S <= seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, {_LEAST_S} or more")
    return seconds
