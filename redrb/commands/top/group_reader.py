"""`GroupReader`: reads groups in a thread, so that the screen that shows them never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from redrb.errors import RedrbError

if TYPE_CHECKING:
    from redrb.browse import Page
    from redrb.connection import Client

EVERY_S: Final = 3.0
"""Seconds between two looks at the same list."""

LOOK_S: Final = 1.5
"""Seconds after which a look sends no further request."""

COUNT: Final = 20
"""Groups of a list."""

_LISTED_BYTES: Final = 1 << 20
_OPENED_BYTES: Final = 16 << 20
"""Bytes above which a group of a list, or an opened one, is not read."""

_SAMPLES: Final = 16
_TOKENS: Final = 1_024
_TEXT: Final = 2_048


@dataclass(frozen=True, slots=True)
class Wanted:
    """The groups that the screen shows.

    Attributes:
        task: Name of the task.
        consumers: Consumer group whose view of the groups is shown.
        status: Groups to list, as `Choice.status` has it; "": the newest ones.
        opened: Id of the group of which everything is shown; 0: a list.
    """

    task: str
    consumers: str = "default"
    status: str = ""
    opened: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The groups that were read.

    Attributes:
        page: The groups; None before they have been read.
        error: Why the last look failed; "" if it succeeded.
        read_at: `time.monotonic()` of the look that read them.
    """

    page: Page | None = None
    error: str = ""
    read_at: float = 0.0

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the groups, in the order of the rows."""
        return tuple(view.id for view in self.page.groups) if self.page else ()

    @property
    def age_s(self) -> float:
        """Seconds since the groups were read."""
        return time.monotonic() - self.read_at


class GroupReader:
    """Reads groups of a namespace without leasing them, each time within `LOOK_S`.

    A list is read again each `EVERY_S` while it is shown, an opened group once. A look that
    fails leaves the groups as they are, and is tried again.
    """

    def __init__(self, client: Client, namespace: str, wake: Callable[[], None]) -> None:
        """Prepare to read; nothing is read, and no thread runs, before groups are wanted.

        Args:
            client: A client.
            namespace: The namespace.
            wake: Is called in the thread after each look.
        """
        self._client, self._namespace, self._wake = client, namespace, wake
        self._wanted: Wanted | None = None
        self._found: dict[Wanted, Found] = {}
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def show(self, wanted: Wanted | None) -> Found:
        """Return what is known of the wanted groups; never blocks on Redis.

        Args:
            wanted: The groups that are shown from now on; None: none.
        """
        with self._changed:
            if wanted != self._wanted:
                self._wanted = wanted
                self._changed.notify()
            if wanted is None:
                return Found()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="redrb-groups", daemon=True)
                self._thread.start()
            return self._found.get(wanted, Found())

    def close(self) -> None:
        """Read no more; a look that is under way ends by itself."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(LOOK_S)

    def _run(self) -> None:
        before: Wanted | None = None
        while True:
            with self._changed:
                if self._wanted == before and not self._closing:
                    self._changed.wait(EVERY_S)
                if self._closing:
                    return
                wanted, again = self._wanted, self._wanted == before
                known = self._found.get(wanted, Found()) if wanted else Found()
            before = wanted
            complete = known.page is not None and not known.error
            if wanted is None or (wanted.opened and again and complete):
                continue
            found = self._look(wanted, known)
            with self._changed:
                lists = {each: old for each, old in self._found.items() if not each.opened}
                self._found = {**(lists if wanted.opened else {}), wanted: found}
            self._wake()

    def _look(self, wanted: Wanted, known: Found) -> Found:
        from redrb.browse.browser import Browser
        from redrb.browse.choice import Choice
        from redrb.browse.limits import Limits

        nbytes = _OPENED_BYTES if wanted.opened else _LISTED_BYTES
        browser = Browser(
            self._client,
            wanted.task,
            namespace=self._namespace,
            group=wanted.consumers,
            limits=Limits(group_bytes=nbytes, samples=_SAMPLES, tokens=_TOKENS, text=_TEXT),
            timeout_s=LOOK_S,
        )
        if wanted.opened:
            choice = Choice(ids=(wanted.opened,))
        else:
            choice = Choice(status=wanted.status or None, count=COUNT)
        try:
            page = browser.look(choice, full=bool(wanted.opened))
        except RedrbError as error:
            return replace(known, error=str(error))
        return Found(page, "", time.monotonic())
