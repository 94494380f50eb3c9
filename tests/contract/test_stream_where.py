"""Queries find the groups that a plain evaluation in Python does, a page of groups at a time.

A model test lets groups come and go between the pages of two takes.
"""

from __future__ import annotations

import json
import random
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrb import BatchTimeout, ConfigError
from redrb.connection import Client
from redrb.errors import StoreError
from redrb.keys import TaskKeys
from redrb.lua.pages import PAGES
from redrb.lua.scripts import Script, assemble
from redrb.stream.take.calls import Finish, TakeReply
from redrb.stream.task.queries import parse_where
from redrb.stream.task.tags import tag_values
from tests.audit import audit
from tests.page_trials.bench import put
from tests.samples import numbered, numbers
from tests.scenes import FOREVER_MS, Scene, run_script

TAGS = ("score", "source", "solved")

SEEDS = 4
"""Games of the model test, for each order and page."""

EVALUATE = """
known_rules = {names = cjson.decode(ARGV[1])}
local query, found = read_query(ARGV[2]), {}
for i = 3, #ARGV do
  found[i - 2] = satisfies(query, unpack_facts(ARGV[i])) and 1 or 0
end
return found
"""


@cache
def script() -> Script:
    return assemble("test", "--@include where\n" + EVALUATE)


def matching(client: Client, groups: Sequence[dict[str, Any]], where: Any) -> list[int]:
    """Return the places of the groups whose tags satisfy a query, by the scripts."""
    facts = []
    for tags in groups:
        values = zip(TAGS, tag_values(TAGS, [], tags), strict=True)
        of_group = {name: value for name, value in values if value is not None}
        facts.append(msgspec.msgpack.encode({"size": 1, "tags": of_group} if of_group else {}))
    query = parse_where(where, TAGS) or '{"all":[]}'
    stream = TaskKeys.of("none", "math").stream
    found = run_script(client, script(), [stream], [json.dumps(TAGS), query, *facts])
    return [place for place, each in enumerate(found) if each]


def matches(where: Any, tags: dict[str, Any]) -> bool:
    """Read a query plainly; only the declared names of these tests are understood."""
    return all(entry(key, value, tags) for key, value in where.items())


def entry(key: str, value: Any, tags: dict[str, Any]) -> bool:
    if key in ("$and", "$or"):
        return (all if key == "$and" else any)(matches(each, tags) for each in value)
    name = next(name for name in TAGS if key == name or key.startswith(f"{name}_"))
    held = tags.get(name)
    if key != name:
        return compare(key.removeprefix(f"{name}_"), held, value)
    if isinstance(value, dict):
        return all(compare(operator[1:], held, operand) for operator, operand in value.items())
    return compare("eq", held, value)


def compare(operator: str, held: Any, operand: Any) -> bool:
    if operator in ("ne", "not_in"):
        return not compare({"ne": "eq", "not_in": "in"}[operator], held, operand)
    if operator in ("eq", "in"):
        return held is not None and held in (operand if operator == "in" else [operand])
    if held is None or isinstance(held, str):
        return False
    low, high = operand if operator == "between" else (operand, operand)
    return {
        "gt": held > low,
        "gte": held >= low,
        "lt": held < high,
        "lte": held <= high,
        "between": low <= held <= high,
    }[operator]


NUMBERS = st.one_of(
    st.integers(-2, 3), st.booleans(), st.sampled_from([0.5, 0.1 + 0.2, 1e-300, -0.0, 2.0**53])
)
STRINGS = st.sampled_from(["math", "code", "né\n\0", "", "1"])
VALUES = st.one_of(NUMBERS, STRINGS)
CONDITIONS = st.one_of(
    st.tuples(st.sampled_from(["eq", "ne"]), VALUES),
    st.tuples(st.sampled_from(["gt", "gte", "lt", "lte"]), NUMBERS),
    st.tuples(st.sampled_from(["in", "not_in"]), st.lists(VALUES, min_size=1, max_size=4)),
    st.tuples(st.just("between"), st.lists(NUMBERS, min_size=2, max_size=2).map(sorted)),
)


@st.composite
def one_tag(draw: Any) -> dict[str, Any]:
    name = draw(st.sampled_from(TAGS))
    conditions = draw(st.lists(CONDITIONS, min_size=1, max_size=2))
    if draw(st.booleans()):
        return {name: {f"${operator}": operand for operator, operand in conditions}}
    return {f"{name}_{operator}": operand for operator, operand in conditions}


QUERIES = st.recursive(
    st.lists(one_tag(), max_size=3).map(lambda parts: dict(ChainMap(*parts))),
    lambda inner: st.builds(
        lambda logic, parts, own: {logic: parts} | own,
        st.sampled_from(["$and", "$or"]),
        st.lists(inner, min_size=1, max_size=3),
        st.one_of(st.just({}), one_tag()),
    ),
    max_leaves=6,
)
TAGGED = st.fixed_dictionaries({}, optional=dict.fromkeys(TAGS, VALUES))
PLENTY = {"deadline": None, "derandomize": True}
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@given(groups=st.lists(TAGGED, max_size=40), queries=st.lists(QUERIES, min_size=1, max_size=4))
@settings(max_examples=200, suppress_health_check=SHARED, **PLENTY)
def test_every_query_finds_the_groups_that_a_plain_evaluation_finds(client, groups, queries):
    for where in queries:
        expected = [place for place, tags in enumerate(groups) if matches(where, tags)]
        assert matching(client, groups, where) == expected


def test_numbers_strings_and_missing_tags_differ(client):
    values = ("math", 1, "1", True, 1e299, "code")
    groups: list[dict[str, Any]] = [*({"source": value} for value in values), {}]
    for where, expected in (
        ({"source": 1}, [1, 3]),
        ({"source": "1"}, [2]),
        ({"source_gte": -1e299}, [1, 3, 4]),
        ({"source_ne": "math"}, [1, 2, 3, 4, 5, 6]),
        ({"source_not_in": ["math", 1]}, [2, 4, 5, 6]),
        ({"source": "unknown"}, []),
        ({"source_ne": "unknown"}, list(range(7))),
        ({"score": 1}, []),
        ({"score_ne": 1}, list(range(7))),
    ):
        assert matching(client, groups, where) == expected, where


def test_numbers_are_compared_to_the_last_digit(client):
    groups = [{"score": value} for value in (0.3, 0.1 + 0.2, 2**53, 2**53 - 1, 5e-324)]
    assert matching(client, groups, {"score": 0.3}) == [0]
    assert matching(client, groups, {"score_gt": 0.3, "score_lt": 1}) == [1]
    assert matching(client, groups, {"score_gte": 2**53}) == [2]
    assert matching(client, groups, {"score_gt": 0, "score_lt": 1e-300}) == [4]


def test_a_tag_that_the_task_does_not_declare_is_an_error(client, namespace):
    scene = Scene(client, namespace, 1, {"tags": ["source"]})
    scene.fill(tags={"source": "math"})
    with pytest.raises(StoreError, match="no longer declares the tag other"):
        scene.take("a", 1, where=json.dumps({"tag": "other", "values": ["x"], "inverted": False}))
    scene.stream.close()


@dataclass
class Held:
    """A group of the model: where it waits, and what it is leased by."""

    tags: dict[str, Any]
    key: float
    waiting: bool = True
    moves: int = 0


@dataclass
class Taker:
    """A take of the model, which goes on page by page."""

    name: str
    where: dict[str, Any]
    need: int
    waits: bool
    search: Any = None
    began: dict[int, int] | None = None
    done: bool = False


@dataclass
class Model:
    """A task in Redis and in Python, and two takes with a query."""

    scene: Scene
    order: str
    groups: dict[int, Held] = field(default_factory=dict)
    leases: list[tuple[tuple[str, str, str, str], int]] = field(default_factory=list)
    names: Any = field(default_factory=count)

    def put(self, tags: dict[str, Any], rank: float) -> None:
        (seq,) = self.scene.stream.put(
            numbered(0), tags=tags, priority=rank, policy_version=int(rank)
        )
        self.groups[seq] = Held(tags, self._key(seq, rank))

    def _key(self, seq: int, rank: float) -> float:
        keys = {"fifo": seq, "lifo": -seq, "stalest": rank, "freshest": -rank, "priority": -rank}
        return keys[self.order]

    def rescore(self, number: int, rank: float) -> None:
        """Change the place of a group that waits, where the order can, often of a match."""
        waiting = self.true_matches(SOLVED[0] if number % 2 else {})
        if self.order == "priority" and waiting:
            seq = waiting[number % len(waiting)]
            self.scene.stream.update_priority([seq], [rank])
            self.groups[seq].key = self._key(seq, rank)
            self.groups[seq].moves += 1

    def rival(self, matching: bool) -> None:
        """Let another consumer lease the first group, or the first that matches."""
        where = SOLVED[0] if matching else {}
        taking = self.scene.taking(f"rival{next(self.names)}", 1, where=parse_where(where, TAGS))
        reply = self.scene.run(taking)
        while reply.outcome == "more":
            reply = self.scene.run(msgspec.structs.replace(taking, search=reply.search))
        if reply.outcome == "taken":
            seq = self.true_matches(where)[0]
            self.groups[seq].waiting = False
            lease = (taking.group, taking.consumer, taking.slot, taking.token)
            self.leases.append((lease, seq))

    def release(self) -> None:
        """Let the rival requeue a group."""
        if self.leases:
            lease, seq = self.leases.pop(0)
            assert self.scene.run(Finish(*lease, "release", [str(seq)])) == "ok"
            self.groups[seq].waiting = True
            self.groups[seq].moves += 1

    def true_matches(self, where: dict[str, Any]) -> list[int]:
        """Return the groups that wait and match, in the task's order."""
        found = [
            (each.key, seq)
            for seq, each in self.groups.items()
            if each.waiting and matches(where, each.tags)
        ]
        return [seq for _, seq in sorted(found)]

    def ask(self, taker: Taker) -> TakeReply:
        """Run one call of a take, and check what it replies."""
        query = parse_where(taker.where, TAGS) or '{"all":[]}'
        taking = self.scene.taking(
            f"taker{next(self.names)}",
            taker.need,
            ttl_ms=FOREVER_MS if taker.waits else 0,
            where=query,
        )
        if taker.search is None:
            taker.began = {seq: each.moves for seq, each in self.groups.items() if each.waiting}
        call = msgspec.structs.replace(taking, waiter=taker.name, search=taker.search)
        reply = self.scene.run(call)
        expected = self.true_matches(taker.where)
        began, taker.search = taker.began or {}, reply.search
        stable = [seq for seq in expected if began.get(seq) == self.groups[seq].moves]
        if reply.outcome == "taken":
            leased = self.leased(call.slot, reply)
            assert len(leased) == taker.need
            assert set(leased) <= set(expected)
            first = [seq for seq in leased if seq in stable]
            assert first == stable[: len(first)]
            for seq in leased:
                self.groups[seq].waiting = False
            taker.done = True
        elif reply.outcome == "short":
            assert len(stable) < taker.need
            if taker.waits:  # nothing else would wake it
                assert len(expected) < taker.need
                assert float(self.counted(query)) >= len(expected)
            else:
                taker.done = True
        else:
            assert reply.outcome == "more"
        return reply

    def counted(self, query: str) -> bytes:
        """Return how many matches puts have counted at most."""
        prefix = self.scene.stream._task.store.keys.prefix
        state: bytes = self.scene.client.execute("HGET", f"{prefix}queries:default", query)
        return state.partition(b" ")[0]

    def leased(self, slot: str, reply: TakeReply) -> list[int]:
        stream = self.scene.stream._task.store.keys.stream
        pending = self.scene.client.execute("XPENDING", stream, "default", "-", "+", 100, slot)
        ids = [int(entry[0].rpartition(b"-")[2]) for entry in pending]
        assert not reply.members or sorted(map(int, reply.members)) == ids
        return [int(member) for member in reply.members] or ids

    def finish(self, taker: Taker) -> None:
        """Ask until the take ends or waits: without changes it finds what there is.

        One that does not wait need not meet what came in front of its place.
        """
        expected, missed = self.true_matches(taker.where), taker.search and not taker.waits
        for _ in range(200):
            reply = self.ask(taker)
            if reply.outcome != "more":
                break
        assert missed or reply.outcome == ("taken" if len(expected) >= taker.need else "short")


SOLVED = [{"solved": True}, {"$or": [{"solved": 1}, {"score_gt": 0.5}]}, {"source_ne": "math"}]


def play(model: Model, dice: random.Random) -> None:
    """Let groups come and go, while two takes look for some, often for the same."""

    def arrive() -> None:
        solved = dice.random() < 0.15
        model.put({"solved": solved, "source": "code" if solved else "math"}, dice.randrange(3))

    def begin(number: int) -> Taker:
        where = SOLVED[0] if dice.random() < 0.6 else dice.choice(SOLVED)
        return Taker(f"w{number}", where, dice.randint(1, 3), dice.random() < 0.7)

    for _ in range(dice.randrange(16)):
        arrive()
    takers = [begin(0), begin(1)]
    for _ in range(60):
        chance = dice.random()
        if chance < 0.2:
            arrive()
        elif chance < 0.35:
            model.rescore(dice.randrange(99), dice.randrange(3))
        elif chance < 0.42:
            model.rival(dice.random() < 0.5)
        elif chance < 0.5:
            model.release()
        else:
            number = dice.randrange(2)
            model.ask(takers[number])
            if takers[number].done:
                takers[number] = begin(number)
    for taker in takers:
        model.finish(taker)
    audit(model.scene.stream)
    model.scene.stream.close()


@pytest.mark.parametrize("order", ["fifo", "lifo", "stalest", "freshest", "priority"])
@pytest.mark.parametrize("page", [3, PAGES["matched"]])
@pytest.mark.usefixtures("no_heartbeats")
def test_takes_find_what_waits_while_groups_come_and_go(client, namespace, pages, page, order):
    pages(matched=page)
    settings = {"order": order, "tags": list(TAGS), "checks": ()}
    for seed in range(SEEDS):
        scene = Scene(client, f"{namespace}{seed}", 0, settings)
        play(Model(scene, order), random.Random(f"{order} {page} {seed}"))


@pytest.mark.parametrize("groups", [1, 3, 4, 300])
def test_a_match_behind_all_others_is_found(open_stream, pages, groups):
    """A page, one more, and a hundred pages; all or nothing; a take that waits looks at no more."""
    pages(matched=3)
    stream = open_stream(tags=["kind"])
    stream.join_group()
    put(stream, groups - 1, tags={"kind": "common"})
    put(stream, 1, first=groups - 1, tags={"kind": "rare"})
    assert stream.count(where={"kind": "rare"}) == 1
    assert stream.count(where={"kind_ne": "rare"}) == groups - 1
    with pytest.raises(BatchTimeout) as caught:
        stream.take(2, timeout=0, where={"kind": "rare"})
    assert (caught.value.available, caught.value.fates["unmatched"]) == (1, groups - 1)
    assert numbers(stream.take(2, timeout=0, at_least=1, where={"kind": "rare"})) == [groups - 1]
    assert stream.count() == groups - 1


def test_a_take_that_waits_looks_at_no_group_again(client, namespace, pages, no_heartbeats):
    """Neither when it asks again, nor at the puts of others; only when enough have come."""
    pages(matched=10)
    scene = Scene(client, namespace, 200, {"tags": ["kind"]})
    scene.fill(tags={"kind": 0})
    query = parse_where({"kind": 1}, ["kind"])
    taking = scene.taking("a", 2, ttl_ms=FOREVER_MS, where=query)
    calls = 0
    while (reply := scene.run(taking)).outcome == "more":
        taking, calls = msgspec.structs.replace(taking, search=reply.search), calls + 1
    assert (reply.outcome, reply.amount, calls) == ("short", 0, 20)
    again = msgspec.structs.replace(taking, search=None)
    scene.fill(1, tags={"kind": 1})
    assert scene.run(again).amount == 1
    assert not client.execute("EXISTS", f"{scene.stream._task.store.keys.prefix}wake:a.w")
    scene.fill(1, tags={"kind": 1})
    assert client.execute("EXISTS", f"{scene.stream._task.store.keys.prefix}wake:a.w")
    assert scene.run(again).outcome == "more"


@pytest.mark.parametrize("order", ["uniform", "prioritized"])
def test_a_query_of_an_order_that_draws_is_refused(client, namespace, order):
    scene = Scene(client, namespace, 4, {"order": order, "tags": ["kind"]})
    scene.fill(tags={"kind": 1}, priority=1.0)
    assert scene.stream.count(where={"kind": 1}) == 4
    with pytest.raises(ConfigError, match="draws its groups"):
        scene.stream.take(1, timeout=0, where={"kind": 1})
    query = parse_where({"kind": 1}, ["kind"])
    for ttl_ms in (0, FOREVER_MS):  # of a process that does not know the order
        assert scene.take("a", 1, ttl_ms=ttl_ms, where=query).outcome == "drawn"
    scene.stream.close()
