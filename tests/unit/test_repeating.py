"""A property test that fails prints a program, which fails in the same way."""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from redrb import Status
from tests.repeating import note_programs

CLONE = Path(__file__).parents[2]


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str
    bound: float


VALUES = st.sampled_from(
    [
        [("put", 1, None), ("take", float("inf"), b"\x00")],
        {"a": {1, 2}, "b": [(), (1,)], "c": -0.0},
        [Status.FAILED, Colour.RED, Setting("x", 0.5), frozenset()],
        float("nan"),
        [],
        "\n'\\",
    ]
)


@given(value=VALUES, setting=st.builds(Setting, st.just("y"), st.just(float("-inf"))))
@settings(max_examples=40, derandomize=True, phases=[Phase.generate], deadline=None)
def always_fails(namespace: str, value: object, setting: Setting) -> None:
    assert namespace
    raise ZeroDivisionError(repr((value, setting)))


def test_a_program_repeats_the_failure():
    note_programs(always_fails)
    note_programs(always_fails)  # once is enough
    failures: dict[str, str] = {}
    for value in VALUES.elements:  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError) as caught:
            always_fails.hypothesis.inner_test(
                namespace="n", value=value, setting=Setting("y", float("-inf"))
            )
        assert len(caught.value.__notes__) == 1
        failures[str(caught.value)] = caught.value.__notes__[0].partition("\n")[2]
    assert len(failures) == 6
    everything = "\n".join(
        f"try:\n  exec({program!r})\nexcept ZeroDivisionError as error:\n  print(repr(str(error)))"
        for program in failures.values()
    )
    done = subprocess.run(
        [sys.executable, "-c", everything],
        cwd=CLONE,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines() == [repr(message) for message in failures]


def test_a_failure_of_hypothesis_shows_the_program():
    note_programs(always_fails)
    with pytest.raises(ZeroDivisionError) as caught:
        always_fails(namespace="n")
    assert any("repeat(" in note for note in caught.value.__notes__)


def test_values_that_no_program_can_hold_are_named():
    note_programs(always_fails)
    with pytest.raises(ZeroDivisionError) as caught:
        always_fails.hypothesis.inner_test(namespace="n", value=object(), setting=None)
    assert "a object" in caught.value.__notes__[0]
