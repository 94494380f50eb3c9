"""What became of the groups of a task, as the error of a take whose time is up counts them."""

from __future__ import annotations

from collections.abc import Mapping

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
