"""Both implementations of the codec's inner loops, for tests that hold for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from redrb.codec import kernels, plain
from tests.tools import skip


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test of the module with each implementation that is there."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(kernels, "kernel", plain)
        elif kernels.NAME != "compiled":
            skip("the codec was not compiled")
        yield
