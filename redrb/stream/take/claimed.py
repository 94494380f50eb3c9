"""Turns the entries that a script claimed into a part of a lease."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from redrb.codec import GroupLayout, parse_groups
from redrb.errors import DecodeError
from redrb.experience import Status
from redrb.stream.take.cause import Cause
from redrb.stream.take.consumer import Consumer
from redrb.stream.take.part import Draw, Expiry, Holder, LeasePart
from redrb.stream.take.rollout_reading import is_rollouts, read_rollouts
from redrb.stream.task.entries import member_of
from redrb.stream.task.origin import Origin
from redrb.stream.task.store import TaskStore
from redrb.unpacking import Reading

_log = logging.getLogger("redrb")

Entry = tuple[int, bytes | None]
"""Id and payload of a group; None when the payload was deleted."""


def claimed_part(
    store: TaskStore,
    consumer: Consumer,
    entries: Sequence[Entry],
    holder: Holder,
    *,
    status: Status,
    incarnation: str,
    draw: Draw | None = None,
    first_ids: Mapping[int, int] | None = None,
    least: int | None = None,
) -> LeasePart | None:
    """Return the part of a lease that holds claimed entries.

    Groups that cannot be decoded go to the dead letters, with the reason.

    Args:
        entries: The entries that a script claimed for `holder`.
        first_ids: First id of the groups that were requeued with another one.
        least: Fewest groups in a part. A claim with fewer, or of which a group cannot be decoded,
            is released. None: decodable groups are a part, however many there are.

    Returns:
        The part; None when the claim was released, or another consumer has taken it over.

    Raises:
        ConfigError, RecordError: Groups of rollouts cannot be read. After this, and after any error
            of the reader, the claim was released.
    """
    good: list[tuple[int, GroupLayout]] = []
    bad: list[tuple[int, DecodeError]] = []
    parsed = iter(parse_groups(payload for _, payload in entries if payload is not None))
    for seq, payload in entries:
        layout = next(parsed) if payload is not None else DecodeError("the payload is gone")
        if isinstance(layout, DecodeError):
            bad.append((seq, layout))
        else:
            good.append((seq, layout))
    for seq, error in bad:
        _log.error("task %r: group %d cannot be decoded: %s", store.task, seq, error)
        ends = not good and seq == bad[-1][0]
        reason = Cause.of(error, "cannot be decoded: ")
        if holder.end_request("reject", [seq], reason=reason, samples=0, ends=ends).result():
            return None  # it is lost
    ids = [seq for seq, _ in good]
    rollouts = frozenset(seq for seq, layout in good if is_rollouts(layout))
    try:
        good = [
            (
                seq,
                read_rollouts(store.task, seq, each, consumer.reader) if seq in rollouts else each,
            )
            for seq, each in good
        ]
    except BaseException:
        holder.release(ids)
        raise
    if least is None or (not bad and len(good) >= least):
        expiries = _expiries(store, consumer.group, ids) if status is Status.EXPIRED else {}
        return LeasePart(
            store.task,
            good,
            holder,
            incarnation=incarnation,
            draw=draw,
            expiries=expiries,
            status=status,
            rollouts=rollouts,
            origin=Origin(store, consumer.group, incarnation),
            first_ids=first_ids or {},
        )
    if good or not bad:
        holder.release(ids)
    return None


def _expiries(store: TaskStore, group: str, ids: Sequence[int]) -> dict[int, Expiry | None]:
    key = f"{store.keys.prefix}expiries:{group}"
    texts = store.client.execute("HMGET", key, *map(member_of, ids))
    with Reading("the rules by which groups expired"):
        return {
            seq: text and Expiry.parse(text.decode()) for seq, text in zip(ids, texts, strict=True)
        }
