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
from typing import Any

from tests.chaos import rights
from tests.chaos.acknowledgements import Acknowledgements
from tests.chaos.failovers import Failover, Span, lost
from tests.chaos.fates import Fates, check_end, check_forwarded
from tests.chaos.options import LATE_S
from tests.chaos.part_puts import PartPuts
from tests.chaos.stored import Holdings, Look
from tests.chaos.task_journal import TaskJournal
from tests.chaos.tasks import FLOW, HELD, ROLLOUTS, STEPS, TASKS

Lines = Sequence[dict[str, Any]]

_PUT_INTO = {
    "steps": STEPS,
    "fill": HELD,
    **dict.fromkeys(("parts0", "parts1", "admitted"), ROLLOUTS),
}
_TAKEN_FROM = {
    "ranks": STEPS,
    "stage": ROLLOUTS,
    **dict.fromkeys(("hoard0", "hoard1", "hoard2", "heir"), HELD),
}
"""Tasks of workers by their role; `flow` of all others. What a stage forwards goes there, too."""


@dataclass
class Calls:
    """A call: the line before it, and the line after it if there is one."""

    worker: str
    begin: dict[str, Any]
    end: dict[str, Any] | None


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
            name: TaskJournal(Acknowledgements(self.failovers), PartPuts()) for name in TASKS
        }
        self._fates: dict[str, Fates] = {}
        self._sorted: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
        for worker, lines in self.journals.items():
            self._read(worker, lines)
        for task in self.tasks.values():
            task.close()

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
                self.tasks[FLOW].begin_puts(line["forwarding"], line["t"])
                self.findings += [f"{worker} got torn data: {torn}" for torn in line["torn"]]
            elif line["k"] == "crash":
                self.findings.append(f"{worker} crashed: {line['trace']}")
            elif line["k"] == "stop" and line["threads"]:
                self.findings.append(f"{worker} left threads: {', '.join(line['threads'])}")
        if worker not in self.killed and (not lines or lines[-1]["k"] != "stop"):
            self.findings.append(f"{worker} ended without being killed or asked to end")

    def _taken_from(self, worker: str) -> TaskJournal:
        return self.tasks[_TAKEN_FROM.get(_role(worker), FLOW)]

    def _read_call(self, call: Calls) -> None:
        begin, end = call.begin, call.end or {}
        self.calls[begin["op"]] += 1
        self.letters += end.get("count", 0)
        if "error" in end:
            self.errors[f"{begin['op']}: {end['error']}"] += 1
        for torn in end.get("torn", ()):
            self.findings.append(f"{call.worker} {begin['op']} got torn data: {torn}")
        if end.get("dropped"):
            self.findings.append(f"{call.worker} gave {end['dropped']} groups up: {end}")
        self.tasks[_PUT_INTO.get(_role(call.worker), FLOW)].read_put(begin, end)
        self.tasks[FLOW].begin_puts(begin.get("forwarding", ()), begin["t"])
        self.tasks[FLOW].end_puts(end.get("forwarded", ()), end.get("t", begin["t"]))
        self._taken_from(call.worker).read_take(call.worker, begin, end)

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
        """All workers have ended: each group of a task has one fate, and the ledger counts it."""
        task = self.tasks[look.task]
        self._fates[look.task] = fates = Fates.of(task, look, holds)
        found = check_end(task, fates, look, holds)
        self.findings += [f"{look.task}: {each}" for each in found]

    def check_left(self, look: Look, most: int) -> None:
        """All workers have ended: no group is leased, and all that can be taken were taken."""
        left = {"leased, and no consumer lives": look.ledger["leased"]}
        left["counted as waiting, and were not taken"] = max(0, look.ledger["waiting"] - most)
        self.findings += [f"{look.task}: {n} groups are {what}" for what, n in left.items() if n]

    def check_forwarded(self) -> None:
        """Each group that has left the first task is in the next one, or was; after `check_end`."""
        found = check_forwarded(self._fates[ROLLOUTS], self._fates[FLOW])
        self.findings += [f"{ROLLOUTS}: {each}" for each in found]


def _role(worker: str) -> str:
    return worker.rpartition("-")[0]
