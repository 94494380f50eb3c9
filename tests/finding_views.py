"""The findings of a namespace, as `redrb top`, the live page and `redrb doctor` show them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from redrb.environment import PREFIX, child_environment
from redrb.scopes import Closing
from tests import warm
from tests.dashboards import Dashboard

REDRB = (sys.executable, "-m", "redrb.cli")
EVERY_S = "0.3"

Record = dict[str, Any]
"""One line of JSON of a view."""


VIEWS = ("top", "page", "doctor")


def codes(record: Record) -> list[tuple[str, str]]:
    """Return code and subject of each finding of a record."""
    return [(finding["code"], finding["subject"]) for finding in record["findings"]]


class FindingViews(Closing):
    """Watches a namespace in three ways, each of them in a process of its own.

    Attributes:
        newest: The newest record of "top", "page" and "doctor".
    """

    def __init__(self, url: str, namespace: str) -> None:
        self.newest: dict[str, Record] = {}
        self._changed = threading.Condition()
        self._dashboard = Dashboard(url, namespace)
        self._processes = [self._dashboard.process]
        self._threads: list[threading.Thread] = []
        self._start("page", self._events())
        common = ("--namespace", namespace, "--json", "--watch", EVERY_S)
        for view, words in (("top", ["top"]), ("doctor", ["doctor", "--over", "0.2"])):
            process = warm.Popen(
                [*REDRB, *words, *common],
                env=child_environment(without=PREFIX, REDRB_URL=url),
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)
            assert process.stdout is not None
            self._start(view, process.stdout)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join(20)
        for process in self._processes:
            process.wait(20)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def until(self, seen: Callable[[Record], object], end: float, *views: str) -> None:
        """Wait until each view has shown something.

        Args:
            seen: Whether a record shows it.
            end: The time by which it must be shown, by the clock of `time.monotonic`.
            views: The views; none: all three.

        Raises:
            AssertionError: A view has not shown it in time.
        """
        missing = set(views or VIEWS)
        with self._changed:
            while True:
                known = {view: self.newest[view] for view in missing & self.newest.keys()}
                missing -= {view for view, record in known.items() if seen(record)}
                if not missing:
                    return
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    shown = {view: codes(record) for view, record in known.items()}
                    raise AssertionError(f"not shown by {missing} in time; shown is {shown}")

    def _start(self, view: str, lines: Iterator[str]) -> None:
        thread = threading.Thread(target=self._read, args=(view, lines))
        thread.start()
        self._threads.append(thread)

    def _read(self, view: str, lines: Iterator[str]) -> None:
        """Note what each line of JSON shows."""
        for line in lines:
            with self._changed:
                self.newest[view] = json.loads(line)
                self._changed.notify_all()

    def _events(self) -> Iterator[str]:
        """Yield the data of the page's events until the dashboard ends."""
        name = ""
        try:
            with httpx.stream("GET", f"{self._dashboard.url}events", timeout=20) as page:
                for line in page.iter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data" and name == "view":
                        yield value
        except httpx.RemoteProtocolError:  # the dashboard was killed
            return
