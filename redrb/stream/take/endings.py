"""Ends groups of leases in pages, in several parts of a lease at once."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import TypeAlias

from redrb.connection.client import Request
from redrb.connection.deadline import GRACE_S, Deadline
from redrb.errors import LeaseLost, StoreError, StoreUnavailable
from redrb.stream.take.calls import Outcome
from redrb.stream.take.cause import NO_CAUSE, Cause
from redrb.stream.take.part import LeasePart

Chosen: TypeAlias = list[tuple[LeasePart, tuple[int, ...]]]

Errors: TypeAlias = dict[LeasePart, LeaseLost | StoreError]

Pages: TypeAlias = dict[LeasePart, deque[tuple[int, ...]]]  # still to be ended


def end_parts(outcome: Outcome, chosen: Chosen, reason: Cause = NO_CAUSE) -> Errors:
    """End groups of several parts; returns the error of each part that has one.

    Each part is ended page after page, so that other clients are served in between. The requests of
    all parts are sent before the first reply is read. Parts whose server is away are tried again
    when all others are ended. Their retries share the time of one request.

    Groups that an earlier call, which was cut off, was to end in another way end in that way, and a
    `LeaseLost` names them: a release may have reached Redis and given them to another consumer, so
    that an acknowledgement now would count them twice.
    """
    errors: Errors = {}
    _end_in_pages(outcome, _others_than_decided(outcome, chosen, errors), reason, errors)
    for part, _ in chosen:
        if part.decided and not isinstance(errors.get(part), StoreError):
            errors[part] = _named(part, errors.get(part))
    return errors


def _end_in_pages(outcome: Outcome, chosen: Chosen, reason: Cause, errors: Errors) -> None:
    left = {part: deque(part.pages(outcome, ids)) for part, ids in chosen}
    if len(left) > 1:
        _end_reachable(outcome, left, reason, errors)
    shared = len(left) > 1
    with ExitStack() as scope:
        for part, pages in left.items():
            while pages and part not in errors:
                request = part.end_request(outcome, pages[0], reason)
                if shared:
                    scope.enter_context(Deadline(request.retry_s))
                    shared = False
                _finish(outcome, part, pages, request, reason, errors)


def acknowledge_part(part: LeasePart, ids: tuple[int, ...]) -> None:
    """Acknowledge groups of one part, and raise its error."""
    for error in end_parts("ack", [(part, ids)]).values():
        raise error


def _others_than_decided(outcome: Outcome, chosen: Chosen, errors: Errors) -> Chosen:
    """End groups as an earlier call, which was cut off, asked; returns all other groups."""
    others: Chosen = []
    for part, ids in chosen:
        before = part.asked_otherwise(outcome, ids)
        for (earlier, reason), asked in before.items():
            _end_in_pages(earlier, [(part, asked)], reason, errors)
            if part in errors:
                break
            part.decided[_DONE[earlier]] = (*part.decided.get(_DONE[earlier], ()), *asked)
        left = tuple(seq for seq in ids if seq in part.layouts)
        if part not in errors and (left or not before):
            others.append((part, left))
    return others


def _named(part: LeasePart, error: LeaseLost | StoreError | None) -> LeaseLost:
    """Return the error that names the decided groups of a part, and those of its own error."""
    lost = tuple(seq for ids in part.decided.values() for seq in ids)
    why = f"an earlier call, which was cut off, has {' and '.join(part.decided)} them."
    part.decided = {}
    if isinstance(error, LeaseLost):
        lost, why = (*lost, *error.ids), f"{error.why} Of some of them, {why}"
    return LeaseLost(task=part.task, ids=lost, why=why)


_DONE: dict[Outcome, str] = {
    "ack": "acknowledged",
    "expire": "expired",
    "release": "released",
    "fail": "failed",
    "reject": "rejected",
}


def _end_reachable(outcome: Outcome, left: Pages, reason: Cause, errors: Errors) -> None:
    """End all parts whose servers answer at once; pages of the others stay in `left`."""
    turn = list(left)
    while turn:
        sent: dict[LeasePart, Request[str]] = {}
        try:
            with Deadline(at_most=GRACE_S, repeat_s=0.0):
                for part in turn:
                    sent[part] = part.end_request(outcome, left[part][0], reason)
                    sent[part].begin()
                for part in turn:
                    _finish(outcome, part, left[part], sent.pop(part), reason, errors)
        finally:
            for part, request in sent.items():
                part.note_asked(outcome, left[part][0], reason)
                request.drop()
        turn = [part for part in turn if left[part] and part not in errors]
        for part in left:
            if isinstance(errors.get(part), StoreUnavailable):
                del errors[part]  # it is tried again


def _finish(
    outcome: Outcome,
    part: LeasePart,
    pages: deque[tuple[int, ...]],
    request: Request[str],
    reason: Cause,
    errors: Errors,
) -> None:
    """Read the reply to the request that ends the first page, and note the result."""
    try:
        part.note_ended(pages[0], request.result())
        pages.popleft()
    except (LeaseLost, StoreError) as error:
        errors[part] = error
        if isinstance(error, StoreUnavailable) and error.uncertain:
            part.note_asked(outcome, pages[0], reason)
    except BaseException:
        part.note_asked(outcome, pages[0], reason)
        raise
