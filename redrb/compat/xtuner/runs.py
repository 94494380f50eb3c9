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

    def __init__(
        self, client: Client, namespace: str, name: str, *, held: Callable[[], int]
    ) -> None:
        """`held` returns the number of groups in Redis; it is called with the lock held."""
        self._named = name != ""
        self.name = check_name("run", name) if self._named else uuid.uuid4().hex
        self._namespace, self._held = namespace, held
        self._key = replay_run_key(namespace)
        self._client = client.at(self._key)
        self._lock = threading.Lock()
        self._entered = False

    def enter(self) -> bool:
        """At the first call, check that the groups in Redis are of this run, or take none over.

        Returns:
            Whether this is the first call, and the run has begun before and goes on.

        Raises:
            ConfigError: There are groups of another run.
        """
        with self._lock:
            if self._entered:
                return False
            begun = self._is_owner(self.name)
            self.take_over("")
            return begun

    def goes_on(self, saved: str, *, exists: bool) -> bool:
        """Return whether Redis has this run or that of a save, which is then not restored.

        Args:
            saved: The run that the save is of; "" for none.
            exists: Whether Redis has any task of the buffer.

        Raises:
            ConfigError: There are groups of another run.
        """
        names = (saved, self.name) if self._named else (saved,)
        with self._lock:
            if self._is_owner(*names, said=exists) and exists:
                self.take_over(saved)
                return True
            self._own("")  # if this process dies now, the next one restores the save
            return False

    def take_over(self, saved: str) -> None:
        """Make the groups in Redis those of this run, which is from now on that of the save."""
        if saved and not self._named:
            self.name = saved
        self._own(self.name)
        self._entered = True

    def own_again(self) -> None:
        """Name the run again, if Redis has lost its name since this run has begun."""
        if self._entered:
            self._client.execute("SET", self._key, self.name, "NX")

    def _is_owner(self, *names: str, said: bool = True) -> bool:
        found: bytes = self._client.execute("GET", self._key) or b""
        owner, groups = found.decode(errors="replace"), self._held() if found else 0
        if found and owner in names:
            if said:
                _log.warning("run %r goes on with the %d groups that Redis holds", owner, groups)
            return True
        if groups:
            raise ConfigError(
                f"namespace {self._namespace!r} holds {groups} groups of another run, "
                f"{owner!r:.140}. To go on with it, resume a checkpoint of it, or give this name "
                f"as run=. To begin another run, give another namespace, or delete the tasks "
                f"(`redrb rm --namespace {self._namespace} TASK`)."
            )
        return False

    def _own(self, name: str) -> None:
        self._client.execute("SET", self._key, name)
