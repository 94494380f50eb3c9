"""The checker of `make chaos` finds defects of parts, rights, stages and dead letters."""

from __future__ import annotations

import pytest

from tests.chaos.checker import Checker
from tests.chaos.failovers import Failover
from tests.chaos.stored import Holdings, Look
from tests.chaos.tasks import FLOW, ROLLOUTS
from tests.unit.test_chaos_checker import Line, ack, call, checker, holds, put, take

LEDGER = ("put", "acked", "expired", "filtered", "evicted", "dead", "leased", "waiting")
RIGHTS = ("granted", "used", "returned", "lost", "late", "held", "queued")
PARTS = ("begun", "incomplete", "completed", "delivered", "dropped", "dead")


def look(task: str, **counters: int) -> Look:
    """Return a look; counters of rights and of parts begin with `rights_` and `parts_`."""
    return Look(
        task,
        9,
        9.01,
        {name: counters.get(name, 0) for name in LEDGER},
        {name: counters.get(f"rights_{name}", 0) for name in RIGHTS},
        {name: counters.get(f"parts_{name}", 0) for name in PARTS},
    )


def part(at: float, index: int, *, right: bool = False) -> list[Line]:
    """Return a call that puts one of two parts of the group "p"."""
    return call("put_part", at, part="p", index=index, of=2, right=right, end_there=True)


def forward(at: float, *names: str) -> list[Line]:
    groups = list(names)
    return call(
        "forward", at, acking=groups, forwarding=groups, end_acked=groups, end_forwarded=groups
    )


def found(of: Checker, *ends: tuple[Look, Holdings]) -> list[str]:
    of.check_order()
    for at_end, held in ends:
        of.check_look(at_end)
        of.check_end(at_end, held)
    if len(ends) == 2:
        of.check_forwarded()
    return of.findings


COMPLETE = {"parts0": part(1, 0), "parts1": part(2, 1)}
WHOLE = {"parts_begun": 1, "parts_completed": 1}


def test_complete_parts_are_one_group():
    stored = look(ROLLOUTS, put=1, waiting=1, **WHOLE)
    assert found(checker(**COMPLETE), (stored, holds("p"))) == []
    missing = found(checker(**COMPLETE), (look(ROLLOUTS, parts_begun=1, parts_dropped=1), holds()))
    assert missing == ["rollouts: 1 groups are lost: ['p']"]
    twice = found(checker(**COMPLETE), (look(ROLLOUTS, put=2, waiting=2, **WHOLE), holds("p")))
    assert any("2 groups are counted as put" in each for each in twice), twice


@pytest.mark.parametrize("begun_at", [-9.0, 2.0])
def test_incomplete_and_old_parts_may_be_dropped(begun_at):
    dropped = look(ROLLOUTS, parts_begun=1, parts_dropped=1)
    parts = {"parts0": part(begun_at, 0), **({"parts1": part(2, 1)} if begun_at < 0 else {})}
    assert found(checker(**parts), (dropped, holds())) == []


def test_a_failover_takes_no_part_back_that_returned():
    dropped = (look(ROLLOUTS, parts_begun=1, parts_dropped=1), holds())
    findings = found(checker(Failover(1.0, 1.2), **COMPLETE), dropped)
    assert any("1 groups are lost" in each for each in findings), findings


@pytest.mark.parametrize(
    ("finding", "counters"),
    [
        ("rights are not balanced", {"granted": 2, "used": 1}),
        ("1 rights are held", {"granted": 2, "used": 1, "held": 1}),
        ("0 groups were put with a right, journals say 1 to 1", {"granted": 1, "returned": 1}),
        ("2 groups were put with a right", {"granted": 2, "used": 2}),
        ("", {"granted": 2, "used": 1, "returned": 1}),
        ("", {"granted": 1, "lost": 1, "late": 1}),
    ],
)
def test_each_group_uses_one_right(finding, counters):
    rights = {f"rights_{name}": count for name, count in counters.items()}
    at_end = look(ROLLOUTS, put=1, waiting=1, **WHOLE, **rights)
    admitted = checker(parts0=part(1, 0, right=True), parts1=part(2, 1, right=True))
    findings = found(admitted, (at_end, holds("p")))
    assert any(finding in each for each in findings) if finding else not findings, findings


STAGE = {"admitted": put(1, "a"), "stage": take(2, "a") + forward(3, "a")}
LEFT = (look(ROLLOUTS, put=1, acked=1), holds())


def test_a_forwarded_group_is_in_the_next_task_once():
    trained = take(4, "a") + ack(5, "a")
    at_end = (look(FLOW, put=1, acked=1), holds())
    assert found(checker(**STAGE, take=trained), LEFT, at_end) == []
    twice = found(checker(**STAGE, take=trained), LEFT, (look(FLOW, put=2, acked=2), holds()))
    assert any("2 groups are counted as put" in each for each in twice), twice


def test_a_group_that_its_stage_has_acknowledged_and_not_put_is_found():
    unknown = call("forward", 3, acking=["a"], forwarding=["a"], end_error="StoreUnavailable")
    stage = {"admitted": put(1, "a"), "stage": take(2, "a") + unknown}
    findings = found(checker(**stage), LEFT, (look(FLOW), holds()))
    assert any("forwarded and lost" in each for each in findings), findings
    waiting = (look(ROLLOUTS, put=1, waiting=1), holds("a"))
    assert found(checker(**stage), waiting, (look(FLOW), holds())) == []


def reject(at: float, *names: str) -> list[Line]:
    return call("reject", at, rejecting=list(names))


def delete(at: float, *names: str) -> list[Line]:
    return call("drop_letters", at, letters=list(names), end_count=len(names))


def test_dead_letters_wait_again_or_are_deleted():
    rejected = {"put": put(1, "a"), "take": take(2, "a") + reject(3, "a")}
    dead = Holdings(set(), {"a"}, set(), [], [])
    assert found(checker(**rejected), (look(FLOW, put=1, dead=1), dead)) == []
    assert found(checker(**rejected), (look(FLOW, put=1, waiting=1), holds("a"))) == []
    deleted = Holdings(set(), set(), set(), [], [], dead_dropped=1)
    assert found(checker(**rejected), (look(FLOW, put=1, dead=1), deleted)) == []
    acked = {"put": put(1, "a"), "take": take(2, "a") + ack(3, "a")}
    findings = found(checker(**acked), (look(FLOW, put=1, dead=1), deleted))
    assert any("only 0 can be" in each for each in findings), findings


def test_a_dead_letter_that_was_deleted_does_not_return():
    lines = {"put": put(1, "a"), "requeue": delete(4, "a")}
    again = take(2, "a") + reject(3, "a") + take(5, "a")
    findings = found(checker(**lines, take=again), (look(FLOW, put=1, leased=1), holds("a")))
    assert any("after its dead letter was deleted" in each for each in findings), findings
    assert any("deleted and stored" in each for each in findings), findings
    taken_back = checker(Failover(4, 4.2), **lines, take=again)
    assert found(taken_back, (look(FLOW, put=1, leased=1), holds("a"))) == []
