"""Answers in completions."""

import pytest

from redrb.recipe import boxed, code_in, final_answer, same_answer


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so it is \boxed{42}.", "42"),
        (r"\boxed{1} or rather \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3", None),
        ("42", None),
        ("", None),
    ],
)
def test_boxed(text, found):
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("6 * 7 = <<6*7=42>>42\n#### 42", "42"),
        (r"so \boxed{42}, that is all", "42"),
        (" Paris\n", "Paris"),
        (r"\boxed{1}, hence #### 1,234 ", "1,234"),
    ],
)
def test_the_answer_of_a_solution(text, found):
    assert final_answer(text) == found


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("42", "42.0", True),
        ("$1,234.", "1234", True),
        ("50%", "50", True),
        ("1/2", "0.5", True),
        ("-3", "3", False),
        (" New  York", "new york", True),
        ("x + 1", "x+1", True),
        ("1/0", "1", False),
        ("42 pens", "42", False),
        (None, "42", False),
        ("1e999999999", "1", False),
        ("9" * 5000, "9" * 5000, True),
    ],
)
def test_answers_are_compared_as_numbers_or_as_texts(given, expected, same):
    assert same_answer(given, expected) is same


def test_code_is_that_of_the_last_block():
    assert code_in("first\n```python\nx = 1\n```\nno:\n```\nx = 2\n```\n") == "x = 2\n"
    assert code_in("x = 3") == "x = 3"
