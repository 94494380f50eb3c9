"""Groups without a field that the training step needs become dead letters; training goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from redrb.codec import GroupLayout
from redrb.errors import LeaseLost, RecordError
from redrb.experience import Experience
from redrb.stream import Lease

_ADVICE = (
    "A task keeps the fields of the groups that were put first, so put groups with {0!r} into "
    "another task, or into this one after `redrb rm`."
)

_log = logging.getLogger("redrb")


def reject_incomplete(error: RecordError, batch: Experience, leases: Sequence[Lease]) -> bool:
    """Reject the groups of a batch that lack the field for which its step has failed.

    The other groups are requeued unharmed. The error then names the rejected groups, and says how
    many they are.

    Args:
        error: The error of the step.
        batch: The batch, as the step left it.
        leases: The leases of the batch.

    Returns:
        Whether groups were rejected. Otherwise nothing has ended: no group lacks the field.

    Raises:
        StoreUnavailable: Redis stayed away; groups may still be leased.
    """
    field = error.field
    if field is None or batch.tensors.get(field, getattr(batch, field, None)) is not None:
        return False
    lacking = [
        (lease, [seq for seq, group in lease.layouts.items() if field not in _fields(group)])
        for lease in leases
    ]
    error.ids = tuple(seq for _, ids in lacking for seq in ids)
    if not error.ids:
        return False
    tasks = ", ".join(sorted({part.task for lease in leases for part in lease.parts}))
    log_rejected(error, tasks, sum(map(len, leases)), _ADVICE.format(field))
    for lease, ids in lacking:
        try:
            if ids:
                lease.reject(error, ids)
            if lease:
                lease.release()
        except LeaseLost as lost:
            _log.warning("other consumers train some of these groups: %s", lost)
    return True


def log_rejected(error: RecordError, task: str, total: int, advice: str = "") -> None:
    """Log that groups without a field, or with one of another form, are dead letters now.

    The error gets the same text as a note.

    Args:
        error: What is missing, and in which groups.
        task: The task of the groups.
        total: Number of groups in their batch.
        advice: What to do, if that is known.
    """
    why = (
        f"task {task!r}: {len(error.ids)} of the {total} groups of a batch have no usable "
        f"{error.field!r}, and are dead letters now: {str(error).rstrip('.')}. {advice}"
    ).rstrip()
    _log.error("%s", why)
    error.add_note(why)


def _fields(group: GroupLayout) -> set[str]:
    return {column.name for column in group.fields}
