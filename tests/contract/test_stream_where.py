"""Queries count and select the groups that a plain evaluation in Python does, at a bounded cost.

The scripts' parts run here on pools that the test builds itself.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import redrb
from redrb.connection import Client
from redrb.errors import StoreError
from redrb.keys import TaskKeys
from redrb.lua.pages import PAGES
from redrb.lua.scripts import Script, assemble, run
from redrb.stream.task.queries import parse_where
from redrb.stream.task.tags import tag_values
from tests.servers import programs

TAGS = ("score", "source", "solved")
POOL = "default:aborted"

COUNTED = """
local commands, looked, served = 0, 0, redis
local redis = {sha1hex = redis.sha1hex, call = function(name, ...)
  local reply = served.call(name, ...)
  commands = commands + 1
  looked = looked + (name == 'ZRANGE' and #reply or 0)
  return reply
end}
"""

BODY = """
local pool, names = ARGV[2], cjson.decode(ARGV[3])
if ARGV[1] == 'put' then
  for _, entry in ipairs(cjson.decode(ARGV[4])) do
    redis.call('ZADD', key('ready', pool), entry.place, entry.member)
    tag_in(pool, names, {entry.member}, {entry})
  end
elseif ARGV[1] == 'remove' then
  local members = cjson.decode(ARGV[4])
  redis.call('ZREM', key('ready', pool), unpack(members))
  tag_out(pool, names, members)
elseif ARGV[1] == 'count' then
  return {count_where(pool, names, cjson.decode(ARGV[4])), commands, looked}
elseif ARGV[1] == 'select' then
  local found = select_where(pool, names, cjson.decode(ARGV[4]), tonumber(ARGV[5]))
  return {found, commands, looked}
end
"""


@cache
def script(chunk: int) -> Script:
    with patch.dict(PAGES, matched=chunk):
        text = COUNTED + assemble("test", "--@include where\n" + BODY).text
    return Script(text, hashlib.sha1(text.encode()).hexdigest(), ())


@dataclass
class Pool:
    """The waiting groups of one status and one consumer group, in Redis and in Python."""

    client: Client
    chunk: int = 1000
    names: tuple[str, ...] = TAGS
    keys: TaskKeys = field(default_factory=lambda: TaskKeys.of(uuid4().hex, "math"))
    groups: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict)

    def put(self, groups: Sequence[tuple[float, dict[str, Any]]]) -> None:
        first = len(self.groups)
        new = {f"{first + i:016}": group for i, group in enumerate(groups)}
        self.groups |= new
        for part in batched(list(new.items()), 1000):
            entries = [
                {"member": member, "place": place, "tags": self._indexed(tags)}
                for member, (place, tags) in part
            ]
            self._run("put", entries)

    def _indexed(self, tags: dict[str, Any]) -> dict[str, Any]:
        values = zip(self.names, tag_values(self.names, [], tags), strict=True)
        return {name: value for name, value in values if value is not None}

    def remove(self, members: Sequence[str]) -> None:
        self._run("remove", list(members))
        for member in members:
            del self.groups[member]

    def count(self, where: Any) -> int:
        return self.cost_of_count(where)[0]

    def select(self, where: Any, n: int) -> list[str]:
        return self.cost_of_select(where, n)[0]

    def cost_of_count(self, where: Any) -> tuple[int, int, int]:
        """Return the count, and how many commands and members it took."""
        return tuple(self._run("count", self._parsed(where)))

    def cost_of_select(self, where: Any, n: int) -> tuple[list[str], int, int]:
        found, commands, looked = self._run("select", self._parsed(where), n)
        return [member.decode() for member in found], commands, looked

    def matching(self, where: Any) -> list[str]:
        """Return what a query means: the members that match, in the pool's order."""
        ordered = sorted(self.groups, key=lambda member: (self.groups[member][0], member))
        return [member for member in ordered if matches(where, self.groups[member][1])]

    def check(self, where: Any, *counts: int) -> None:
        expected = self.matching(where)
        assert self.count(where) == len(expected)
        for n in counts:
            assert self.select(where, n) == expected[:n]

    def _parsed(self, where: Any) -> Any:
        return json.loads(parse_where(where, self.names) or '{"all":[]}')

    def _run(self, action: str, data: Any, *more: int) -> Any:
        arguments = [action, POOL, json.dumps(self.names), json.dumps(data, ensure_ascii=False)]
        return run(self.client, script(self.chunk), [self.keys.stream], [*arguments, *more])


def batched(entries: list[Any], size: int) -> list[list[Any]]:
    return [entries[first : first + size] for first in range(0, len(entries), size)]


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
GROUPS = st.tuples(
    st.sampled_from([-1.0, 0.0, 0.5, 7.0, float(2**52)]),
    st.fixed_dictionaries({}, optional=dict.fromkeys(TAGS, VALUES)),
)


@given(
    groups=st.lists(GROUPS, max_size=40),
    removed=st.sets(st.integers(0, 39)),
    queries=st.lists(QUERIES, min_size=1, max_size=4),
    chunk=st.sampled_from([3, 1000]),
)
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_query_finds_the_groups_that_a_plain_evaluation_finds(
    client, groups, removed, queries, chunk
):
    pool = Pool(client, chunk)
    pool.put(groups)
    if gone := [f"{number:016}" for number in removed if number < len(groups)]:
        pool.remove(gone)
    for where in queries:
        pool.check(where, 1, 4, 50)


def test_numbers_strings_and_missing_tags_differ(client):
    pool = Pool(client)
    pool.put(
        [(0, {"source": value}) for value in ("math", 1, "1", True, 1e299, "code")] + [(0, {})]
    )
    assert pool.count({"source": 1}) == 2
    assert pool.count({"source": "1"}) == 1
    assert pool.count({"source_gte": -1e299}) == 3
    assert pool.count({"source_ne": "math"}) == 6
    assert pool.count({"source_not_in": ["math", 1]}) == 4
    assert pool.count({"source": "unknown"}) == 0
    assert pool.count({"source_ne": "unknown"}) == 7
    assert pool.count({"score": 1}) == 0
    assert pool.count({"score_ne": 1}) == 7
    assert pool.select({"source_ne": "math"}, 3) == [f"{n:016}" for n in (1, 2, 3)]


def test_numbers_are_compared_to_the_last_digit(client):
    pool = Pool(client)
    pool.put([(0, {"score": value}) for value in (0.3, 0.1 + 0.2, 2**53, 2**53 - 1, 5e-324)])
    assert pool.select({"score": 0.3}, 9) == [f"{0:016}"]
    assert pool.select({"score_gt": 0.3, "score_lt": 1}, 9) == [f"{1:016}"]
    assert pool.select({"score_gte": 2**53}, 9) == [f"{2:016}"]
    assert pool.select({"score_gt": 0, "score_lt": 1e-300}, 9) == [f"{4:016}"]


def test_a_pool_without_an_index_for_the_query_is_scanned_once(client):
    pool = Pool(client, chunk=8)
    pool.put([(0, {"source": "math"} if n % 2 else {}) for n in range(50)])
    where = {"source_ne": "math", "score_ne": 1}
    chosen, _, looked = pool.cost_of_select(where, 40)
    assert chosen == pool.matching(where)
    assert looked == 50


def test_queries_write_nothing(client):
    pool = Pool(client)
    pool.put([(0, {"source": "math", "score": 1})])
    before = stored(client, pool)
    for where in ({"source": "unknown"}, {"$or": [{"source": "new"}, {"score_gt": 0}]}):
        pool.count(where)
        pool.select(where, 1)
    assert stored(client, pool) == before


def test_a_pool_leaves_nothing_behind_when_its_groups_are_gone(client):
    pool = Pool(client)
    pool.put([(0, {"source": "math", "score": n}) for n in range(2500)])
    for part in batched(list(pool.groups), 2000):
        pool.remove(part)
    assert stored(client, pool) == set()


def test_a_tag_that_the_task_does_not_declare_is_an_error(client):
    pool = Pool(client)
    pool.put([(0, {"source": "math"})])
    asked = json.dumps({"tag": "other", "values": ["math"], "inverted": False})
    with pytest.raises(StoreError, match="no longer declares the tag other"):
        run(
            client, script(1000), [pool.keys.stream],
            ["count", POOL, json.dumps(TAGS), asked],
        )  # fmt: skip


def stored(client: Client, pool: Pool) -> set[str]:
    return {key.decode() for key in client.execute("KEYS", f"{glob(pool.keys.prefix)}*")}


def glob(prefix: str) -> str:
    return prefix.replace("{", "?").replace("}", "?")


@pytest.fixture(scope="module", params=list(programs()))
def pools(request, server_urls):
    """Pools of 1,000 and 20,000 groups on each real server, which tests only read."""
    with redrb.connect(server_urls(request.param)) as client:
        yield crowded(Pool(client), 1000), crowded(Pool(client), 20_000)


def crowded(pool: Pool, size: int) -> Pool:
    """Fill a pool: `score` from 0 to 1, 20 rare sources at the end, every second one solved."""
    dice = random.Random(size)
    sources = ["math"] * (size - 20) + ["rare"] * 20
    pool.put(
        [
            (i, {"score": dice.random(), "source": source, "solved": i % 2})
            for i, source in enumerate(sources)
        ]
    )
    return pool


RARE = {"source": "rare"}
HALF = {"solved": True}
HIGH = {"score_gt": 0.5}
CHEAP_COUNTS = [
    RARE,
    HALF,
    {"score_between": [0.2, 0.7]},
    {"score_gte": 0.2, "score_lt": 0.7},
    {"source_ne": "math"},
    {"$or": [{"score_lt": 0.1}, {"score_gt": 0.2}]},
]
SELECTIVE = [
    RARE | HALF,
    RARE | HIGH | HALF,
    {"source_ne": "math", "solved_ne": 1},
    {"$or": [RARE | HALF, RARE | HIGH]},
    {"$and": [{"$or": [RARE, {"score": 2}]}, HALF]},
]
UNSELECTIVE = [
    HALF,
    HIGH,
    HALF | HIGH,
    {"$or": [HALF, HIGH]},
    {"source_ne": "rare"},
    {"source": "math"},
]


@pytest.mark.long
def test_conditions_on_one_tag_are_counted_without_looking_at_a_group(pools):
    for where in CHEAP_COUNTS:
        (some, commands, looked), (many, at_more, looked_more) = (
            pool.cost_of_count(where) for pool in pools
        )
        assert [some, many] == [len(pool.matching(where)) for pool in pools]
        assert commands == at_more <= 8
        assert looked == looked_more == 0


@pytest.mark.long
def test_a_selective_query_costs_as_much_as_its_rarest_condition_matches(pools):
    for where in SELECTIVE:
        for pool in pools:
            expected = pool.matching(where)
            count, commands, looked = pool.cost_of_count(where)
            assert count == len(expected)
            assert looked <= 40
            assert commands <= 40
            chosen, commands, looked = pool.cost_of_select(where, 8)
            assert chosen == expected[:8]
            assert looked <= 80
            assert commands <= 60


@pytest.mark.long
def test_an_unselective_query_looks_at_the_front_of_the_pool(pools):
    for where in UNSELECTIVE:
        for pool in pools:
            chosen, commands, looked = pool.cost_of_select(where, 32)
            assert chosen == pool.matching(where)[:32]
            assert looked <= 32 * 2 * 6
            assert commands <= 40


@pytest.mark.long
def test_the_negation_is_counted_where_that_is_cheaper(pools):
    where = {"$or": [{"source": "math"}, {"solved_ne": 1, "score_gt": 2}]}
    for pool in pools:
        count, _, looked = pool.cost_of_count(where)
        assert count == len(pool.matching(where))
        assert looked <= 20


@pytest.mark.long
@pytest.mark.parametrize("size", [1000, 20_000])
def test_a_front_without_matches_costs_at_most_as_much_again(real_url, size):
    """Each condition holds for 600 groups, and both together for 300 at the very end."""
    where = {"score": 8, "solved": 4}
    with redrb.connect(real_url) as client:
        pool = crowded(Pool(client), size)
        pool.put(
            [(size + i, {"score": 7 + (i >= 300), "solved": 3 + (i < 600)}) for i in range(900)]
        )
        chosen, _, looked = pool.cost_of_select(where, 400)
        assert chosen == pool.matching(where)
        assert len(chosen) == 300
        assert looked <= 2 * 600


@pytest.mark.long
def test_many_groups_in_many_parts_are_selected_in_order(real_url):
    """More than one part of a sorted set, ties in the order, and more wanted than match."""
    dice = random.Random(1)
    with redrb.connect(real_url) as client:
        pool = crowded(Pool(client), 20_000)
        scored = [
            {"score": 3 + dice.randrange(4), "source": dice.choice("abc")} for _ in range(9000)
        ]
        pool.put([(dice.randrange(-50, 0), tags) for tags in scored])
        for where in (
            {"score_gte": 3, "source": "a"},
            {"$or": [{"score": 3}, {"source_in": ["a", "b"]}]},
            {"score_gt": 3, "source_ne": "a"},
        ):
            pool.check(where, 1, 2500, 9000)
