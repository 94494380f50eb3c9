"""Inputs that fuzzing found to reach different code raise no unexpected error."""

import pytest

from tests.fuzz.targets import TARGETS, inputs


@pytest.mark.parametrize("name", list(TARGETS))
def test_the_corpus_shows_no_defect(name):
    found = inputs(name)
    assert len(found) > len(list(TARGETS[name].seeds())), "no corpus"
    for data in found:
        TARGETS[name].one_input(data)
