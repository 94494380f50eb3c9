"""Answers in completions, for rewards that can be verified."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
_LONGEST = 100
"""Most characters of a number; longer ones are compared as texts."""

_CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def boxed(text: str) -> str | None:
    r"""Return what the last \boxed{...} of a text holds; None if there is none."""
    begin = text.rfind("\\boxed{")
    depth = 0
    for end in range(begin, len(text) if begin >= 0 else begin):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if text[end] == "}" and not depth:
            return text[begin + len("\\boxed{") : end].strip()
    return None


def final_answer(text: str) -> str:
    r"""Return the answer of a data set's solution: after "####", else in \boxed{}, else all."""
    before, mark, after = text.rpartition("####")
    return after.strip() if mark else boxed(before + after) or text.strip()


def same_answer(given: str | None, expected: str) -> bool:
    """Return whether two answers are the same number, or else the same text.

    Of numbers, commas, a dollar or percent sign and a full stop at the end do not count; of texts,
    spaces and the case of letters do not.
    """
    if given is None:
        return False
    numbers = _number(given), _number(expected)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return "".join(given.split()).casefold() == "".join(expected.split()).casefold()


def code_in(text: str) -> str:
    """Return the last block of code in a text; without one, the whole text."""
    found = _CODE.findall(text)
    return found[-1] if found else text


def _number(text: str) -> Fraction | None:
    plain = text.strip().strip("$%").removesuffix(".").replace(",", "").replace("\\$", "")
    if not _NUMBER.fullmatch(plain) or len(plain) > _LONGEST:
        return None
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return None
