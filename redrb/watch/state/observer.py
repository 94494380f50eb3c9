"""`Observer`: looks at a namespace again and again in a thread; `View`: what it knows."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Final

from redrb.connection import Client
from redrb.errors import RedrbError
from redrb.scopes import Closing
from redrb.watch.state.findings import connection_finding, findings_of
from redrb.watch.state.history import History
from redrb.watch.state.model import Finding, State
from redrb.watch.state.reader import StateReader

EVERY_S: Final = 1.0

LOOK_S: Final = 1.5
"""Seconds after which a look fails, so that a Redis that stopped is noticed soon."""


@dataclass(frozen=True, slots=True)
class View:
    """What an observer knows now.

    Attributes:
        state: The newest state; None before the first look succeeded.
        number: Number of looks that succeeded; changes with each new state.
        error: Why the last look failed; "" if it succeeded.
        findings: Troubles that the newest state shows, and the failed look, the worst first.
    """

    state: State | None = None
    number: int = 0
    age_s: float = 0.0
    error: str = ""
    findings: tuple[Finding, ...] = ()


class Observer(Closing):
    """Reads the state of a namespace about once a second; safe among threads.

    While Redis is away the newest view stays, with its age and the reason.
    """

    def __init__(
        self, client: Client, namespace: str, task: str | None = None, *, every_s: float = EVERY_S
    ) -> None:
        """Begin to look, each `every_s` seconds, at one task or, with None, at all."""
        self._reader = StateReader(client, namespace, tasks=None if task is None else [task])
        self._every_s = every_s
        self.history = History()
        self._view = View()
        self._read_at = time.monotonic()
        self._where, self._url = client.where, client.url
        self._of_state: tuple[Finding, ...] = ()  # findings of the newest state
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redrb-observer", daemon=True)
        self._thread.start()

    def newest(self) -> View:
        """Return the newest view; never blocks on Redis."""
        with self._changed:
            return self._now()

    def wait(self, number: int, timeout_s: float, *, error: str = "") -> View:
        """Return a view with another number or another error, or after a time the same again.

        `number` and `error` are those of the newest view that the caller has; -1: it has none.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    (self._view.number, self._view.error) != (number, error)
                    or self._closing.is_set()
                ),
                timeout_s,
            )
            return self._now()

    def close(self) -> None:
        """Look no more; a look that is under way ends by itself."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(LOOK_S)

    def _now(self) -> View:
        return replace(self._view, age_s=time.monotonic() - self._read_at)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._closing.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._every_s, time.monotonic())
            began = time.monotonic()
            try:
                state = self._reader.look(timeout_s=LOOK_S)
                self._note(state, "", began)
            except RedrbError as error:
                self._note(None, str(error), began)
            except Exception as error:  # noqa: BLE001 (shown; the next look may succeed)
                self._note(None, f"the state cannot be read: {error!r:.200}", began)

    def _note(self, state: State | None, error: str, began: float) -> None:
        if state is not None:
            self._of_state = findings_of(state)
        failed = (connection_finding(self._where, error, self._url),) if error else ()
        with self._changed:
            self._view = replace(self._view, error=error, findings=(*failed, *self._of_state))
            if state is not None:
                self._view = replace(self._view, state=state, number=self._view.number + 1)
                self._read_at = began
                self.history.add(state)
            self._changed.notify_all()
