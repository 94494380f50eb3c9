"""The screen of `redrb run`: that of `redrb top`, with the lines of the run above it."""

from __future__ import annotations

import asyncio
import os
import signal

from rich.text import Text

from redrb.cli.run.run import Run
from redrb.cli.top.app import Top
from redrb.cli.top.text import line
from redrb.watch.state.observer import Observer, View


class JobScreen(Top):
    """The live screen of the namespace of a job; to end it is to end the run, as Ctrl-C does."""

    def __init__(self, run: Run, observer: Observer, where: str) -> None:
        super().__init__(observer, where, task=run.job.recipe.task_name)
        self._run = run

    def heading(self, view: View, width: int) -> list[Text]:
        """Return the first lines, and those of the run."""
        return [*super().heading(view, width), *(line(each) for each in self._run.said())]

    def action_end(self, status: int) -> None:  # noqa: ARG002 (the signal decides)
        """End the run, which then ends the screen."""
        os.kill(os.getpid(), signal.SIGINT)


def show_job(run: Run, observer: Observer, where: str) -> None:
    """Show the screen until the run is over; an error of the screen may end it before."""
    screen = JobScreen(run, observer, where)

    async def shown() -> None:
        following = asyncio.create_task(asyncio.to_thread(run.follow))
        following.add_done_callback(lambda _: screen.exit())
        try:
            await screen.run_async()
        finally:
            run.screen_ended()
        await following

    asyncio.run(shown())
