"""One run: faults for a time, then an orderly end, then the checks."""

from __future__ import annotations

import heapq
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis

from tests.chaos import leftovers, options, stored, tables, tasks, versions
from tests.chaos.checker import Checker
from tests.chaos.faults import Faults
from tests.chaos.fleet import Fleet
from tests.chaos.journal import read
from tests.chaos.options import Options, Place
from tests.chaos.pair import Pair
from tests.chaos.programs import HEIR
from tests.chaos.report import Result
from tests.chaos.stored import Look
from tests.chaos.tasks import TASKS
from tests.servers import programs

_LOOK_S = 1.0
_WARM_UP_S = 2.0
_ENDS_S = options.RETRY_S + 10.0
_DRAIN_S = 90.0


class Run:
    """Starts everything, makes faults happen, ends everything, checks.

    Attributes:
        directory: Holds the journals, and the logs of workers and servers.
    """

    def __init__(self, chosen: Options) -> None:
        self._options = chosen
        self.directory = Path(tempfile.mkdtemp(prefix="redrb-chaos-"))
        self._shared_memory = Path("/dev/shm") / self.directory.name
        for each in (self.directory / "tmp", self._shared_memory):
            each.mkdir()
        self._pair = Pair(chosen.server or next(iter(programs().values())))
        url = f"redis://127.0.0.1:{self._pair.proxy.port}/0"
        replicas = 0 if "unplanned_failover" in chosen.without else 1
        self._fleet = Fleet(Place(self.directory, self._shared_memory, url, replicas))
        self._faults = Faults(chosen, self._pair, self._fleet)
        self._looks: list[Look] = []
        self._findings: list[str] = []
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._log = (self.directory / "faults.log").open("a")

    def run(self) -> Result:
        """Run, and return what was found."""
        try:
            self._note("start")
            tasks.create(self._url)
            self._fleet.start_all()
            self._make_faults()
            self._end_workers()
            return self._check()
        finally:
            self._fleet.close()
            self._pair.close()
            self._log.close()
            shutil.rmtree(self._shared_memory, ignore_errors=True)

    def delete(self) -> None:
        """Delete the directory of the run."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _make_faults(self) -> None:
        """Begin faults at random times and undo each at its time, looking at ledgers meanwhile."""
        end = time.monotonic() + _WARM_UP_S + self._options.seconds
        self._at(time.monotonic() + _WARM_UP_S, lambda: self._begin_fault(end))
        self._at(time.monotonic() + _LOOK_S, lambda: self._look_again(end))
        while self._due:
            at, _, action = heapq.heappop(self._due)
            time.sleep(max(0.0, at - time.monotonic()))
            action()
        self._pair.proxy.cut()

    def _at(self, at: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), action))

    def _begin_fault(self, end: float) -> None:
        now = time.monotonic()
        if now >= end:
            return
        begun = self._faults.begin()
        if begun is not None:
            kind, undo = begun
            self._note(kind)
            if undo is not None:
                seconds, action = undo
                self._at(now + seconds, lambda: self._undo(kind, action))
        self._at(now + self._faults.next_in_s(), lambda: self._begin_fault(end))

    def _undo(self, kind: str, action: Callable[[], object]) -> None:
        self._note(f"{kind} ends")
        action()

    def _note(self, what: str) -> None:
        self._log.write(f"{time.monotonic():.3f} {what}\n")
        self._log.flush()

    def _look_again(self, end: float) -> None:
        self._fleet.replace_ended()
        self._look()
        if time.monotonic() < end:
            self._at(time.monotonic() + _LOOK_S, lambda: self._look_again(end))

    def _look(self) -> list[Look]:
        """Read the ledgers of all tasks, if the primary answers."""
        if not self._pair.up:
            return []
        found = []
        try:
            with self._pair.admin() as client:
                for task in TASKS:
                    look = stored.look(client, options.NAMESPACE, task)
                    if look is not None:
                        found.append(look)
        except (redis.ConnectionError, redis.TimeoutError, redis.OutOfMemoryError):
            return []  # beyond its memory limit a server refuses transactions
        self._looks += found
        return found

    def _end_workers(self) -> None:
        """End the makers, let trainers take what is left, end them too."""
        self._note("end")
        self._pair.allow_memory(None)
        self._fleet.end("makers", _ENDS_S)
        for role in self._fleet.roles("hoarders"):
            if self._faults.dice.random() < 0.5:
                self._fleet.kill(role, replace=False)
        self._fleet.end("hoarders", _ENDS_S)
        self._hoarders = self._consumers()
        self._fleet.start(HEIR)
        until = time.monotonic() + _DRAIN_S
        while not self._drained():
            if time.monotonic() > until:
                self._findings.append(f"trainers do not take what is left within {_DRAIN_S:g} s")
                break
            self._fleet.replace_ended()
            tasks.take_back_rights(self._url)
            time.sleep(0.5)
        self._fleet.end("others", _ENDS_S)

    def _consumers(self) -> set[bytes]:
        with self._pair.admin() as client:
            return stored.consumers(client, options.NAMESPACE, tasks.HELD)

    def _drained(self) -> bool:
        """Whether no group waits, is leased or incomplete, and no right is held or asked for.

        Of the ranks' task one group may be left. The heir has taken over from all that were killed.
        """
        looks = self._look()
        if not looks or self._hoarders & self._consumers():
            return False
        return len(looks) == len(TASKS) and all(
            look.ledger["waiting"] + look.ledger["leased"] <= tasks.LEFT.get(look.task, 0)
            and not look.parts["incomplete"] + look.rights["held"] + look.rights["queued"]
            for look in looks
        )

    @property
    def _url(self) -> str:
        """The primary, without the proxy."""
        return f"redis://127.0.0.1:{self._pair.primary.port}/0"

    def _check(self) -> Result:
        """Read the journals and Redis, delete everything, and look for what is left."""
        self._note("check")
        journals = {path.stem: read(path) for path in self.directory.glob("*.journal")}
        pauses = [(each.name, each.began, each.ended) for each in self._fleet.pauses]
        failovers = self._pair.failovers
        checker = Checker(journals, self._fleet.killed, pauses, failovers)
        checker.check_order()
        for look in self._looks:
            checker.check_look(look)
        with self._pair.admin() as client:
            for look in self._look():
                checker.check_look(look)
                holds = stored.holdings(client, stored.prefix(options.NAMESPACE, look.task))
                checker.check_end(look, holds)
                checker.check_left(look, tasks.LEFT.get(look.task, 0))
            checker.check_forwarded()
            namespace = options.NAMESPACE
            findings = leftovers.keys(client, namespace, leftovers.AFTER_RUN, "after the run")
            findings += tables.check(self._url, journals.values())
            tasks.clear(self._url)
            tables.delete(self._url)
            findings += leftovers.keys(client, namespace, leftovers.AFTER_CLEAR, "after deletion")
        findings += leftovers.files(self.directory / "tmp", self._shared_memory)
        findings += self._fleet.left()
        of_weights, published, loaded = versions.check(journals, failovers, self._pair.demoted)
        return Result(
            faults=self._faults.counts,
            checker=checker,
            published=published,
            loaded=loaded,
            looks=self._looks,
            findings=[
                *(*self._findings, *self._fleet.findings, *checker.findings),
                *(*of_weights, *findings),
            ],
        )
