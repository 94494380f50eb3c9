"""Leases, rights and places in queues that nobody ends: of dead and of unknown processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from redrb.doctor.examination import Examination, ExaminedGroup
from redrb.state.findings.wording import counted, finding_of, listed, redrb_command, shown
from redrb.state.model import Finding, State


def find(state: State, examined: Examination) -> Iterator[Finding]:
    """Yield the findings about leases, rights and queues."""
    command = redrb_command(state, "doctor", examined.store.task, "--repair")
    for group in examined.consumer_groups:
        yield from _of_group(examined.subject, group, command)
    if examined.lost_rights:
        text = f"{counted(examined.lost_rights, 'right')} to begin groups of makers that died."
        yield finding_of("lost-rights", examined.subject, text, command)
    texts = [
        counted(number, noun)
        for number, noun in (
            (examined.stuck_puts, "put"),
            (sum(group.stuck_takes for group in examined.consumer_groups), "take"),
            (examined.stuck_admissions, "request"),
        )
        if number
    ]
    if texts:
        text = f"In the queues, of processes that do not look any more: {', '.join(texts)}"
        rights = " for rights" if examined.stuck_admissions else ""
        command = redrb_command(state, "stats", examined.store.task)
        yield finding_of("stuck-waiters", examined.subject, f"{text}{rights}.", command)


def _of_group(subject: str, group: ExaminedGroup, command: str) -> Iterator[Finding]:
    where = f"in consumer group {shown(group.name)}"
    if group.lost:
        text = f"{_leases(group.lost_groups)}, which the task does not know, {where}."
        yield finding_of("lease-without-consumer", subject, text, command)
    dead = {name: leased for name, leased in group.dead.items() if leased}
    if dead:
        text = f"{_leases(dead)}, whose deadline is over, {where}."
        yield finding_of("dead-consumer", subject, text, command)
    elif group.dead:
        text = f"{_names(group.dead)} {where}: the deadline is over."
        yield finding_of("stale-consumer", subject, text, command)


def _leases(leased: Mapping[str, int]) -> str:
    return f"{counted(sum(leased.values()), 'group')} leased by {_names(leased)}"


def _names(consumers: Mapping[str, int]) -> str:
    return listed(sorted(map(shown, consumers)), most=3)
