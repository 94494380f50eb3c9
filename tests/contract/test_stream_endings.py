"""Leases end in pages: what is repeated, interrupted or lost between two pages counts exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pytest

from redrb import ExperienceStream, LeaseLost, StoreUnavailable
from redrb.connection.client import Request
from redrb.stream.take.calls import Finish
from redrb.stream.take.lease import Lease
from redrb.stream.task import groups as stored_groups
from redrb.stream.task.calls import DropGroup
from tests.audit import audit, kill_consumer
from tests.conftest import Opener
from tests.samples import numbered, numbers
from tests.scenes import silence, until

PAGE = 4


class Endings:
    """The requests that end groups, in their order.

    Attributes:
        sent: They, as they were made.
        twice: Whether each is done twice, as if the first reply was lost.
        before: Called with the number of each one, from 1 on, before it is sent, or sent again.
    """

    def __init__(self) -> None:
        self.sent: list[Finish] = []
        self.before: Callable[[int], object] = lambda _: None
        self.twice = False

    @property
    def sizes(self) -> list[int]:
        return [len(ending.seqs) for ending in self.sent]


@pytest.fixture
def endings(monkeypatch, pages):
    pages(ended=PAGE, failed=PAGE)
    seen = Endings()
    ask = Finish.as_request

    def recorded(call, client, keys, read):
        request = ask(call, client, keys, read)
        result = request.result

        def noted(**options):
            seen.sent.append(call)
            if seen.twice:
                ask(call, client, keys, str).result()
            seen.before(len(seen.sent))
            return result(**options)

        monkeypatch.setattr(request, "result", noted)
        return request

    monkeypatch.setattr(Finish, "as_request", recorded)
    return seen


def leased(open_stream: Opener, groups: int, **settings: Any) -> tuple[ExperienceStream, Lease]:
    stream = open_stream(**settings)
    stream.put_many([[numbered(number)] for number in range(groups)])
    return stream, stream.take(groups, timeout=0)


def end(lease: Lease, outcome: str, ids: Collection[int] | None = None) -> None:
    getattr(lease, outcome)(*(["bad"] if outcome in ("reject", "fail") else []), ids=ids)


LEDGER = {
    "ack": "acked",
    "expire": "expired",
    "reject": "dead",
    "release": "waiting",
    "fail": "waiting",
}


@pytest.mark.parametrize("outcome", list(LEDGER))
@pytest.mark.parametrize("groups", [PAGE, 3 * PAGE + 1])
def test_a_lease_ends_in_pages_each_of_which_may_be_repeated(open_stream, endings, groups, outcome):
    endings.twice = True
    stream, lease = leased(open_stream, groups)
    end(lease, outcome)
    assert endings.sizes == [PAGE] * (groups // PAGE) + [groups % PAGE] * bool(groups % PAGE)
    assert [ending.ends for ending in endings.sent] == [*[False] * (len(endings.sent) - 1), True]
    stats = stream.stats()
    assert stats.ledger.as_dict() == {
        **dict.fromkeys(stats.ledger.as_dict(), 0),
        "put": groups,
        LEDGER[outcome]: groups,
    }
    assert stats.samples_acked == (groups if outcome == "ack" else 0)
    assert (len(lease), stream._consumer._leased) == (0, {})
    audit(stream)


@pytest.mark.parametrize("outcome", list(LEDGER))
def test_the_same_call_goes_on_after_an_outage_in_the_middle(open_stream, endings, outcome):
    stream, lease = leased(open_stream, 10)

    def away(number):
        if number == 2:
            raise StoreUnavailable("away", where="")

    endings.before = away
    with pytest.raises(StoreUnavailable):
        end(lease, outcome)
    assert lease.ids == tuple(range(PAGE + 1, 11))
    assert stream._consumer.held == stream.stats().ledger.leased == 10 - PAGE
    end(lease, outcome)
    assert endings.sizes == [4, 4, 4, 2], "the second one was not done"
    assert getattr(stream.stats().ledger, LEDGER[outcome]) == 10


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [*zip(LEDGER, LEDGER, strict=True), *zip(LEDGER, list(LEDGER)[1:] + ["ack"], strict=True)],
)
def test_groups_end_as_the_first_call_asked_for_even_if_it_was_cut_off(
    open_stream, endings, first, second, landed
):
    stream, lease = leased(open_stream, 10)
    other = open_stream()
    endings.twice = landed

    def cut_off(number):
        endings.twice = False
        if number == 1:
            raise StoreUnavailable("away", where="", uncertain=True)

    endings.before = cut_off
    page = range(1, PAGE + 1)
    with pytest.raises(StoreUnavailable):
        end(lease, first, page)
    again = landed and LEDGER[first] == "waiting"
    taken = other.take(PAGE, timeout=0) if again else None
    if first == second:
        end(lease, second)
    else:
        with pytest.raises(LeaseLost, match="cut off") as lost:
            end(lease, second)
        assert lost.value.ids == tuple(page)
    assert (len(lease), stream._consumer._leased) == (0, {})
    if taken is not None:
        taken.ack()
    counts = Counter({LEDGER[second]: 10 - PAGE}) + Counter({LEDGER[first]: PAGE})
    if again:
        counts += Counter(acked=PAGE)
        counts["waiting"] -= PAGE
    ledger = stream.stats().ledger
    assert Counter({name: getattr(ledger, name) for name in set(LEDGER.values())}) == counts
    audit(stream)


@pytest.mark.parametrize("outcome", list(LEDGER))
def test_only_groups_that_no_page_has_ended_are_lost(open_stream, endings, outcome):
    stream, lease = leased(open_stream, 10)
    other = open_stream()

    def take_over(number):
        if number == 2:
            kill_consumer(stream)
            other._consumer._renew()

    endings.before = take_over
    with pytest.raises(LeaseLost) as lost:
        end(lease, outcome)
    assert lost.value.ids == tuple(range(PAGE + 1, 11))
    assert (len(lease), len(endings.sent)) == (0, 2)
    waits = 10 if outcome in ("release", "fail") else 10 - PAGE
    assert other.stats().ledger.waiting == waits
    other.take(waits, timeout=0).ack()
    assert getattr(other.stats().ledger, LEDGER[outcome].replace("waiting", "acked")) in (4, 10)


def test_a_take_acknowledges_the_last_page_of_the_lease_before(open_stream, endings):
    stream, lease = leased(open_stream, 10)
    stream.put_many([[numbered(number)] for number in range(10, 13)])
    after = stream.take(3, timeout=0, ack=lease)
    assert endings.sizes == [4, 4], "the take brought the last two"
    assert (numbers(after), len(lease), stream.stats().ledger.acked) == ([10, 11, 12], 0, 10)


def test_groups_that_several_calls_were_to_end_otherwise_are_named_together(open_stream, endings):
    stream, lease = leased(open_stream, 10)

    def away(number):
        if number in (1, 2):
            raise StoreUnavailable("away", where="", uncertain=True)

    endings.before = away
    with pytest.raises(StoreUnavailable):
        lease.release([2])
    with pytest.raises(StoreUnavailable):
        lease.reject("bad", [5])
    with pytest.raises(LeaseLost, match="has released and rejected them") as lost:
        lease.ack()
    assert lost.value.ids == (2, 5)
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.waiting, ledger.dead) == (8, 1, 1)


def test_groups_that_ended_otherwise_are_named_after_an_outage_of_the_others(open_stream, endings):
    stream, lease = leased(open_stream, 10)

    def away(number):
        if number in (1, 3):  # the release, and the first acknowledgement after its repetition
            raise StoreUnavailable("away", where="", uncertain=number == 1)

    endings.before = away
    with pytest.raises(StoreUnavailable):
        lease.release(range(1, PAGE + 1))
    with pytest.raises(StoreUnavailable):
        lease.ack()
    with pytest.raises(LeaseLost, match="has released them") as lost:
        lease.ack()
    assert lost.value.ids == tuple(range(1, PAGE + 1))
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.waiting) == (10 - PAGE, PAGE)


def test_a_take_acknowledges_no_groups_that_a_call_before_has_released(open_stream, endings):
    stream, lease = leased(open_stream, 3)
    endings.twice = True

    def cut_off(_):
        endings.before = lambda _: None
        raise StoreUnavailable("away", where="", uncertain=True)

    endings.before = cut_off
    with pytest.raises(StoreUnavailable):
        lease.release([1])
    assert numbers(open_stream().take(1, timeout=0)) == [0]
    with pytest.raises(LeaseLost, match="released them") as lost:
        stream.take(1, timeout=0, ack=lease)
    assert (lost.value.ids, len(lease)) == ((1,), 0)
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.leased) == (2, 1)


def test_groups_whose_acknowledgement_by_a_take_was_cut_off_are_acknowledged(
    open_stream, monkeypatch
):
    stream, lease = leased(open_stream, 3)

    def cut_off(*_, **__):
        raise StoreUnavailable("away", where="", uncertain=True)

    with monkeypatch.context() as patch:
        patch.setattr(Request, "result", cut_off)
        with pytest.raises(StoreUnavailable), lease:
            stream.take(1, timeout=0, ack=lease)
    with pytest.raises(LeaseLost, match="acknowledged them"):
        lease.release()
    assert stream.stats().ledger.acked == 3


def test_a_take_names_the_groups_that_were_lost_before_its_acknowledgement(open_stream, endings):
    stream, lease = leased(open_stream, 10)
    other = open_stream()
    endings.before = lambda number: (
        number == 2
        and (
            kill_consumer(stream),
            other._consumer._renew(),
        )
    )
    with pytest.raises(LeaseLost) as lost:
        stream.take(1, timeout=0, ack=lease)
    assert lost.value.ids == tuple(range(PAGE + 1, 11))
    assert other.stats().ledger.leased == 0


def test_groups_are_released_in_pages_where_nobody_ends_their_lease(open_stream, endings):
    stream, lease = leased(open_stream, 10)
    silence(stream)  # so that only the calls below release
    lease.abandon()
    stream._consumer.beat()
    assert endings.sizes == [4, 4, 2]
    loop = stream.leases(5, timeout=0, prefetch=1)
    next(loop)
    until(lambda: stream.stats().ledger.leased == 10)
    loop.close()
    stream._consumer.beat()
    assert sorted(endings.sizes[3:]) == [1, 1, 4, 4]
    assert (stream.stats().ledger.leased, stream._consumer._leased) == (0, {})


@pytest.mark.parametrize("page", [2, 100])
def test_a_lease_of_which_a_checkpoint_ends_some_groups_is_lost(open_stream, monkeypatch, page):
    monkeypatch.setattr(stored_groups, "GROUPS_OF_A_CALL", page)
    holder, resumed = open_stream(), open_stream()
    holder.put_many([[numbered(number)] for number in range(5)])
    lease, other = holder.take(3, timeout=0), holder.take(1, timeout=0)
    trained = dict.fromkeys(lease.ids[:2], 1)
    assert resumed.settle(trained, incarnation=lease.incarnation) == 2
    with pytest.raises(LeaseLost, match="checkpoint"):
        lease.ack()
    other.ack()
    stats = resumed.stats()
    assert (stats.ledger.acked, stats.samples_acked) == (3, 3)
    resumed._consumer.beat()
    assert sorted(numbers(resumed.take(2, timeout=5))) == [2, 4]


@pytest.mark.parametrize("leased", [2, 10])
def test_a_lease_of_a_consumer_group_that_is_removed_is_lost(open_stream, pages, leased):
    pages(ended_of_group=3)
    holder, other = open_stream(), open_stream(group="other")
    other.join_group()
    holder.put_many([[numbered(number)] for number in range(leased)])
    lease = holder.take(leased, timeout=0)
    holder._task.store.call(DropGroup("default"))
    with pytest.raises(LeaseLost, match="removed the consumer or its group"):
        lease.ack()
    assert other.stats().ledger.waiting == leased
    if leased >= 3:  # the group is there until the last call
        stats = holder.stats()
        assert (stats.ledger.acked, stats.samples_acked) == (0, 0)
        list(holder._task.store.pages(DropGroup("default")))
