"""The live screen of `redrb top`: its pictures, its keys, and the mouse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from redrb.cli.top.app import Top
from redrb.watch.state.history import History
from redrb.watch.state.model import State
from redrb.watch.state.observer import View
from tests.sample_state import history_of, sample_state, view_of
from tests.unit.test_top_picture import HOSTILE

SIZES = {"80x24": (80, 24), "120x40": (120, 40)}
PAGES = {
    "overview": (),
    "task": ("enter",),
    "worker": ("tab", "down", "down", "enter"),
}
WHERE = "namespace default at 127.0.0.1:6379/0"


class Observer:
    """Has one view until another one is put in its place."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.history = history_of(view.state) if view.state else History()

    def newest(self) -> View:
        return self.view


def top(view: View, **options: Any) -> Top:
    return Top(Observer(view), options.pop("where", WHERE), **options)


def shown(pilot: Pilot[Any]) -> list[str]:
    """Return the lines of the screen."""
    strips = pilot.app.screen._compositor.render_strips()
    return [strip.text for strip in strips]


async def drawn(pilot: Pilot[Any]) -> None:
    """Wait until the page has its footer, which comes last."""
    end = time.monotonic() + 30
    await pilot.pause()
    while "end" not in shown(pilot)[-1]:
        assert time.monotonic() < end, shown(pilot)
        await pilot.pause(0.01)


def run(
    app: Top, use: Callable[[Pilot[Any]], Awaitable[None]], size: tuple[int, int] = (80, 24)
) -> None:
    """Run a program, and use it."""

    async def running() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await use(pilot)

    asyncio.run(running())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("page", PAGES)
def test_pages_look_as_they_did(page, size, snap_compare):
    async def open_page(pilot):
        await drawn(pilot)
        for key in PAGES[page]:
            await pilot.press(key)
            await drawn(pilot)

    assert snap_compare(
        top(view_of(sample_state())), run_before=open_page, terminal_size=SIZES[size]
    )


def hostile_state() -> State:
    state = sample_state()
    tasks = tuple(
        replace(
            task,
            name=task.name + HOSTILE,
            order=HOSTILE,
            settings={HOSTILE: HOSTILE},
            workers=tuple(
                replace(
                    each, name=HOSTILE, host=HOSTILE, redrb=HOSTILE, metrics={HOSTILE: float("nan")}
                )
                for each in task.workers
            ),
        )
        for task in state.tasks
    )
    weights = tuple(replace(each, name=HOSTILE, kind=HOSTILE) for each in state.weights)
    servers = tuple(replace(each, version=HOSTILE) for each in state.servers)
    return replace(state, namespace=HOSTILE, tasks=tasks, weights=weights, servers=servers * 3)


@pytest.mark.parametrize(
    ("view", "size"),
    [
        (view_of(hostile_state()), (80, 24)),
        (view_of(hostile_state()), (20, 3)),
        (view_of(None, error=HOSTILE), (1, 1)),
    ],
)
def test_every_page_is_drawn_in_every_terminal(view, size):
    async def visit(pilot):
        for key in ("enter", "escape", "tab", "enter", "escape", "tab", "enter", "question_mark"):
            await pilot.press(key)
            assert all(line.isprintable() for line in shown(pilot))

    run(top(view, where=HOSTILE), visit, size)


def test_keys_select_rows_and_open_pages():
    async def use(pilot):
        for key, text in (
            ("k", "WORKERS of code (0)"),
            ("enter", "TASK code"),
            ("j", "TASK code"),
            ("left", "WORKERS of code (0)"),
            ("down", "WORKERS of math (5)"),
            ("tab", "WORKERS of math (5)"),
            ("end", "WORKERS of math (5)"),
            ("right", "trainer of task math"),
            ("question_mark", "A group is all samples of one prompt."),
            ("q", "trainer of task math"),
            ("h", "A group is all samples of one prompt."),
            ("question_mark", "trainer of task math"),
            ("escape", "FINDINGS"),
            ("shift+tab", "FINDINGS"),
            ("shift+tab", "FINDINGS"),
            ("end", "FINDINGS"),
            ("enter", "redrb set math limit=8192"),
            ("backspace", "TASKS (2)"),
        ):
            await pilot.press(key)
            end = time.monotonic() + 30
            while text not in "\n".join(shown(pilot)):
                assert time.monotonic() < end, key
                await pilot.pause(0.01)
        await pilot.press("q")

    app = top(view_of(sample_state()))
    run(app, use)
    assert app.return_value == 0


@pytest.mark.parametrize("page", PAGES)
def test_ctrl_c_ends_it_anywhere(page):
    async def use(pilot):
        await pilot.press(*PAGES[page], "ctrl+c")

    app = top(view_of(sample_state()))
    run(app, use)
    assert app.return_value == 130


def test_a_click_opens_a_row_and_the_wheel_scrolls():
    async def use(pilot):
        [row] = [at for at, each in enumerate(shown(pilot)) if each.startswith("  gpu-02-977")]
        await pilot.click(offset=(4, row))
        await pilot.pause()
        assert "977 on gpu-02" in "\n".join(shown(pilot))
        await pilot.press("escape", "enter")

    run(top(view_of(sample_state())), use)


def test_a_row_stays_selected_when_others_come_and_go():
    state = sample_state()
    code, math = state.tasks
    many = tuple(replace(math.workers[0], name=f"maker-{number}") for number in range(150))
    crowded = replace(math, workers=many, workers_total=400)
    app = top(view_of(replace(state, tasks=(code, crowded))))

    async def use(pilot):
        await pilot.press("tab", "end", "up")
        assert "WORKERS of math (400)" in "\n".join(shown(pilot))
        assert "maker-148" in "\n".join(shown(pilot))
        fewer = replace(crowded, workers=many[100:])
        app.observer.view = view_of(replace(state, tasks=(fewer, code)))
        app.screen.draw()
        await pilot.press("enter")
        assert "maker-148" in "\n".join(shown(pilot))
        assert "maker of task math" in "\n".join(shown(pilot))

    run(app, use)
