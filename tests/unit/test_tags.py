"""A group gets one value for each tag that its task declares."""

from __future__ import annotations

import math
from typing import Any

import pytest

from redrb import BufferItem, ConfigError
from redrb.errors import RecordError
from redrb.stream.task.tags import MOST_TAGS, declare_tags, tag_values
from tests.samples import numbered


def tagged(*tags: dict[str, Any]) -> list[BufferItem]:
    return [numbered(0, tags=each) for each in tags]


def test_declared_tags_have_names_that_may_stand_in_a_key():
    assert declare_tags(["scores", "a.b/c@d+e-f_1"]) == ("scores", "a.b/c@d+e-f_1")
    assert declare_tags(None) == ()
    several = [f"t{number}" for number in range(MOST_TAGS)]
    assert len(declare_tags(several)) == MOST_TAGS
    wrong: list[Any] = [["a b"], [""], ["a:b"], ["$or"], [1], ["a", "a"], [*several, "x"], "scores"]
    for names in wrong:
        with pytest.raises(ConfigError):
            declare_tags(names)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ([{"t": "math"}, {"t": "math"}], "math"),
        ([{"t": 0.5}, {"t": 0.5}, {"t": 0.5}], 0.5),
        ([{"t": 0.1}] * 3, 0.1),
        ([{"t": 1}, {"t": 2}], 1.5),
        ([{"t": True}, {"t": False}, {"t": False}, {"t": False}], 0.25),
        ([{"t": True}, {"t": True}], 1),
        ([{"t": True}, {"t": 3}], 2.0),
        ([{"t": "math"}, {}], "math"),
        ([{"t": 4}, {"other": 5}], 4),
        ([{}, {}], None),
        ([{"t": 2**53}], 2**53),
        ([{"t": 1.5e200}], 1.5e200),
    ],
)
def test_a_group_gets_its_samples_common_value_or_their_mean(tags, expected):
    (value,) = tag_values(["t"], tagged(*tags), None)
    assert value == expected
    assert not isinstance(value, bool)


def test_values_come_in_the_order_of_the_declared_names():
    items = tagged({"a": 1, "b": "x", "ignored": 9}, {"a": 3, "b": "x"})
    assert tag_values(["b", "c", "a"], items, None) == ["x", None, 2.0]


def test_a_value_given_at_put_wins():
    items = tagged({"a": "x", "b": 1}, {"a": "y", "b": 2})
    assert tag_values(["a", "b", "c"], items, {"a": "z", "b": None, "c": True}) == ["z", None, 1]


@pytest.mark.parametrize("tags", [[{"t": "a"}, {"t": "b"}], [{"t": "a"}, {"t": 1}]])
def test_different_values_in_one_group_are_errors_that_say_what_to_do(tags):
    with pytest.raises(RecordError, match=r"give it at put, tags=\{'t'"):
        tag_values(["t"], tagged(*tags), None)
    assert tag_values(["t"], tagged(*tags), {"t": "c"}) == ["c"]
    assert tag_values(["other"], tagged(*tags), None) == [None]


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e300, 2**53 + 1, "\ud800", "x" * 1025, [1], b"x"]
)
def test_a_value_that_cannot_be_indexed_is_an_error(value):
    with pytest.raises(RecordError, match="'t'"):
        tag_values(["t"], tagged({"t": value}), None)
    with pytest.raises(RecordError, match="'t'"):
        tag_values(["t"], tagged({}), {"t": value})
    assert tag_values(["other"], tagged({"t": value}), None) == [None]


def test_a_tag_given_at_put_must_be_declared():
    with pytest.raises(ConfigError, match=r"colour.*declares a, b"):
        tag_values(["a", "b"], tagged({}), {"colour": "red"})
