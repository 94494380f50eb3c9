"""`Top`: the live screen of a namespace, drawn by Textual."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import Footer, OptionList, Static

from redrb.cli.top.heading import finding_lines, finding_page, findings_head, heading
from redrb.cli.top.pages import chosen_task, help_page, nothing, task_page, worker_page
from redrb.cli.top.tables import (
    staleness_table,
    tables_table,
    task_table,
    weights_table,
    worker_table,
)
from redrb.cli.top.text import HEAD, line
from redrb.watch.state.model import Finding, State
from redrb.watch.state.observer import Observer, View

_DRAW_S = 0.5

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the program with the terminal restored."""

Lines = Callable[[View, int], list[Text]]
"""Returns the lines of a page, of at most so many columns."""


class Rows(OptionList):
    """Rows of which one is selected, by its name: it stays selected when others come and go."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "cursor_down", "select", key_display="arrows"),
        Binding("up,k", "cursor_up", show=False),
        Binding("enter,right", "select", "show all", key_display="Enter"),
    ]
    _names: Sequence[str] = ()

    @property
    def chosen(self) -> str:
        """Name of the selected row; "": none is."""
        at = self.highlighted
        return self._names[at] if at is not None and at < len(self._names) else ""

    def fill(self, rows: Sequence[Text], names: Sequence[str], chosen: str) -> None:
        """Show rows, of which those with a name can be selected: this one, or the first."""
        at = self.highlighted
        if at is None or list(names[at : at + 1]) != [chosen]:  # several may have the same name
            first = 0 if names else None
            at = names.index(chosen) if chosen in names else first
        self._names = names
        with self.prevent(OptionList.OptionHighlighted):
            if len(rows) == self.option_count:
                for number, row in enumerate(rows):
                    self.replace_option_prompt_at_index(number, row)
            else:
                self.set_options(rows)
            self.highlighted = at


class Section(Vertical):
    """A heading, and rows that scroll if there is no room for all."""

    def __init__(self) -> None:
        super().__init__()
        self._head, self.rows = Static(), Rows(compact=True)

    def compose(self) -> ComposeResult:
        """Put the rows below the heading."""
        yield self._head
        yield self.rows

    def fill(self, lines: Sequence[Text], names: Sequence[str], chosen: str = "") -> None:
        """Show heading and rows, and select the row of this name, or the one as before."""
        head, *rows = lines
        self._head.update(head)
        self.rows.fill(rows, names, chosen or self.rows.chosen)
        self.styles.max_height = 1 + sum(1 + row.plain.count("\n") for row in rows)


class Picture(Screen[None]):
    """A screen with the heading, drawn again and again."""

    app: Top

    def __init__(self) -> None:
        super().__init__()
        self._heading = Static()

    def draw(self) -> None:
        """Show the newest view, unless another screen is shown."""
        if self.is_current:
            view = self.app.observer.newest()
            lines = self.app.heading(view, self.size.width)
            self._heading.update(_joined(lines))
            size = Size(self.size.width - 1, self.size.height - len(lines) - 1)
            self.draw_below(view, size)

    def draw_below(self, view: View, size: Size) -> None:
        """Show a view below the heading, in the room without the footer and a scroll bar."""
        raise NotImplementedError

    def on_mount(self) -> None:
        """Draw again and again, as figures become older."""
        self.set_interval(_DRAW_S, self.draw)

    def on_screen_resume(self) -> None:
        """Draw at once."""
        self.draw()

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.draw()


class Overview(Picture):
    """Tasks, the workers of the selected one, tables, weights, findings, and staleness."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "app.focus_next", "next list", key_display="Tab")
    ]

    def __init__(self) -> None:
        super().__init__()
        self._tasks, self._workers, self._findings = Section(), Section(), Section()
        self._weights, self._staleness = Static(classes="table"), Static(classes="table")

    def compose(self) -> ComposeResult:
        """Put the sections below each other."""
        yield self._heading
        yield self._tasks
        yield self._workers
        yield self._weights
        yield self._findings
        yield self._staleness
        yield Footer(compact=True)

    def draw_below(self, view: View, size: Size) -> None:
        """Show the sections for which the view has something."""
        self._findings.fill(
            [
                findings_head(view.findings),
                *(_joined(finding_lines(finding, size.width)) for finding in view.findings),
            ],
            [_name(finding) for finding in view.findings],
        )
        state = view.state
        known = state is not None and bool(state.tasks or state.tables or state.weights)
        self._tasks.display = self._workers.display = known
        _show(self._weights, [] if known or state is None else [nothing(state)])
        _show(self._staleness, [])
        if state is not None and known:
            self._draw_state(state, size.width)
        self._share(size.height)

    def _draw_state(self, state: State, width: int) -> None:
        task = chosen_task(state, self.app.selected)
        name = self.app.selected or (task.name if task else "")
        table = task_table(state.shown, state.tasks_total, self.app.observer.history, width)
        self._tasks.fill(table, [each.name for each in state.shown], name)
        table = worker_table(task, name, width)
        workers = [each.name for each in task.workers] if task else []
        self._workers.fill(table, workers)
        lines = tables_table(state, width) if state.tables else []
        if state.weights:
            lines += [*([line()] if lines else []), *weights_table(state, width)]
        _show(self._weights, lines)
        if task is not None and task.main is not None:
            _show(self._staleness, staleness_table(name, task.main.staleness, width))

    def _share(self, height: int) -> None:
        """Part the sections by empty lines, and show staleness, if there is room for it."""
        limits = [part.styles.max_height for part in self.children]
        needs = [limit.value for limit in limits if limit is not None]
        self.set_class(sum(needs) + len(needs) <= height, "spaced")
        self._staleness.display = sum(needs) <= height

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show the workers of the task that was selected."""
        if event.option_list is self._tasks.rows:
            self.app.selected = self._tasks.rows.chosen
            self.draw()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Show all about a row."""
        for section, page in (
            (self._tasks, self._task_page),
            (self._workers, self._worker_page),
            (self._findings, _finding_page),
        ):
            if event.option_list is section.rows and section.rows.chosen:
                self.app.push_screen(page(section.rows.chosen))

    def _task_page(self, name: str) -> Page:
        def lines(view: View, width: int) -> list[Text]:
            task = view.state.task(name) if view.state else None
            return task_page(task, name, self.app.observer.history, width)

        return Page(f"TASK {name}", lines)

    def _worker_page(self, name: str) -> Page:
        selected = self.app.selected

        def lines(view: View, _width: int) -> list[Text]:
            task = chosen_task(view.state, selected) if view.state else None
            workers = task.workers if task else ()
            return worker_page(next((one for one in workers if one.name == name), None), task)

        return Page("WORKER", lines)


class Scrolled(VerticalScroll):
    """Lines that scroll."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "scroll_down", "scroll", key_display="arrows"),
        Binding("up,k", "scroll_up", show=False),
    ]


class Page(Picture):
    """A page of lines: all about one row, or the help."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,left", "app.back", "back", key_display="Escape", priority=True)
    ]

    def __init__(self, title: str, lines: Lines) -> None:
        """Make the page that shows these lines below its title."""
        super().__init__()
        self._top, self._shown, self._lines = Static(line((title, HEAD))), Static(), lines

    def compose(self) -> ComposeResult:
        """Put the lines below the title."""
        yield self._heading
        yield self._top
        with Scrolled():
            yield self._shown
        yield Footer(compact=True)

    def draw_below(self, view: View, size: Size) -> None:
        """Show the lines."""
        self._shown.update(_joined(self._lines(view, size.width)))


class Help(Page):
    """The help; the key that opens it closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,h,q", "app.back", "back", key_display="?")
    ]


class Top(App[int]):
    """The live screen of a task, at first the first one with workers."""

    CSS = """
    Static { text-wrap: nowrap; text-overflow: ellipsis; }
    Section { height: 1fr; min-height: 3; }
    .spaced > Section, .spaced > .table { margin: 1 0 0 0; }
    Rows { height: 1fr; scrollbar-size-vertical: 1; }
    Rows > .option-list--option-highlighted { text-style: bold; }
    Rows:focus > .option-list--option-highlighted { text-style: reverse; }
    Scrolled { scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,h", "help", "help", key_display="?"),
        Binding("q", "end(0)", "end"),
        Binding("ctrl+c", "end(130)", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, observer: Observer, where: str, *, task: str = "") -> None:
        """Make the screen; `show` runs it."""
        super().__init__(ansi_color=True)  # the terminal's own colours
        self.observer, self.where, self.selected = observer, where, task
        self.theme = "ansi-dark"

    def get_default_screen(self) -> Screen[None]:
        """Begin with everything."""
        return Overview()

    def heading(self, view: View, width: int) -> list[Text]:
        """Return the first lines of every screen."""
        return heading(view, self.where, width)

    def show(self) -> int:
        """Run until the user ends it, or a signal; returns the exit status."""

        async def shown() -> int | None:
            for number in _ENDING:
                asyncio.get_running_loop().add_signal_handler(number, self.exit, 128 + number)
            return await self.run_async()

        status = asyncio.run(shown())
        return (self.return_code or 0) if status is None else status

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(Help("HELP", lambda _view, _width: help_page()))

    def action_end(self, status: int) -> None:
        """End with an exit status."""
        self.exit(status)


def _joined(lines: Sequence[Text]) -> Text:
    return Text("\n", no_wrap=True).join(lines)


def _show(shown: Static, lines: Sequence[Text]) -> None:
    shown.update(_joined(lines))
    shown.styles.max_height = len(lines)


def _finding_page(name: str) -> Page:
    def lines(view: View, width: int) -> list[Text]:
        return finding_page(next((one for one in view.findings if _name(one) == name), None), width)

    return Page("FINDING", lines)


def _name(finding: Finding) -> str:
    return f"{finding.code} {finding.subject}"
