"""The checker of `make chaos` finds each kind of defect in journals that have it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos import versions
from tests.chaos.checker import Checker
from tests.chaos.failovers import Failover, Span
from tests.chaos.stored import Holdings, Look

Line = dict[str, Any]
STOP: Line = {"k": "stop", "t": 99.0, "threads": []}


def call(op: str, at: float, *, limit: float = 1.0, took: float = 0.1, **data: Any) -> list[Line]:
    """Return the two lines of a call; `data` that only its end has begins with `end_`."""
    end = {name.removeprefix("end_"): data.pop(name) for name in list(data) if "end_" in name}
    number = int(at * 1000)
    return [
        {"k": "begin", "n": number, "op": op, "t": at, "limit": limit, **data},
        {"k": "end", "n": number, "t": at + took, **end},
    ]


def put(at: float, *names: str) -> list[Line]:
    return call("put", at, groups=list(names), end_stored=list(names))


def take(at: float, *names: str) -> list[Line]:
    return call("take", at, end_delivered=list(names))


def ack(at: float, *names: str) -> list[Line]:
    return call("ack", at, acking=list(names), end_acked=list(names))


def checker(*failovers: Failover, **journals: list[Line]) -> Checker:
    with_ends = {f"{name}-1": [*lines, STOP] for name, lines in journals.items()}
    return Checker(with_ends, set(), (), failovers)


def look(at: float, **counters: int) -> Look:
    names = ("put", "acked", "expired", "filtered", "evicted", "dead", "leased", "waiting")
    return Look("flow", at, at + 0.01, {name: counters.get(name, 0) for name in names})


def holds(*held: str) -> Holdings:
    return Holdings(set(held), set(), set(), [], [])


def ended(found: Checker, at_end: Look, held: Holdings) -> list[str]:
    found.check_order()
    found.check_look(at_end)
    found.check_end(at_end, held)
    return found.findings


def test_a_run_in_order_has_no_findings():
    found = checker(put=put(1, "a") + put(2, "b"), take=take(3, "a") + ack(4, "a"))
    assert ended(found, look(9, put=2, acked=1, waiting=1), holds("b")) == []


def test_unknown_puts_and_acknowledgements_may_have_happened_or_not():
    unknown = call("put", 1, groups=["a", "b"], end_error="StoreUnavailable")
    tried = call("ack", 4, acking=["a"], end_error="StoreUnavailable")
    found = checker(put=unknown, take=take(3, "a") + tried)
    assert ended(found, look(9, put=1, acked=1), holds()) == []


def test_groups_that_nobody_can_take_are_found():
    found = checker()
    found.check_left(look(9, put=3, waiting=1, leased=2), 1)
    assert found.findings == ["flow: 2 groups are leased, and no consumer lives"]
    found.check_left(look(9, put=3, waiting=3), 1)
    assert found.findings[1:] == ["flow: 2 groups are counted as waiting, and were not taken"]


def test_an_acknowledgement_that_raised_is_unknown():
    lost = call("ack", 4, acking=["a"], end_error="LeaseLost")
    taken = {"hoard0": take(2, "a") + lost, "hoard1": take(3, "a") + ack(5, "a")}
    found = checker(fill=put(1, "a"), **taken)
    found.check_order()
    assert found.findings == []
    both = checker(hoard0=take(2, "a") + ack(4, "a"), hoard1=take(3, "a") + ack(5, "a"))
    both.check_order()
    assert any("acknowledged twice" in each for each in both.findings), both.findings


@pytest.mark.parametrize(
    ("finding", "lines", "counters", "held"),
    [
        ("are lost", {"put": put(1, "a")}, {}, ()),
        ("put is 0", {"put": put(1, "a")}, {}, ("a",)),
        ("never put", {}, {"put": 1, "waiting": 1}, ("a",)),
        ("not balanced", {"put": put(1, "a")}, {"put": 1}, ("a",)),
        (
            "acknowledged twice",
            {"put": put(1, "a"), "take": ack(2, "a"), "loader": ack(3, "a")},
            {"put": 1, "acked": 1},
            (),
        ),
        (
            "after it was acknowledged",
            {"put": put(1, "a"), "take": ack(2, "a") + take(3, "a")},
            {"put": 1, "acked": 1},
            (),
        ),
        (
            "acknowledged and stored",
            {"put": put(1, "a"), "take": ack(2, "a")},
            {"put": 1, "acked": 1},
            ("a",),
        ),
        (
            "refused and stored",
            {"put": call("put", 1, groups=["a"], end_refused=["a"])},
            {"put": 1, "waiting": 1},
            ("a",),
        ),
        (
            "torn data",
            {"put": put(1, "a"), "take": call("take", 2, end_delivered=["a"], end_torn=["x"])},
            {"put": 1, "waiting": 1},
            ("a",),
        ),
        (
            "gave 1 groups up",
            {"put": call("sender.flush", 1, end_dropped=1, end_error="SendFailed")},
            {},
            (),
        ),
        ("after its 1 s", {"put": call("put", 1, took=6.5)}, {}, ()),
        ("never ended its call", {"put": call("put", 1)[:1]}, {}, ()),
        ("crashed", {"put": [{"k": "crash", "t": 1.0, "trace": "x"}]}, {}, ()),
        ("left threads", {"put": [{"k": "stop", "t": 1.0, "threads": ["x"]}]}, {}, ()),
    ],
)
def test_a_defect_is_found(finding, lines, counters, held):
    found = ended(checker(**lines), look(9, **counters), holds(*held))
    assert any(finding in each for each in found), found


def test_a_pause_of_the_worker_is_no_overrun():
    lines = {"put-1": [*call("put", 1, took=8.0), STOP]}
    assert Checker(lines, set(), [("put-1", 2.0, 7.0)]).findings == []
    assert Checker(lines, set(), [("take-1", 2.0, 7.0)]).findings


def train(at: float, *names: str) -> list[Line]:
    return [{"k": "trained", "t": at, "acking": list(names)}]


def rank(at: float, *names: str) -> list[Line]:
    return take(at, *names) + train(at + 0.5, *names)


TWICE = {"put": put(1, "a"), "take": take(2, "a") + ack(3, "a") + take(5, "a") + ack(6, "a")}
TRAINED_TWICE = {"steps": put(1, "a"), "ranks": rank(2, "a") + rank(5, "a")}


@pytest.mark.parametrize("at", [3.05, 3.2])
def test_a_failover_may_take_an_acknowledgement_back(at):
    found = checker(Failover(at - 0.15, at), **TWICE)
    assert ended(found, look(9, put=1, acked=1), holds()) == []
    found = checker(Failover(at - 0.15, at), put=put(1, "a"), take=take(2, "a") + ack(3, "a"))
    assert ended(found, look(9, put=1, waiting=1), holds("a")) == []


@pytest.mark.parametrize("since", [1.0, 3.3, 6.5])
def test_another_failover_explains_no_group_that_is_acknowledged_twice(since):
    found = ended(checker(Failover(since, since + 0.1), **TWICE), look(9, put=1, acked=1), holds())
    assert any("acknowledged twice" in each for each in found), found
    assert any("after it was acknowledged" in each for each in found), found


@pytest.mark.parametrize("since", [3.0, 3.5])
def test_a_failover_takes_no_put_back_that_returned(since):
    lines = {"put": put(1, "a") + put(since, "b"), "take": take(2, "a") + ack(3, "a")}
    found = checker(Failover(since, since + 0.2), **lines)
    found.check_end(look(9, put=1, acked=1), holds())
    assert any("1 groups are lost: ['b']" in each for each in found.findings), found.findings


def test_a_failover_may_take_back_an_unknown_put_that_was_trained():
    lines = {
        "put": call("put", 1, took=3, groups=["a"], end_error="StoreUnavailable"),
        "take": take(1.5, "a") + ack(1.7, "a"),
    }
    assert ended(checker(Failover(1.6, 2), **lines), look(9), holds()) == []
    assert ended(checker(**lines), look(9), holds())
    assert ended(checker(Failover(3, 4), **lines), look(9), holds())


def test_ranks_train_twice_only_after_a_failover_between_both_times():
    for failover, allowed in ((Failover(2.2, 2.3), True), (Failover(5.6, 5.7), False)):
        found = checker(failover, **TRAINED_TWICE)
        found.check_order()
        assert any("trained groups twice" in each for each in found.findings) is not allowed


def publish(at: float, version: int, content: int) -> list[Line]:
    return call("publish", at, content=content, end_version=version)


def poll(at: float, version: int, content: int) -> list[Line]:
    return call("poll", at, end_version=version, end_content=content, end_torn=[])


@pytest.mark.parametrize(
    ("finding", "reads"),
    [
        ("from version 2 to 1", poll(3, 2, 20) + poll(4, 1, 10)),
        ("values of another one", poll(3, 2, 10)),
        ("nobody published", poll(3, 3, 30)),
        ("polled 1 after 2", poll(3, 1, 10)),
    ],
)
def test_a_wrong_version_is_found(finding, reads):
    publishes = publish(1, 1, 10) + publish(2, 2, 20)
    found, _, _ = versions.check({"publisher-1": publishes, "poll-1": reads})
    assert any(finding in each for each in found), found


def test_right_versions_are_no_finding():
    publishes = publish(1, 1, 10) + publish(2, 2, 20)
    reads = poll(1.05, 1, 10) + poll(3, 2, 20) + poll(4, 2, 20)
    assert versions.check({"publisher-1": publishes, "poll-1": reads}) == ([], 2, 2)


def test_a_failover_may_take_a_version_back_that_was_published_then():
    publishes = publish(1, 1, 10) + publish(2, 2, 20) + publish(4, 2, 40)
    reads = poll(2.5, 2, 20) + poll(3.5, 1, 10) + poll(5, 2, 40)
    journals = {"publisher-1": publishes, "poll-1": reads}
    assert versions.check(journals, [Failover(2.0, 2.3)]) == ([], 3, 2)
    for other in ([], [Failover(1.5, 1.9)], [Failover(2.2, 2.3)]):
        assert versions.check(journals, other)[0]


def test_a_former_primary_may_answer_until_its_connections_are_cut():
    publishes = publish(1, 1, 10) + publish(2, 2, 20)
    journals = {"publisher-1": publishes, "poll-1": poll(3, 1, 10) + poll(4, 2, 20)}
    assert versions.check(journals, (), [Span(2.5, 3.5)]) == ([], 2, 2)
    for other in ([], [Span(2.0, 2.5)], [Span(3.5, 4.5)]):
        assert versions.check(journals, (), other)[0]
