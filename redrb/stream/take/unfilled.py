"""The errors of takes whose batch is not full in time, or can never be."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from redrb.connection.deadline import here
from redrb.errors import BatchTimeout, ConfigError, RedrbError
from redrb.stream.take.calls import TakeReply
from redrb.stream.task.stored_settings import SettingChange, StoredSettings
from redrb.stream.task.task import Task

_ENDED = ("acked", "expired", "filtered", "evicted", "dead")
_IF_THERE = (
    *("makers_waiting", "rights_known", "rights_held", "parts_waiting"),
    *("stale_version", "version"),
)


def fates_seen_by(counts: Mapping[str, int], available: int, *, leased_here: int) -> dict[str, int]:
    """Return the attribute `fates` of `BatchTimeout`.

    Args:
        counts: From `redrb/lua/include/outcomes.lua`.
        leased_here: Groups that the consumer of the take leases.
    """
    if not counts:
        return {}
    fates = {name: counts[name] for name in ("put_ever", "filtered_ever", "expired_ever", "put")}
    fates["available"] = available
    fates["unmatched"] = max(0, counts["pool"] - available)
    fates["other_status"] = max(0, counts["waiting"] - counts["pool"])
    leased = counts["leased"]
    fates["leased_here"] = min(leased_here, leased)
    fates["leased_elsewhere"] = leased - fates["leased_here"]
    fates |= {name: counts[name] for name in _IF_THERE if name in counts}
    return fates | {name: counts[name] for name in _ENDED}


def batch_timeout(
    task: Task,
    wanted: int,
    reply: TakeReply,
    *,
    leased_here: int,
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


def never_full(task: Task, count: int, most: int) -> ConfigError:
    """Return the error; it names the setting, who set it, and the command that removes it.

    Args:
        task: The task of the take.
        count: Groups that the take asks for.
        most: Most groups that the task holds by its limit or max_waiting.
    """
    stored = None
    with suppress(RedrbError):  # the first error matters more
        stored = task.stored_settings()
    name = _bound(stored, most)
    change = stored.last_change(name) if stored else None
    options = "" if task.namespace == "default" else f" --namespace {task.namespace}"
    return ConfigError(
        f"task {task.name!r} holds at most {most} groups: a batch of {count} can never be full."
        f"{_who(change)} Take fewer, or change it: "
        f"`redrb set {task.name} {name}=none{options}`."
    )


def _bound(stored: StoredSettings | None, most: int) -> str:
    """Return the setting that bounds how many groups the task holds."""
    values = stored.values if stored else {}
    return "max_waiting" if values.get("max_waiting") == str(most) else "limit"


def _who(change: SettingChange | None) -> str:
    if change is None or not change.new:
        return ""
    user = f"user {change.user}, " if change.user else ""
    return (
        f" {change.setting}={change.new} was set by {user}{change.host}, process {change.pid}, "
        f"at {change.time:%Y-%m-%d %H:%M:%S} UTC."
    )
