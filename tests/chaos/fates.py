"""Each group has one fate when all workers have ended, and the counters of its task count it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tests.chaos import rights
from tests.chaos.failovers import lost
from tests.chaos.stored import Holdings, Look
from tests.chaos.task_journal import TaskJournal


@dataclass(frozen=True)
class Fates:
    """Groups of a task that were ever stored, by what became of them.

    Attributes:
        held: Groups that are stored.
        dead: Dead letters.
        gone: All others: they were acknowledged, or their dead letter was deleted.
        vanished: Those of `gone` that a failover may have taken back together with their puts.
        taken_back: How many of these it has taken back, by the ledger.
    """

    held: set[str]
    dead: set[str]
    gone: set[str]
    vanished: set[str]
    taken_back: int

    @classmethod
    def of(cls, task: TaskJournal, look: Look, holds: Holdings) -> Fates:
        """Return what became of a task's groups; nobody may change it meanwhile."""
        gone = task.ending.keys() - holds.held - holds.dead
        unsure = {name: at for name, at in task.begun.items() if name not in task.stored}
        vanished = gone & task.acks.vanished(unsure, task.ending)
        missing = len(gone) - look.ledger["acked"] - holds.dead_dropped
        return cls(holds.held, holds.dead, gone, vanished, max(0, min(len(vanished), missing)))

    @property
    def left(self) -> set[str]:
        """Groups that are stored, and dead letters."""
        return self.held | self.dead

    @property
    def ever(self) -> set[str]:
        """All groups that were ever stored."""
        return self.gone | self.left

    @property
    def surely_gone(self) -> set[str]:
        """Groups that were acknowledged or deleted, whatever failovers have taken back."""
        return self.gone - self.vanished


def check_end(task: TaskJournal, fates: Fates, look: Look, holds: Holdings) -> list[str]:
    """Return findings about a task that nobody uses any more."""
    ledger, dropped = look.ledger, holds.dead_dropped
    deleted = {name for name, at in task.deleted.items() if not lost(at, task.acks.failovers)}
    findings = [*holds.torn]
    if holds.consumers:
        findings.append(f"the stream keeps the consumers {holds.consumers}")
    findings += _expect("waiting and leased", ledger["waiting"] + ledger["leased"], fates.held)
    findings += _expect("dead", ledger["dead"] - dropped, fates.dead)
    findings += _expect(
        "acked or deleted", ledger["acked"] + dropped + fates.taken_back, fates.gone
    )
    findings += _expect("put", ledger["put"] + fates.taken_back, fates.ever)
    deletable = fates.gone & task.rejecting.keys() - task.acked.keys()
    if dropped > len(deletable):
        findings.append(f"{dropped} dead letters are deleted, but only {len(deletable)} can be")
    findings += _none("lost", task.owed - fates.ever)
    findings += _none("acknowledged and stored", task.acked.keys() & fates.left)
    findings += _none("deleted and stored", deleted & fates.left)
    findings += _none("refused and stored", task.refused & (fates.surely_gone | fates.left))
    findings += _none("stored and uncounted", holds.uncounted & task.stored.keys())
    findings += _none("never put", fates.ever - task.begun.keys())
    if look.rights:
        findings += rights.check_end(
            look.rights, look.parts, task.admitted, fates.ever, fates.vanished
        )
    return findings


def check_forwarded(first: Fates, following: Fates) -> list[str]:
    """Return findings about groups that have left a task and were never in the next one."""
    return _none("forwarded and lost", first.surely_gone - following.ever)


def _expect(what: str, counted: int, groups: set[str]) -> list[str]:
    if counted == len(groups):
        return []
    return [f"{counted} groups are counted as {what}, not {groups!s:.200} ({len(groups)})"]


def _none(what: str, groups: Collection[str]) -> list[str]:
    return [f"{len(groups)} groups are {what}: {sorted(groups)[:5]}"] if groups else []
