"""Trials of pages: each runs one mechanism with so many groups, to its end.

A trial takes a `Bench` and a count. It asserts that the mechanism comes to its complete end after
as many calls as it needs, and that nothing is done twice.
"""

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("groups", "leases", "reports")))
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("bench", "waiting")))
