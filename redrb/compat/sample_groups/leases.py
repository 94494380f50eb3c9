"""Ends of leases that a process may have lost in the meantime."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from redrb.errors import LeaseLost
from redrb.experience import BufferItem
from redrb.stream import ExperienceStream, Lease

_log = logging.getLogger("redrb")


def acknowledge(lease: Lease, stream: ExperienceStream, ids: Sequence[int] | None = None) -> None:
    """Acknowledge groups of a lease, also those that were lost and wait again.

    Args:
        ids: The groups; default: all.
    """
    layouts = lease.layouts
    chosen = layouts if ids is None else ids
    samples = {seq: layouts[seq].samples for seq in chosen if seq in layouts}
    try:
        if samples:
            lease.ack(list(samples))
    except LeaseLost:
        stream.settle(samples, incarnation=lease.incarnation)


def release(lease: Lease, ids: Sequence[int] | None = None) -> None:
    """Requeue groups of a lease."""
    try:
        if lease:
            lease.release(ids)
    except LeaseLost as error:  # they wait again already
        _log.warning("%s", error)


def release_all(leases: Iterable[Lease]) -> None:
    """Requeue the groups of leases."""
    for lease in leases:
        release(lease)


def forward(
    lease: Lease,
    stream: ExperienceStream,
    groups: Mapping[int, list[BufferItem] | None],
    timeout: float | None = None,
) -> None:
    """Move groups of a lease to the next task, exactly once."""
    try:
        lease.forward(stream, groups, timeout=timeout)
    except LeaseLost as error:  # another process generates these groups, and forwards them
        _log.warning("task %r: %s", stream.task, error)
