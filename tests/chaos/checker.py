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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tests.chaos.acknowledgements import Acknowledgements
from tests.chaos.failovers import Failover, Span
from tests.chaos.options import LATE_S
from tests.chaos.stored import Holdings, Look

Lines = Sequence[dict[str, Any]]


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
    """

    acks: Acknowledgements
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
        longest_s: The longest overrun of a deadline, and its call.
    """

    journals: Mapping[str, Lines]
    killed: set[str]
    pauses: Sequence[tuple[str, float, float]]
    failovers: Sequence[Failover] = ()
    findings: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    longest_s: tuple[float, str] = (0.0, "no call")

    def __post_init__(self) -> None:
        self.tasks = {name: Task(Acknowledgements(self.failovers)) for name in ("flow", "steps")}
        self._sorted: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
        for worker, lines in self.journals.items():
            self._read(worker, lines)
        for task in self.tasks.values():
            task.acks.close()

    def _read(self, worker: str, lines: Lines) -> None:
        task = self.tasks["steps" if worker.startswith(("steps-", "rank")) else "flow"]
        ends = {line["n"]: line for line in lines if line["k"] == "end"}
        for line in lines:
            if line["k"] == "begin":
                call = Calls(worker, line, ends.get(line["n"]))
                self._read_call(call, task)
                self._check_time(call)
            elif line["k"] == "trained":
                task.acks.train(worker, line["acking"], line["t"])
            elif line["k"] == "crash":
                self.findings.append(f"{worker} crashed: {line['trace']}")
            elif line["k"] == "stop" and line["threads"]:
                self.findings.append(f"{worker} left threads: {', '.join(line['threads'])}")
        if worker not in self.killed and (not lines or lines[-1]["k"] != "stop"):
            self.findings.append(f"{worker} ended without being killed or asked to end")

    def _read_call(self, call: Calls, task: Task) -> None:
        begin, end = call.begin, call.end or {}
        self.calls[begin["op"]] += 1
        if "error" in end:
            self.errors[f"{begin['op']}: {end['error']}"] += 1
        for name in begin.get("groups", ()):
            task.begun[name] = begin["t"]
        for name in end.get("stored", ()):
            task.stored[name] = end["t"]
        task.refused.update(end.get("refused", ()))
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
        at = Span(begin["t"], end["t"])
        for name in end.get("delivered", ()):
            if any(task.acks.after(name, at) for task in self.tasks.values()):
                self.findings.append(f"{worker} got {name} after it was acknowledged")

    def check_look(self, look: Look) -> None:
        """The ledger of a look is balanced, and within what journals know of its time."""
        if not look.balanced:
            self.findings.append(f"ledger of {look.task} is not balanced: {look.ledger}")
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
        self._expect(name, "dead", ledger["dead"], holds.dead)
        gone = task.acking.keys() - holds.held - holds.dead
        unsure = {each: at for each, at in task.begun.items() if each not in task.stored}
        vanished = gone & task.acks.vanished(unsure)
        taken_back = max(0, min(len(vanished), len(gone) - ledger["acked"]))
        self._expect(name, "acked", ledger["acked"] + taken_back, gone)
        self._expect(name, "put", ledger["put"] + taken_back, gone | holds.held | holds.dead)
        self._none(name, "lost", task.stored.keys() - gone - holds.held - holds.dead)
        self._none(name, "acknowledged and stored", task.acked.keys() & (holds.held | holds.dead))
        self._none(
            name, "refused and stored", task.refused & (gone - vanished | holds.held | holds.dead)
        )
        self._none(name, "stored and uncounted", holds.uncounted & task.stored.keys())
        self._none(name, "never put", (gone | holds.held | holds.dead) - task.begun.keys())

    def _expect(self, task: str, what: str, counted: int, groups: set[str]) -> None:
        if counted != len(groups):
            self.findings.append(
                f"{task}: {counted} groups are counted as {what}, not {groups!s:.200}"
                f" ({len(groups)})"
            )

    def _none(self, task: str, what: str, groups: set[str]) -> None:
        if groups:
            self.findings.append(f"{task}: {len(groups)} groups are {what}: {sorted(groups)[:5]}")
