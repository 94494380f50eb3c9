"""Findings about staleness: groups near or above the bound, groups that expire."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.state.findings.wording import counted, finding_of, redrb_command, subject_of
from redrb.state.model import Finding, State, TaskState
from redrb.stream.task.settings import NO_BOUND

EXPIRED_SHARE = 0.05
LEAST_EXPIRED = 20


def find(state: State) -> Iterator[Finding]:
    """Yield the findings about staleness."""
    for task in state.tasks:
        bound = task.max_staleness
        if bound is not None and bound < NO_BOUND and task.main is not None:
            yield from _expiring(state, task, bound)
            yield from _near(state, task, bound)
            yield from _unknown(state, task)


def _expiring(state: State, task: TaskState, bound: int) -> Iterator[Finding]:
    ledger = task.main.stats.ledger if task.main else None
    if ledger is None:
        return
    rate = task.rates.expired if task.rates else 0.0
    many = ledger.expired >= max(LEAST_EXPIRED, EXPIRED_SHARE * ledger.put)
    if not rate and not many:
        return
    share = ledger.expired / ledger.put if ledger.put else 0.0
    now = f", {rate:.2g} each second now" if rate else ""
    bounded = "groups_per_version" in task.settings  # what makers begin
    setting = f"max_staleness={bound + 1}" if bounded else "groups_per_version=GROUPS"
    yield finding_of(
        "expiring-groups",
        subject_of(task),
        f"{counted(ledger.expired, 'group')} of {ledger.put:,} expired ({share:.1%}){now}.",
        redrb_command(state, "set", task.name, setting),
    )


def _near(state: State, task: TaskState, bound: int) -> Iterator[Finding]:
    if task.main is None:
        return
    places = {"waiting": task.main.staleness.waiting, "leased": task.main.staleness.leased}
    above = {
        place: groups.largest
        for place, groups in places.items()
        if groups.largest is not None and groups.largest > bound
    }
    reached = max(above.values(), default=bound + 1)
    command = redrb_command(state, "set", task.name, f"max_staleness={reached}")
    if above:
        texts = (f"a {place} group is {age:,} versions old" for place, age in above.items())
        text = " and ".join(texts)
        yield finding_of(
            "staleness-above-bound",
            subject_of(task),
            f"{text[0].upper()}{text[1:]}; the bound is {bound:,}.",
            command,
        )
    elif places["waiting"].largest == bound and "groups_per_version" not in task.settings:
        yield finding_of(
            "staleness-at-bound",
            subject_of(task),
            f"The stalest waiting group is {counted(bound, 'version')} old, the bound.",
            command,
        )


def _unknown(state: State, task: TaskState) -> Iterator[Finding]:
    waiting = task.main.staleness.waiting if task.main else None
    if waiting is not None and waiting.unknown and not waiting.total:
        yield finding_of(
            "unknown-staleness",
            subject_of(task),
            f"The staleness of {counted(waiting.unknown, 'waiting group')} is not known.",
            redrb_command(state, "weights", "ls"),
        )
