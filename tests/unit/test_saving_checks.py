"""A saved task from an untrusted source: settings, counters and facts that would break a task."""

from __future__ import annotations

from typing import Any

import pytest

from redrb.errors import DecodeError
from redrb.stream.saving.checking import CheckedContents
from redrb.stream.saving.file import Frame, Kind
from redrb.stream.task.settings import WIRE_FORMAT

FACTS = {"size": 100, "samples": 1, "status": "completed"}


def header(*, settings: Any = (), **changes: Any) -> Frame:
    head = {
        "task": "math",
        "saved_ms": 1,
        "settings": {"format": str(WIRE_FORMAT), "order": "fifo", **dict(settings)},
        "last": 9,
        "version": 0,
        "groups": ["default"],
        **changes,
    }
    return Frame(Kind.HEADER, head, b"")


def group(**facts: Any) -> Frame:
    return Frame(Kind.GROUP, [1, {**FACTS, **facts}, [[0, "", "", 0, 0]]], b"")


def test_a_group_of_usual_facts_is_accepted() -> None:
    contents = CheckedContents("the file")
    for frame in (header(), group(), Frame(Kind.END, {"groups": 1}, b"")):
        contents.add(frame)
    assert contents.ending.groups == 1


def assert_refused(*frames: Frame) -> None:
    contents = CheckedContents("the file")
    for frame in frames[:-1]:
        contents.add(frame)
    with pytest.raises(DecodeError):
        contents.add(frames[-1])


@pytest.mark.parametrize(
    "settings",
    [
        {"limit": "many"},
        {"limit": "-1"},
        {"limit": "9" * 400},
        {"limit": "1e3"},
        {"max_reads": "many"},
        {"default_max_reads": "some"},
        {"default_max_deliveries": "0"},
        {"max_staleness": "nan"},
        {"on_expired": "explode"},
        {"max_waiting": "some"},
        {"groups_per_version": "1e999"},
        {"groups_per_version": "4.0"},
        {"limit": "007"},
        {"tags": '["b" , "a"]'},
        {"tags": '["a", "a"]'},
        {"tags": "[7]"},
        {"tags": '[["a"]]'},
        {"sampled": "yes"},
        {"order": "uniform", "sampled": "0"},
        {"order": "lifo", "sampled": "1"},
        {"format": "99"},
        {"bytes": "7"},
        {"rules": "7"},
        {"incarnation": "f"},
        {"put": "7"},
    ],
    ids=str,
)
def test_settings_that_no_task_can_have_are_refused(settings: dict[str, str]) -> None:
    assert_refused(header(settings=settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"limit": "100", "max_bytes": "0", "max_deliveries": "2"},
        {"order": "prioritized(0.6)", "sampled": "1", "max_reads": "0", "limit": "9"},
        {"order": "mine", "sampled": "1"},
        {"max_waiting": "4", "default_max_reads": "1", "tags": '["a"]'},
    ],
    ids=str,
)
def test_settings_of_tasks_are_accepted(settings: dict[str, str]) -> None:
    contents = CheckedContents("the file")
    contents.add(header(settings=settings))
    assert settings.items() <= contents.header.settings.items()


@pytest.mark.parametrize("name", ["last", "version", "saved_ms"])
@pytest.mark.parametrize("count", [2**53 - 1, 2**52 + 1, -1])
def test_counters_that_cannot_be_counted_on_are_refused(name: str, count: int) -> None:
    assert_refused(header(**{name: count}))


@pytest.mark.parametrize("score", [None, "-arrival", 1e101, 1e308, float("inf"), -1.0, "heavy"])
def test_weights_that_no_draw_can_use_are_refused(score: object) -> None:
    drawn = header(settings={"order": "uniform", "sampled": "1"})
    assert_refused(drawn, group() if score is None else group(score=score))


@pytest.mark.parametrize("facts", [{"size": 2**40}, {"samples": 5000}, {"score": float("nan")}])
def test_facts_that_no_group_can_have_are_refused(facts: dict[str, Any]) -> None:
    assert_refused(header(), group(**facts))


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.DEAD_LETTER, [f"{2**64 - 1}-{2**64 - 1}", [[b"seq", b"1"]], True], b"x"),
        Frame(Kind.SOURCES, ["ns:a:b", "f 1 1 ", {"one": "0" * 16}], b""),
        Frame(Kind.SOURCES, ["ns:a:b", "f 1 1 1,x", {}], b""),
        Frame(Kind.SOURCES, ["ns:a:b", "f 1 1 ", {"1": "1 now"}], b""),
        Frame(Kind.SOURCES, ["ns:a\n", "f 1 1 ", {}], b""),
        Frame(Kind.SOURCES, ["saved", "f 1 1 ", {}], b""),
        Frame(Kind.SOURCES, [1], b""),
        Frame(Kind.REFRESHES, {"completed": [1, 10]}, b""),
        Frame(Kind.REFRESHES, {"completed": "soon"}, b""),
        Frame(Kind.REFRESHES, {"king": [1, 2]}, b""),
        Frame(Kind.REFRESHES, {"completed 2 -": [1, 2]}, b""),
    ],
    ids=[
        *(
            "the last id of a stream",
            "no id",
            "a row",
            "a digest",
            "an origin",
            "that of files",
            "none",
        ),
        *("a refresh of later groups", "no refresh", "no status", "no rule"),
    ],
)
def test_records_that_would_block_later_ones_are_refused(frame: Frame) -> None:
    assert_refused(header(), frame)
