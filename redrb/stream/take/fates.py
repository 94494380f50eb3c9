"""What became of the groups of a task, as the error of a take whose time is up counts them."""

from __future__ import annotations

from collections.abc import Mapping

from redrb.connection.deadline import here
from redrb.errors import BatchTimeout
from redrb.stream.take.calls import TakeReply
from redrb.stream.task.task import Task

_ENDED = ("acked", "expired", "filtered", "evicted", "dead")
_RIGHTS = ("makers_waiting", "rights_known")


def fates_seen_by(
    counts: Mapping[str, int], available: int, *, leased_here: int | None
) -> dict[str, int]:
    """Return the attribute `fates` of `BatchTimeout`.

    Args:
        counts: From `redrb/lua/include/fates.lua`.
        leased_here: Groups that the consumer of the take leases; None: ranks lease all.
    """
    if not counts:
        return {}
    fates = {name: counts[name] for name in ("put_ever", "filtered_ever", "put")}
    fates["available"] = available
    fates["unmatched"] = max(0, counts["pool"] - available)
    fates["other_status"] = max(0, counts["waiting"] - counts["pool"])
    leased = counts["leased"]
    if leased_here is None:
        fates["leased_by_ranks"] = leased
    else:
        fates["leased_here"] = min(leased_here, leased)
        fates["leased_elsewhere"] = leased - fates["leased_here"]
    fates |= {name: counts[name] for name in _RIGHTS if name in counts}
    return fates | {name: counts[name] for name in _ENDED}


def batch_timeout(
    task: Task,
    wanted: int,
    reply: TakeReply,
    *,
    leased_here: int | None,
    expired: int,
    missing_ranks: tuple[int, ...] = (),
) -> BatchTimeout:
    """Return the error of a take whose time is up, by the reply to its last request."""
    fates = fates_seen_by(reply.fates, reply.amount, leased_here=leased_here)
    return BatchTimeout(
        task=task.name,
        namespace=task.store.keys.namespace,
        wanted=wanted,
        available=reply.amount,
        waited_s=here().waited_s,
        blocked=reply.blocked,
        expired=expired,
        others=reply.others,
        fates=fates,
        unfinished=reply.outcome != "short",
        missing_ranks=missing_ranks,
        similar=() if fates.get("put_ever", 1) else task.similar(),
    )
