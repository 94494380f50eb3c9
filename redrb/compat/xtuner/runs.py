"""`Run`: the run that a buffer works for, and the one that the groups in Redis are of."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable

from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.keys import replay_run_key

_log = logging.getLogger("redrb")


class Run:
    """The run of one buffer; thread-safe.

    A namespace without groups is of the run whose call was last, and every call asks again. Groups
    of no run, which makers without one put, are taken over by the first run that meets them.

    Attributes:
        name: Its name; that of a run without one is random, until it resumes a save of a run.
    """

    def __init__(
        self, client: Client, namespace: str, name: str, *, held: Callable[[], int]
    ) -> None:
        """`held` returns the number of groups in Redis; it is called with the lock held."""
        self._named = name != ""
        self.name = name or uuid.uuid4().hex
        self._namespace, self._held = namespace, held
        self._key = replay_run_key(namespace)
        self._client = client.at(self._key)
        self._lock = threading.Lock()
        self._entered = False

    def enter(self) -> bool:
        """Check that the groups in Redis are of this run, or of none.

        Returns:
            Whether this is the first call, and the run goes on with groups in Redis.

        Raises:
            ConfigError: There are groups of another run.
        """
        with self._lock:
            owner, first = self._owner(), not self._entered
            if owner in (self.name, "") and not first:  # "": the restore names the run at its end
                return False
            groups = self._checked(owner, own=owner == self.name)
            self.take_over("")
            return first and groups > 0

    def goes_on(self, saved: str, *, exists: bool) -> bool:
        """Return whether Redis has this run or that of a save, which is then not restored.

        Args:
            saved: The run that the save is of; "" for none.
            exists: Whether Redis has any task of the buffer.

        Raises:
            ConfigError: There are groups of another run.
        """
        names = {saved, self.name} if self._named else {saved}
        with self._lock:
            owner = self._owner()
            own = owner in names - {""}
            groups = 0 if own and not exists else self._checked(owner, own=own)
            if exists and (own or (owner is None and groups)):
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

    def _owner(self) -> str | None:
        """Return the run that Redis names; "" while a save is restored, None if it names none."""
        found: bytes | None = self._client.execute("GET", self._key)
        return None if found is None else found.decode(errors="replace")

    def _checked(self, owner: str | None, *, own: bool) -> int:
        """Return the number of groups in Redis, or raise ConfigError if they are of another run."""
        groups = self._held()
        if own:
            _log.warning("run %r goes on with the %d groups that Redis holds", owner, groups)
        elif owner and groups:
            raise ConfigError(
                f"namespace {self._namespace!r} holds {groups} groups of another run, "
                f"{owner!r:.140}. To go on with it, resume a checkpoint of it, or give this name "
                f"as run=. To begin another run, give another namespace, or delete the tasks "
                f"(`redrb rm --namespace {self._namespace} TASK`)."
            )
        elif groups and owner is None:
            _log.warning(
                "run %r takes over %d groups of no run, and restores no save: to go back to one, "
                "delete the tasks (`redrb rm --namespace %s TASK`) and resume again",
                self.name,
                groups,
                self._namespace,
            )
        return groups

    def _own(self, name: str) -> None:
        self._client.execute("SET", self._key, name)
