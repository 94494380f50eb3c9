"""`redrb top`: shows the whole state of a namespace, live, as text or as JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from redrb.cli.arguments import Commands, add_command, add_flag
from redrb.cli.watching import add_watch, has_screen

if TYPE_CHECKING:
    from redrb.connection import Client
    from redrb.watch.state.history import History
    from redrb.watch.state.observer import Observer, View

_TEXT = (
    "show tasks, workers, tables, weights and troubles, live. On a terminal the picture is drawn "
    "again for each new state, with the age of its figures; press ? for help. Elsewhere, and on a "
    "terminal without cursor (TERM=dumb), it prints one picture and ends; with --watch one after "
    "another. A picture that is printed takes several looks, for 6 s at most, since rates need "
    "them. NO_COLOR turns colours off."
)
_EVERY_S = 1.0
_LOOK_S = 5.0
"""Seconds to wait for a look; the observer gives one up before."""

_RATES_S = 4.0
"""Seconds to wait for the rates of workers: a live one announces itself each 2.5 s at least."""


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "top",
        _TEXT,
        _run,
        subject=None,
        json_text="print one line of JSON; with --watch one for each look",
    )
    parser.add_argument(
        "task",
        metavar="TASK",
        nargs="?",
        default="",
        help="the task or table selected first",
    )
    add_flag(parser, "--once", "print one picture and end")
    add_watch(parser, default_s=_EVERY_S, repeats=False)


def _run(options: argparse.Namespace) -> int:
    from redrb.keys import TaskKeys

    if options.task:
        TaskKeys.of(options.namespace, options.task.replace("@*", "@0"))  # checks the name
    if options.once or options.json or not is_live():
        return _print_pictures(options)
    with _observed(options) as (client, observer):
        from redrb.cli.top.app import Top

        return Top(observer, _where(client, options), task=options.task).show()


def is_live() -> bool:
    """Return whether a live screen can be drawn, and keys be read."""
    return has_screen() and sys.stdin.isatty()


@contextmanager
def _observed(options: argparse.Namespace) -> Iterator[tuple[Client, Observer]]:
    from redrb.connection import connect
    from redrb.watch.state.observer import Observer

    every_s = options.watch or _EVERY_S
    with (
        connect(options.url, retry_s=0) as client,
        Observer(client, options.namespace, every_s=every_s) as observer,
    ):
        yield client, observer


def _print_pictures(options: argparse.Namespace) -> int:
    from redrb import environment
    from redrb.errors import StoreUnavailable

    try:
        with _observed(options) as (client, observer):
            return _print(observer, client, options)
    except StoreUnavailable as error:
        from redrb.watch.state.findings import connection_finding
        from redrb.watch.state.history import History
        from redrb.watch.state.observer import View

        where = error.where or "Redis"
        url = options.url or environment.variable(environment.URL)
        view = View(error=str(error), findings=(connection_finding(where, str(error), url),))
        _show(view, History(), options, f"namespace {options.namespace} at {where}")
        raise


def _print(observer: Observer, client: Client, options: argparse.Namespace) -> int:
    from redrb.errors import StoreUnavailable
    from redrb.stream.task.lookup import unknown_task

    again = options.watch is not None and not options.once
    view = observer.wait(0, _LOOK_S)
    if view.state is not None:
        view = observer.wait(view.number, _LOOK_S)  # a first look has no rates
    if not again:
        view = _with_rates(observer, view)
    every_s = options.watch or _EVERY_S
    while True:
        if view.state is None and not again:
            why = view.error or "Redis did not answer in time."
            raise StoreUnavailable(why, where=client.where)
        if options.task and view.state and not (again or view.state.has(options.task)):
            raise unknown_task(client, options.namespace, options.task)
        _show(view, observer.history, options, _where(client, options))
        if not again:
            return 1 if view.error else 0
        spare_s = 0.0 if view.error else _LOOK_S  # while Redis is away, the figures become older
        view = observer.wait(view.number, every_s + spare_s, error=view.error)


def _with_rates(observer: Observer, view: View) -> View:
    """Return a view with the rate of each live worker, which is between two announcements of it.

    A worker that does not announce itself in time stays without.
    """
    until = time.monotonic() + _RATES_S

    def is_missing() -> bool:
        return view.state is not None and any(
            worker.life == "live" and worker.groups_per_s is None
            for task in view.state.tasks
            for worker in task.workers
        )

    while is_missing() and not view.error and (left := until - time.monotonic()) > 0:
        view = observer.wait(view.number, left)
    return view


def _show(view: View, history: History, options: argparse.Namespace, place: str) -> None:
    from dataclasses import asdict

    from redrb.cli.output import show
    from redrb.cli.top.pages import picture

    lines = picture(view, history, options.task, place)
    show(asdict(view), (each.plain.rstrip() for each in lines), as_json=options.json)


def _where(client: Client, options: argparse.Namespace) -> str:
    return f"namespace {options.namespace} at {client.where}"
