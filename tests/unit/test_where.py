"""Both spellings of a query mean the same; errors name the wrong part and the known tags."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from redrb import ConfigError
from redrb.stream.task.queries import MOST_CONDITIONS, MOST_DEPTH, MOST_VALUES, parse_where

TAGS = ["scores", "source", "x", "x_not", "scores_gt_in"]
ABOVE = math.nextafter(0.8, math.inf)
BELOW = math.nextafter(0.8, -math.inf)
MOST = math.nextafter(1e300, 0)


def parsed(where: Any) -> Any:
    text = parse_where(where, TAGS)
    return json.loads(text) if text else None


def condition(tag: str, *values: Any, inverted: bool = False) -> dict[str, Any]:
    listed = [list(value) if isinstance(value, tuple) else value for value in values]
    return {"tag": tag, "values": listed, "inverted": inverted}


@pytest.mark.parametrize(
    ("operator", "operand", "values", "inverted"),
    [
        ("eq", 0.8, [(0.8, 0.8)], False),
        ("eq", "math", ["math"], False),
        ("eq", True, [(1.0, 1.0)], False),
        ("ne", 0.8, [(0.8, 0.8)], True),
        ("gt", 0.8, [(ABOVE, MOST)], False),
        ("gte", 0.8, [(0.8, MOST)], False),
        ("lt", 0.8, [(-1e300, BELOW)], False),
        ("lte", 0.8, [(-1e300, 0.8)], False),
        ("gt", math.inf, [], False),
        ("gt", -math.inf, [(-1e300, MOST)], False),
        ("lt", -math.inf, [], False),
        ("in", [3, "b", True, 1.0, "a"], [(1.0, 1.0), (3.0, 3.0), "a", "b"], False),
        ("in", {2}, [(2.0, 2.0)], False),
        ("not_in", (3, "a"), [(3.0, 3.0), "a"], True),
        ("between", [0, 1], [(0.0, 1.0)], False),
        ("between", (0.5, 0.5), [(0.5, 0.5)], False),
        ("between", [-math.inf, 0], [(-1e300, 0.0)], False),
    ],
)
def test_every_operator_in_both_spellings(operator, operand, values, inverted):
    expected = condition("scores", *values, inverted=inverted)
    assert parsed({"scores": {f"${operator}": operand}}) == expected
    assert parsed({f"scores_{operator}": operand}) == expected
    if operator == "eq":
        assert parsed({"scores": operand}) == expected


def test_entries_of_a_dict_are_joined_by_and():
    both = {"all": [condition("source", "math"), condition("scores", (ABOVE, MOST))]}
    assert parsed({"source": "math", "scores_gt": 0.8}) == both
    assert parsed({"$and": [{"source": "math"}, {"scores": {"$gt": 0.8}}]}) == both
    assert parsed({"source": "math", "$and": [{"$and": [{"scores_gt": 0.8}]}]}) == both


def test_or_joins_queries():
    assert parsed({"$or": [{"source": "math"}, {"x": 1, "scores_lt": 0.8}]}) == {
        "any": [
            condition("source", "math"),
            {"all": [condition("x", (1.0, 1.0)), condition("scores", (-1e300, BELOW))]},
        ]
    }
    assert parsed({"$or": [{"source": "math"}]}) == condition("source", "math")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"scores_gte": 0, "scores_lt": 0.8}, condition("scores", (0.0, BELOW))),
        ({"scores": {"$gt": 0.8, "$lte": 1}}, condition("scores", (ABOVE, 1.0))),
        ({"scores_gt": 1, "scores_lt": 0}, condition("scores")),
        ({"scores_in": [1, 2, 3], "scores_ne": 2}, condition("scores", (1.0, 1.0), (3.0, 3.0))),
        ({"source_in": ["a", "b"], "source_not_in": ["b"]}, condition("source", "a")),
        ({"source_ne": "a", "$and": [{"source_ne": "b"}]},
         condition("source", "a", "b", inverted=True)),
        ({"$or": [{"source": "a"}, {"source": "b"}]}, condition("source", "a", "b")),
        ({"$or": [{"scores_lt": 1}, {"scores_gte": 1}]}, condition("scores", (-1e300, MOST))),
        ({"$or": [{"x_between": [0, 2]}, {"x_between": [1, 3]}]}, condition("x", (0.0, 3.0))),
        ({"$or": [{"source_ne": "a"}, {"source_in": ["a", "b"]}]},
         condition("source", inverted=True)),
        ({"$or": [{"source_ne": "a"}, {"source_not_in": ["a", "b"]}]},
         condition("source", "a", inverted=True)),
    ],
)  # fmt: skip
def test_conditions_on_one_tag_become_one_condition(where, expected):
    assert parsed(where) == expected


def test_a_name_that_ends_like_a_suffix_wins():
    assert parsed({"x_not": 1}) == condition("x_not", (1.0, 1.0))
    assert parsed({"x_not_in": [1]}) == condition("x_not", (1.0, 1.0))
    assert parsed({"x_not_not_in": [1]}) == condition("x_not", (1.0, 1.0), inverted=True)
    assert parsed({"scores_gt_in": 1}) == condition("scores_gt_in", (1.0, 1.0))
    assert json.loads(parse_where({"x_not_in": [1]}, ["x"]))["inverted"]


def test_an_empty_query_asks_for_nothing():
    assert parse_where({}, TAGS) == ""
    assert parse_where({"$and": [{}]}, TAGS) == ""
    assert parsed({"$or": [{}, {"x": 1}]}) == {"any": [condition("x", (1.0, 1.0)), {"all": []}]}


def test_numbers_beyond_all_tags_match_nothing():
    for number in (1e300, -1.1e300, math.inf, -math.inf):
        assert parsed({"scores": number}) == condition("scores")
    assert parsed({"scores_lt": 1e308}) == condition("scores", (-1e300, MOST))


@pytest.mark.parametrize(
    "where",
    [
        {"unknown": 1},
        {"unknown_gt": 1},
        {"scores_above": 1},
        {"$not": {"scores": 1}},
        {3: 1},
        {"scores": {"gt": 1}},
        {"scores": {"$above": 1}},
        {"scores": {}},
        [],
    ],
)
def test_an_unknown_tag_or_operator_is_an_error_that_lists_the_known(where):
    with pytest.raises(ConfigError) as caught:
        parse_where(where, TAGS)
    for known in (*TAGS, "_not_in", "$between", "$and", "$or"):
        assert known in str(caught.value)


def test_without_declared_tags_the_error_says_how_to_declare_some():
    with pytest.raises(ConfigError, match=r"tags=\["):
        parse_where({"scores": 1}, [])


@pytest.mark.parametrize("operator", ["gt", "lte"])
@pytest.mark.parametrize("operand", ["math", [1], {"$gt": 1}, None, math.nan, 2**53 + 1, {1}, b"1"])
def test_comparisons_want_a_number(operator, operand):
    for where in ({f"scores_{operator}": operand}, {"scores": {f"${operator}": operand}}):
        with pytest.raises(ConfigError, match="scores"):
            parse_where(where, TAGS)


@pytest.mark.parametrize(
    "where",
    [
        {"scores": [1]},
        {"scores": None},
        {"scores": math.nan},
        {"scores_ne": [1]},
        {"scores_in": []},
        {"scores_in": "math"},
        {"scores_in": 1},
        {"scores_in": [[1]]},
        {"scores_not_in": [None]},
        {"scores_in": [math.nan]},
        {"scores_between": [1]},
        {"scores_between": [0, 1, 2]},
        {"scores_between": ["a", "b"]},
        {"scores_between": [1, 0]},
        {"scores_between": "ab"},
        {"scores": {"$between": {0, 1}}},
        {"$or": []},
        {"$and": []},
        {"$or": {"scores": 1}},
        {"$or": "scores"},
        {"$or": [1]},
        {"source": "\ud800"},
    ],
)
def test_operands_of_the_wrong_type_are_errors(where):
    with pytest.raises(ConfigError):
        parse_where(where, TAGS)


def test_a_query_may_not_be_nested_too_deeply():
    def nested(depth):
        return {"$or": [{"x": depth}, nested(depth - 1)]} if depth else {"x": 0}

    assert parsed(nested(MOST_DEPTH))
    with pytest.raises(ConfigError, match=f"deeper than {MOST_DEPTH}"):
        parse_where(nested(MOST_DEPTH + 1), TAGS)
    endless: dict[str, Any] = {}
    endless["$and"] = [endless]
    with pytest.raises(ConfigError, match="deeper"):
        parse_where(endless, TAGS)


def test_a_query_may_not_hold_too_much():
    several = [{"source": f"s{number}"} for number in range(MOST_CONDITIONS)]
    assert len(parsed({"$or": several})["values"]) == MOST_CONDITIONS
    with pytest.raises(ConfigError, match=f"{MOST_CONDITIONS} conditions"):
        parse_where({"$or": several, "x": 1}, TAGS)
    assert len(parsed({"x_in": list(range(MOST_VALUES))})["values"]) == MOST_VALUES
    with pytest.raises(ConfigError, match=f"{MOST_VALUES} values"):
        parse_where({"x_in": list(range(MOST_VALUES)), "x_not": {"$in": [1]}}, TAGS)
