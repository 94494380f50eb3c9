"""Compares the journals of all workers with Redis; shares no code with redrb.

What may be counted is bounded from both sides. A put that returned is stored, a put that began and
did not fail for certain may be: so is each acknowledgement. When all workers have ended, nothing is
uncertain any more: each group is waiting, leased, dead or acknowledged, and the ledger says so.

Failovers to a replica that may lack the last writes take acknowledgements back, and puts that have
not returned: `acknowledgements` says which. Puts that returned were confirmed by the replica.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tests.chaos import rights
from tests.chaos.acknowledgements import Acknowledgements
from tests.chaos.failovers import Failover, Span, lost
from tests.chaos.options import LATE_S
from tests.chaos.part_puts import PartPuts
from tests.chaos.stored import Holdings, Look
from tests.chaos.tasks import FLOW, ROLLOUTS, STEPS, TASKS

Lines = Sequence[dict[str, Any]]


_PUT_INTO = {"steps": STEPS, "parts0": ROLLOUTS, "parts1": ROLLOUTS, "admitted": ROLLOUTS}
_TAKEN_FROM = {"rank0": STEPS, "rank1": STEPS, "stage": ROLLOUTS}
"""Tasks of workers by their role; `flow` of all others. What a stage forwards goes there, too."""


@dataclass
class Calls:
    """A call: the line before it, and the line after it if there is one."""

    worker: str
    begin: dict[str, Any]
    end: dict[str, Any] | None


@dataclass
class Task:
    """What the journals say of one task.

    Attributes:
        begun: Group -> when its put began.
        stored: Group -> when its put had returned.
        refused: Groups whose put failed for certain.
        acks: Their acknowledgements.
        parts: Groups in parts.
        complete: Groups in parts that must be stored in the end.
        admitted: Groups that were put with a right.
        rejecting: Group -> when a rejection of it began first.
        deleted: Group -> when its dead letter was deleted, and did not return.
        ever: Groups that were ever stored, at the end of the run.
        held: Those of them that are stored or dead letters.
        vanished: Those of them that a failover may have taken back.
    """

    acks: Acknowledgements
    parts: PartPuts
    admitted: rights.Admitted = field(default_factory=rights.Admitted)
    complete: set[str] = field(default_factory=set)
    rejecting: dict[str, float] = field(default_factory=dict)
    deleted: dict[str, Span] = field(default_factory=dict)
    ever: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    vanished: set[str] = field(default_factory=set)
    begun: dict[str, float] = field(default_factory=dict)
    stored: dict[str, float] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    delivered: int = 0
    takes: int = 0

    @property
    def acking(self) -> dict[str, float]:
        """Group -> when an acknowledgement of it began first."""
        return self.acks.trying

    @cached_property
    def acked(self) -> dict[str, float]:
        """Group -> when its acknowledgement had returned; none that may be lost."""
        return self.acks.certain()


@dataclass
class Checker:
    """Reads the journals once, then checks.

    Attributes:
        journals: Lines of each worker.
        killed: Workers that were killed.
        pauses: Worker, begin and end of the times for which workers were stopped.
        failovers: Promotions of a replica after its primary was killed.
        findings: What is wrong.
        errors: Errors of calls, by operation and name.
        letters: Dead letters that were requeued or deleted.
        longest_s: The longest overrun of a deadline, and its call.
    """

    journals: Mapping[str, Lines]
    killed: set[str]
    pauses: Sequence[tuple[str, float, float]]
    failovers: Sequence[Failover] = ()
    findings: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    letters: int = 0
    longest_s: tuple[float, str] = (0.0, "no call")

    def __post_init__(self) -> None:
        self.tasks = {
            name: Task(Acknowledgements(self.failovers), PartPuts(self.failovers)) for name in TASKS
        }
        self._sorted: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
        for worker, lines in self.journals.items():
            self._read(worker, lines)
        for task in self.tasks.values():
            task.acks.close()
            begun = task.parts.begun()
            task.begun |= begun
            task.complete |= task.parts.complete() & begun.keys()
            task.admitted.surely.update(task.parts.keeping)
            task.admitted.maybe.update(task.parts.admitted)

    def _read(self, worker: str, lines: Lines) -> None:
        ends = {line["n"]: line for line in lines if line["k"] == "end"}
        for line in lines:
            if line["k"] == "begin":
                call = Calls(worker, line, ends.get(line["n"]))
                self._read_call(call)
                self._check_time(call)
            elif line["k"] == "trained":
                self._taken_from(worker).acks.train(worker, line["acking"], line["t"])
            elif line["k"] == "forwards":
                self._taken_from(worker).acks.begin(worker, line["acking"], line["t"])
                self._begin_puts(self.tasks[FLOW], line["forwarding"], line["t"])
                self.findings += [f"{worker} got torn data: {torn}" for torn in line["torn"]]
            elif line["k"] == "crash":
                self.findings.append(f"{worker} crashed: {line['trace']}")
            elif line["k"] == "stop" and line["threads"]:
                self.findings.append(f"{worker} left threads: {', '.join(line['threads'])}")
        if worker not in self.killed and (not lines or lines[-1]["k"] != "stop"):
            self.findings.append(f"{worker} ended without being killed or asked to end")

    def _taken_from(self, worker: str) -> Task:
        return self.tasks[_TAKEN_FROM.get(worker.rpartition("-")[0], FLOW)]

    def _begin_puts(self, task: Task, names: Iterable[str], at: float) -> None:
        for name in names:
            task.begun[name] = min(at, task.begun.get(name, at))

    def _end_puts(self, task: Task, names: Iterable[str], at: float) -> None:
        for name in names:
            task.stored[name] = min(at, task.stored.get(name, at))

    def _read_call(self, call: Calls) -> None:
        begin, end = call.begin, call.end or {}
        self._read_put(self.tasks[_PUT_INTO.get(call.worker.rpartition("-")[0], FLOW)], begin, end)
        self._begin_puts(self.tasks[FLOW], begin.get("forwarding", ()), begin["t"])
        self._end_puts(self.tasks[FLOW], end.get("forwarded", ()), end.get("t", begin["t"]))
        task = self._taken_from(call.worker)
        self.calls[begin["op"]] += 1
        if "error" in end:
            self.errors[f"{begin['op']}: {end['error']}"] += 1
        for name in begin.get("rejecting", ()):
            task.rejecting[name] = min(begin["t"], task.rejecting.get(name, begin["t"]))
        self.letters += end.get("count", 0)
        if begin["op"] == "drop_letters" and end.get("count") == len(begin["letters"]):
            task.deleted |= dict.fromkeys(begin["letters"], Span(begin["t"], end["t"]))
        task.acks.begin(call.worker, begin.get("acking", ()), begin["t"])
        for torn in end.get("torn", ()):
            self.findings.append(f"{call.worker} {begin['op']} got torn data: {torn}")
        if end.get("dropped"):
            self.findings.append(f"{call.worker} gave {end['dropped']} groups up: {end}")
        if "step" in begin and "acked" in end:
            span = Span(begin["t"], end["t"])
            task.acks.end_part(begin["step"], begin["rank"], end["acked"], span)
        else:
            task.acks.end(call.worker, end.get("acked", ()), end.get("t", begin["t"]))
        if "delivered" in end:
            task.takes += 1
            task.delivered += len(end["delivered"])
            task.acks.deliver(call.worker, end["delivered"], begin["t"])

    def _read_put(self, task: Task, begin: dict[str, Any], end: dict[str, Any]) -> None:
        self._begin_puts(task, begin.get("groups", ()), begin["t"])
        self._end_puts(task, end.get("stored", ()), end.get("t", begin["t"]))
        task.refused.update(end.get("refused", ()))
        task.admitted.surely.update(begin.get("admitted", ()))
        if "part" in begin:
            task.parts.add(begin, end)

    def _check_time(self, call: Calls) -> None:
        begin, end = call.begin, call.end
        if end is None:
            if call.worker not in self.killed:
                self.findings.append(f"{call.worker} never ended its call {begin}")
            return
        stopped = sum(
            max(0.0, min(end["t"], to) - max(begin["t"], since))
            for name, since, to in self.pauses
            if name == call.worker
        )
        over = end["t"] - begin["t"] - stopped - begin["limit"]
        self.longest_s = max(self.longest_s, (over, f"{call.worker} {begin['op']}"))
        if over > LATE_S:
            self.findings.append(
                f"{call.worker} {begin['op']} ended {over:.1f} s after its {begin['limit']:g} s: "
                f"{begin} {end}"
            )

    def check_order(self) -> None:
        """Nothing is acknowledged twice, delivered after that, or trained by ranks in two steps."""
        for task in self.tasks.values():
            for name in task.acks.twice():
                self.findings.append(f"group {name} is acknowledged twice: {task.acks.done[name]}")
            twice = task.acks.trained_twice()
            if twice:
                self.findings.append(f"ranks trained groups twice: {twice[:5]}")
        for worker, lines in self.journals.items():
            ends = {line["n"]: line for line in lines if line["k"] == "end"}
            for begin in lines:
                if begin.get("op") == "take" and begin["n"] in ends:
                    self._check_delivery(worker, begin, ends[begin["n"]])

    def _check_delivery(self, worker: str, begin: dict[str, Any], end: dict[str, Any]) -> None:
        at, task = Span(begin["t"], end["t"]), self._taken_from(worker)
        for name in end.get("delivered", ()):
            if task.acks.after(name, at):
                self.findings.append(f"{worker} got {name} after it was acknowledged")
            deleted = task.deleted.get(name)
            if deleted and deleted.ended < at.began and not lost(deleted, self.failovers):
                self.findings.append(f"{worker} got {name} after its dead letter was deleted")

    def check_look(self, look: Look) -> None:
        """The ledger of a look is balanced, and within what journals know of its time."""
        if not look.balanced:
            self.findings.append(f"ledger of {look.task} is not balanced: {look.ledger}")
        if look.rights:
            found = rights.check_balance(look.rights, look.parts)
            self.findings += [f"look at {look.task}: {each}" for each in found]
        for counter, (sure, possible) in self._times(look.task).items():
            least, most = bisect_left(sure, look.began), bisect_left(possible, look.ended)
            if not least <= look.ledger[counter] <= most:
                self.findings.append(
                    f"look at {look.task}: {counter} is {look.ledger[counter]}, journals say "
                    f"{least} to {most}"
                )

    def _times(self, name: str) -> dict[str, tuple[list[float], list[float]]]:
        """Return, of each counter, when groups were surely counted, and when they may have been."""
        if name not in self._sorted:
            task = self.tasks[name]
            begun = [at for group, at in task.begun.items() if group not in task.refused]
            self._sorted[name] = {
                "put": (sorted(task.stored.values()), sorted(begun)),
                "acked": (sorted(task.acked.values()), sorted(task.acking.values())),
            }
        return self._sorted[name]

    def check_end(self, look: Look, holds: Holdings) -> None:
        """All workers have ended: each group has one fate, and the ledger counts it."""
        task, ledger, name = self.tasks[look.task], look.ledger, look.task
        self.findings += [f"{name}: {each}" for each in holds.torn]
        if holds.consumers:
            self.findings.append(f"{name}: the stream keeps the consumers {holds.consumers}")
        self._expect(name, "waiting and leased", ledger["waiting"] + ledger["leased"], holds.held)
        self._expect(name, "dead", ledger["dead"] - holds.dead_dropped, holds.dead)
        touched = {**task.rejecting}
        for each, at in task.acking.items():
            touched[each] = min(at, touched.get(each, at))
        gone = touched.keys() - holds.held - holds.dead
        dropped = holds.dead_dropped
        unsure = {each: at for each, at in task.begun.items() if each not in task.stored}
        vanished = gone & task.acks.vanished(unsure, touched)
        taken_back = max(0, min(len(vanished), len(gone) - ledger["acked"] - dropped))
        self._expect(name, "acked, or deleted", ledger["acked"] + dropped + taken_back, gone)
        may_be_deleted = (gone & task.rejecting.keys()) - task.acked.keys()
        if dropped > len(may_be_deleted):
            self.findings.append(
                f"{name}: {dropped} dead letters are deleted, at most {len(may_be_deleted)} could"
            )
        self._expect(name, "put", ledger["put"] + taken_back, gone | holds.held | holds.dead)
        task.ever = gone | holds.held | holds.dead
        task.held, task.vanished = holds.held | holds.dead, vanished
        self._none(name, "lost", (task.stored.keys() | task.complete) - task.ever)
        kept = {each for each, at in task.deleted.items() if not lost(at, self.failovers)}
        self._none(name, "deleted and stored", kept & (holds.held | holds.dead))
        self._none(name, "acknowledged and stored", task.acked.keys() & (holds.held | holds.dead))
        self._none(
            name, "refused and stored", task.refused & (gone - vanished | holds.held | holds.dead)
        )
        self._none(name, "stored and uncounted", holds.uncounted & task.stored.keys())
        self._none(name, "never put", task.ever - task.begun.keys())
        if look.rights:
            found = rights.check_end(
                look.rights, look.parts, task.admitted, task.ever, task.vanished
            )
            self.findings += [f"{name}: {each}" for each in found]

    def check_forwarded(self) -> None:
        """Each group that has left the first task is in the next one, or was."""
        first, following = self.tasks[ROLLOUTS], self.tasks[FLOW]
        left = first.acks.trying.keys() & first.ever - first.held - first.vanished
        self._none(ROLLOUTS, "forwarded and lost", left - following.ever)

    def _expect(self, task: str, what: str, counted: int, groups: set[str]) -> None:
        if counted != len(groups):
            self.findings.append(
                f"{task}: {counted} groups are counted as {what}, not {groups!s:.200}"
                f" ({len(groups)})"
            )

    def _none(self, task: str, what: str, groups: set[str]) -> None:
        if groups:
            self.findings.append(f"{task}: {len(groups)} groups are {what}: {sorted(groups)[:5]}")
