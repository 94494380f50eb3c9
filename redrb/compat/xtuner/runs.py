"""`Run`: the run that a buffer works for, and the one that the groups in Redis are of."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable

from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.keys import check_name, replay_run_key

_log = logging.getLogger("redrb")


class Run:
    """The run of one buffer; thread-safe.

    Attributes:
        name: Its name; that of a run without one is random, until it resumes a save of a run.
    """

    def __init__(self, client: Client, namespace: str, name: str) -> None:
        self._named = name != ""
        self.name = check_name("run", name) if self._named else uuid.uuid4().hex
        self._namespace = namespace
        self._key = replay_run_key(namespace)
        self._client = client.at(self._key)
        self._lock = threading.Lock()
        self._entered = False

    def enter(self, held: Callable[[], int]) -> bool:
        """Check, once, that the groups in Redis are of this run, or that there are none.

        Args:
            held: Returns the number of groups in Redis.

        Returns:
            Whether this call found that the run has begun before, and goes on.

        Raises:
            ConfigError: There are groups of another run.
        """
        if self._entered:
            return False
        with self._lock:
            owner = self._owner()
            if owner != self.name:
                self._check_none(owner, held)
                self._own(self.name)
            elif not self._entered:
                self._say(held())
            first, self._entered = not self._entered, True
        return first and owner == self.name

    def goes_on(self, saved: str, held: Callable[[], int], *, exists: bool) -> bool:
        """Return whether the groups in Redis are of this run, so that a save is not to be restored.

        Args:
            saved: The run that the save is of; "" for none.
            exists: Whether Redis has any task of the buffer.

        Raises:
            ConfigError: There are groups of another run.
        """
        with self._lock:
            owner = self._owner()
            known = owner != "" and owner in (self.name, saved)
            if known and exists:
                self.take_over(owner)
                self._say(held())
                return True
            if not known:
                self._check_none(owner, held)
            if owner:
                self._own("")  # if this process dies now, the next one restores the save
            return False

    def take_over(self, saved: str) -> None:
        """Make the groups in Redis those of this run, which is from now on that of the save."""
        if saved and not self._named:
            self.name = saved
        self._own(self.name)
        self._entered = True

    def _owner(self) -> str:
        found: bytes = self._client.execute("GET", self._key) or b""
        return found.decode(errors="replace")

    def _own(self, name: str) -> None:
        self._client.execute("SET", self._key, name)

    def _check_none(self, owner: str, held: Callable[[], int]) -> None:
        if owner and (groups := held()):
            raise ConfigError(
                f"namespace {self._namespace!r} holds {groups} groups of another run, "
                f"{owner!r:.140}. To go on with it, resume a checkpoint of it, or give this name "
                f"as run=. To begin another run, give another namespace, or delete the tasks "
                f"(`redrb rm --namespace {self._namespace} TASK`)."
            )

    def _say(self, groups: int) -> None:
        _log.warning(
            "run %r goes on with the %d groups that Redis holds in namespace %r",
            self.name,
            groups,
            self._namespace,
        )
