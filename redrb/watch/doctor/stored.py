"""What a task stores against what it counts, and what dead processes have left in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from redrb.watch.doctor.examination import Examination, ExaminedGroup
from redrb.watch.state.findings.wording import finding_of, listed, redrb_command, shown
from redrb.watch.state.model import Finding, State
from redrb.words import agreeing, counted


def find(state: State, examined: Examination) -> Iterator[Finding]:
    """Yield the findings about an examined task."""
    yield from _storage(state, examined)
    yield from _processes(state, examined)


def _storage(state: State, examined: Examination) -> Iterator[Finding]:
    subject, task, keys = examined.subject, examined.store.task, examined.store.keys
    repair = redrb_command(state, "doctor", task, "--repair")
    if examined.lost_settings:
        text = f"The key {keys.task} is lost. Groups stored: {examined.entries:,}."
        yield finding_of("lost-settings", subject, text, repair)
    if examined.lost_puts:
        text = f"The key {keys.puts} is lost, or it is wrong. Groups stored: {examined.facts:,}."
        yield finding_of("lost-puts", subject, text, repair)
    if examined.orphans:
        text = f"Entries of the stream beyond those that it counts: {examined.orphans:,}"
        most = ", at least" if examined.more_orphans else ""
        yield finding_of("orphaned-entries", subject, f"{text}{most}.", repair)
    command = redrb_command(state, "save", task, f"{task}.redrb")
    for text in _differences(examined):
        yield finding_of("different-storage", subject, text, command)


def _differences(examined: Examination) -> Iterator[str]:
    if examined.lost_puts or examined.more_orphans:
        return  # their number is not known, so neither is that of the groups
    stored = examined.entries - examined.orphans
    if examined.facts != stored:
        yield f"The stream holds {counted(stored, 'group')}, and facts of {examined.facts:,}."
    complete = [group for group in examined.consumer_groups if not group.joining]
    for group in complete:
        held = group.waiting + group.leased
        # with several consumer groups, each may have ended groups that the others need
        if held > stored or (examined.groups == 1 and held < stored):
            yield (
                f"The stream holds {counted(stored, 'group')}; of consumer group "
                f"{shown(group.name)} {group.waiting:,} {agreeing(group.waiting, 'wait')} and "
                f"{group.leased:,} {agreeing(group.leased, 'are')} leased."
            )
    indexed = sum(group.letters for group in examined.consumer_groups)
    if indexed > examined.letters:
        yield (
            f"It holds {counted(examined.letters, 'dead letter')}; its consumer groups know "
            f"{indexed:,}."
        )


def _processes(state: State, examined: Examination) -> Iterator[Finding]:
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
