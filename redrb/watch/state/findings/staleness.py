"""Findings about staleness: groups near or above the bound, groups that expire."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.stream.task.ledger import Ledger
from redrb.stream.task.settings import NO_BOUND
from redrb.watch.state.findings.wording import task_finding
from redrb.watch.state.model import Finding, Staleness, State, TaskState, WeightsState
from redrb.watch.state.workers import LATE
from redrb.words import counted

EXPIRED_SHARE = 0.05
LEAST_EXPIRED = 20


def find(state: State) -> Iterator[Finding]:
    """Yield the findings about staleness."""
    for task in state.tasks:
        bound = task.max_staleness
        found = outlived(state, task)
        if found is not None and task.main is not None:
            text = (
                f"The newest version of weights {found.name} is {found.version:,}; the task knows "
                f"version {task.main.stats.version:,} of them."
            )
            yield task_finding("weights-behind-task", state, task, text, "rm", task.name)
        elif bound is not None and bound < NO_BOUND and task.main is not None:
            yield from _expiring(state, task, task.main.stats.ledger, bound)
            yield from _near(state, task, task.main.staleness, bound)


def outlived(state: State, task: TaskState) -> WeightsState | None:
    """Return the weights of a task that began anew while the task stayed; None: they did not."""
    known = task.main.stats.version if task.main else 0
    names = {worker.weights_name for worker in task.workers if worker.alive}
    used = (each for each in state.weights if each.name in names)
    return next((each for each in used if 0 < each.version < known), None)


def _expiring(state: State, task: TaskState, ledger: Ledger, bound: int) -> Iterator[Finding]:
    rate = task.rates.expired if task.rates else 0.0
    many = ledger.expired >= max(LEAST_EXPIRED, EXPIRED_SHARE * ledger.put)
    if not rate and not many:
        return
    share = ledger.expired / ledger.put if ledger.put else 0.0
    now = f", {rate:.2g} each second now" if rate else ""
    text = f"{counted(ledger.expired, 'group')} of {ledger.put:,} expired ({share:.1%}){now}."
    bounded = "groups_per_version" in task.settings  # it bounds what makers begin
    setting = f"max_staleness={bound + 1}" if bounded else "groups_per_version=GROUPS"
    yield task_finding("expiring-groups", state, task, text, "set", task.name, setting)


def _near(state: State, task: TaskState, staleness: Staleness, bound: int) -> Iterator[Finding]:
    waiting = staleness.waiting
    above = {
        place: groups.largest
        for place, groups in (("waiting", waiting), ("leased", staleness.leased))
        if groups.largest is not None and groups.largest > bound
    }
    late = any(worker.leased for worker in task.workers if worker.life in LATE)
    if late:  # these groups go to others
        above.pop("leased", None)
    if above:
        texts = (f"a {place} group is {age:,} versions old" for place, age in above.items())
        text = f"{' and '.join(texts)}; the bound is {bound:,}."
        summary = f"A{text[1:]}"
        yield task_finding("staleness-above-bound", state, task, summary, "stats", task.name)
    elif waiting.largest == bound and "groups_per_version" not in task.settings:
        text = f"The stalest waiting group is {counted(bound, 'version')} old, the bound."
        larger = f"max_staleness={bound + 1}"
        yield task_finding("staleness-at-bound", state, task, text, "set", task.name, larger)
    if waiting.unknown and not waiting.total:
        text = f"The staleness of {counted(waiting.unknown, 'waiting group')} is not known."
        yield task_finding("unknown-staleness", state, task, text, "weights", "ls")
