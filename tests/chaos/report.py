"""The table at the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.checker import Checker
from tests.chaos.stored import Look
from tests.chaos.tasks import ROLLOUTS


@dataclass(frozen=True)
class Result:
    """What a run found.

    Attributes:
        faults: Faults by kind.
        checker: Has read all journals.
        published, loaded: Versions that were published, and that readers loaded.
        looks: Looks at ledgers; the last ones are those of the end.
        findings: What is wrong.
    """

    faults: Counter[str]
    checker: Checker
    published: int
    loaded: int
    looks: Sequence[Look]
    findings: list[str]


def lines(result: Result) -> list[str]:
    """Return the table as lines."""
    found = [f"{sum(result.faults.values())} faults:"]
    found += [f"  {kind:20} {count:6}" for kind, count in sorted(result.faults.items())]
    for name, task in sorted(result.checker.tasks.items()):
        unknown = task.begun.keys() - task.stored.keys() - task.refused
        unsure = len(task.acking.keys() - task.acked.keys())
        landed = unknown & task.acking.keys()
        found += [
            f"task {name}:",
            f"  {'groups stored':20} {len(task.stored):6}",
            f"  {'refused':20} {len(task.refused):6}",
            f"  {'unknown':20} {len(unknown):6}   {len(landed)} were stored and trained",
            f"  {'takes':20} {task.takes:6}   of {task.delivered} groups",
            f"  {'acknowledged':20} {len(task.acked):6}   and {unsure} whose reply was lost",
        ]
    found += _counters(result)
    over, call = result.checker.longest_s
    found += [
        "weights:",
        f"  {'published':20} {result.published:6}",
        f"  {'loaded':20} {result.loaded:6}",
        f"looks at ledgers: {len(result.looks)}",
        f"longest overrun of a deadline: {over:.2f} s ({call})",
        "errors of calls:",
    ]
    found += [f"  {kind:40} {count:6}" for kind, count in sorted(result.checker.errors.items())]
    return found


def _counters(result: Result) -> list[str]:
    """Return the counters of groups in parts and of rights at the end, and calls of operators."""
    last = [look for look in result.looks if look.task == ROLLOUTS][-1:]
    counters = {
        name: counts
        for look in last
        for name, counts in (("groups in parts", look.parts), ("rights", look.rights))
    }
    calls = {name: result.checker.calls[name] for name in ("configure", "requeue", "drop_letters")}
    counters["operators"] = {**calls, "letters": result.checker.letters}
    return [
        f"{name}: {', '.join(f'{each} {count}' for each, count in counts.items())}"
        for name, counts in counters.items()
    ]
