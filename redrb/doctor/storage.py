"""What a task counts against what is stored: orphaned entries, missing or unknown groups."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.doctor.examination import Examination
from redrb.state.findings.wording import counted, finding_of, redrb_command, shown
from redrb.state.model import Finding, State


def find(state: State, examined: Examination) -> Iterator[Finding]:
    """Yield the findings about a task's storage."""
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
    needed = stored - examined.archived
    complete = [group for group in examined.consumer_groups if not group.joining]
    for group in complete:
        held = group.waiting + group.leased
        # with several consumer groups, each may have ended groups that the others need
        if held > needed or (examined.groups == 1 and held < needed):
            yield (
                f"The stream holds {counted(needed, 'group')} without history; of consumer group "
                f"{shown(group.name)} {group.waiting:,} wait and {group.leased:,} are leased."
            )
    indexed = sum(group.letters for group in examined.consumer_groups)
    if indexed > examined.letters:
        yield (
            f"It holds {counted(examined.letters, 'dead letter')}; its consumer groups know "
            f"{indexed:,}."
        )
