"""The screen of `redrb run`: that of `redrb top`, with the lines of the run above it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

from rich.text import Text

from redrb.commands.top.app import Top
from redrb.commands.top.text import line
from redrb.state.observer import Observer, View


class JobScreen(Top):
    """The live screen of the namespace of a job; to end it is to end the run, as Ctrl-C does."""

    def __init__(
        self, observer: Observer, where: str, task: str, said: Callable[[], Sequence[str]]
    ) -> None:
        super().__init__(observer, where, task=task)
        self._said = said

    def heading(self, view: View, width: int) -> list[Text]:
        """Return the first lines, and those of the run."""
        return [*super().heading(view, width), *(line(each) for each in self._said())]

    def action_end(self, status: int) -> None:  # noqa: ARG002 (the signal decides)
        """End the run, which then ends the screen."""
        os.kill(os.getpid(), signal.SIGINT)


def show_job(
    observer: Observer,
    where: str,
    task: str,
    follow: Callable[[], None],
    said: Callable[[], Sequence[str]],
    closed: Callable[[], None],
) -> None:
    """Show the screen while `follow`, which runs in a thread, follows the run to its end.

    `closed` is called when the screen has ended: an error of the screen may end it before the run.
    """
    screen = JobScreen(observer, where, task, said)

    async def shown() -> None:
        following = asyncio.create_task(asyncio.to_thread(follow))
        following.add_done_callback(lambda _: screen.exit())
        try:
            await screen.run_async()
        finally:
            closed()
        await following

    asyncio.run(shown())
