"""What dead workers still hold: others take leases and rights back, and no announcement says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from redrb.state.model import ConsumerGroupState, WorkerState
from redrb.stream.task.ledger import AdmissionStats


def with_holdings(
    workers: Sequence[WorkerState], groups: Sequence[ConsumerGroupState]
) -> tuple[WorkerState, ...]:
    """Return the workers; those that are dead or have ended with what the task says they hold.

    Rights are counted by process. Leases are not counted by consumer: a dead worker holds at most
    those that no living worker has announced.

    Args:
        workers: All workers of a task, as they announced themselves.
        groups: The consumer groups of the task, the first of which has the counters of rights.
    """
    living = sum(each.leased for each in workers if not _is_over(each))
    leased = max(0, sum(group.stats.ledger.leased for group in groups) - living)
    rights = (groups[0].stats.admission if groups else None) or AdmissionStats()
    unlisted = max(0, rights.held - sum(rights.makers.values()))

    def held(worker: WorkerState) -> WorkerState:
        process = worker.name.rpartition("-")[0] + "-"  # its name as a maker begins so, too
        found = sum(count for name, count in rights.makers.items() if name.startswith(process))
        return replace(
            worker,
            leased=min(worker.leased, leased),
            rights=min(worker.rights, found + unlisted),
        )

    return tuple(held(worker) if _is_over(worker) else worker for worker in workers)


def _is_over(worker: WorkerState) -> bool:
    return worker.life in ("dead", "ended")
