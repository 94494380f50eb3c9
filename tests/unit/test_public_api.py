"""What `import redrb` offers, and how little it costs."""

import pytest

import redrb
import redrb.weights
from tests import public_names


def test_the_public_names_are_sorted_and_unique():
    assert redrb.__all__ == sorted(set(redrb.__all__))


@pytest.mark.parametrize("package", [redrb, redrb.weights])
def test_every_public_name_loads_and_is_documented(package):
    assert [name for name in package.__all__ if not getattr(package, name).__doc__] == []


def test_dir_shows_the_public_names():
    assert dir(redrb) == redrb.__all__


def test_the_root_has_the_names_that_most_users_type():
    assert len(redrb.__all__) < 50


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="attribute nothing"):
        _ = redrb.nothing


def test_what_users_type_is_what_the_golden_file_says(monkeypatch):
    """See `tests/public_names.py`, which writes the file anew."""
    for optional in ("trl", "torchrl"):
        pytest.importorskip(optional)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    golden = set(public_names.GOLDEN.read_text().splitlines())
    found = set(public_names.lines())
    assert (sorted(golden - found), sorted(found - golden)) == ([], [])
