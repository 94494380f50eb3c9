"""The page of files in reading order is true, and short enough to be read."""

from __future__ import annotations

from redrb.codec import kernels
from tests.reading_order import MOST_LINES, MOST_LINES_FIRST, PAGE, lines_of, rewritten, sittings
from tests.tools import skip

TEXT = PAGE.read_text("utf-8")


def test_its_numbers_are_those_of_the_code() -> None:
    """`python -m tests.reading_order` writes them anew."""
    if kernels.NAME != "compiled":
        skip("the codec was not compiled: a put passes its files in Python")
    assert rewritten(TEXT) == TEXT


def test_the_store_is_read_in_six_sittings() -> None:
    """If a sum is too large, shorten code, or take a file out that one can do without."""
    sums = [sum(map(lines_of, files)) for files in sittings(TEXT)]
    assert len(sums) == 6
    assert sum(sums) <= MOST_LINES
    assert sum(sums[:3]) <= MOST_LINES_FIRST


def test_a_file_is_listed_once() -> None:
    names = [name for files in sittings(TEXT) for name in files]
    assert len(names) == len(set(names)) > 60
