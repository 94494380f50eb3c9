"""What a task counts against what is stored: orphaned entries, missing or unknown groups."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.doctor.examination import Examination
from redrb.state.findings.wording import counted, redrb_command, shown
from redrb.state.model import Finding, FindingKind, State

ORPHANED_ENTRIES = FindingKind(
    "orphaned-entries",
    "warning",
    "The script of a put failed or was unknown to the server, and the maker ended before it put "
    "again. The entries take memory, and room under the limit; nobody can take them. The next put "
    "that waits for room removes them.",
    repairs=True,
)
DIFFERENT_STORAGE = FindingKind(
    "different-storage",
    "critical",
    "The stored groups are not those that the task counts: other programs changed or deleted its "
    "keys, the server evicted some, a replica without all data took over, or redrb has a defect.",
)
LOST_SETTINGS = FindingKind(
    "lost-settings",
    "critical",
    "The key with the settings and counters of the task is missing: another program deleted it, or "
    "the server evicted it. The stored groups are whole, but no process can use them until the key "
    "is rebuilt. Then the next process that opens the task gives its order, tags and limits again. "
    "A trainer that resumes from a checkpoint may train again what came after it.",
    repairs=True,
)
LOST_PUTS = FindingKind(
    "lost-puts",
    "critical",
    "The record of the task's puts is missing, damaged, or contradicts the stream: another program "
    "changed or deleted the key, or the server evicted it. Puts, and processes that open the task, "
    "are refused until it is rebuilt from the stored groups. A put that was under way when it was "
    "lost may be stored twice, if its process is told to put again.",
    repairs=True,
)


def find(state: State, examined: Examination) -> Iterator[Finding]:
    """Yield the findings about a task's storage."""
    if examined.lost_settings:
        yield LOST_SETTINGS.found(
            examined.subject,
            f"The key {examined.store.keys.task} is lost. Groups stored: {examined.entries:,}.",
            redrb_command(state, "doctor", examined.store.task, "--repair"),
        )
    if examined.lost_puts:
        yield LOST_PUTS.found(
            examined.subject,
            f"The key {examined.store.keys.puts} is lost, or it is wrong. Groups stored: "
            f"{examined.facts:,}.",
            redrb_command(state, "doctor", examined.store.task, "--repair"),
        )
    if examined.orphans:
        most = ", at least" if examined.more_orphans else ""
        yield ORPHANED_ENTRIES.found(
            examined.subject,
            f"Entries of the stream beyond those that it counts: {examined.orphans:,}{most}.",
            redrb_command(state, "doctor", examined.store.task, "--repair"),
        )
    command = redrb_command(state, "save", examined.store.task, f"{examined.store.task}.redrb")
    for text in _differences(examined):
        yield DIFFERENT_STORAGE.found(examined.subject, text, command)


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
