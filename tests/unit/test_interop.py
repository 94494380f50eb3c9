"""Modules for other libraries say how the library is installed."""

from __future__ import annotations

import pytest

from redrb import ConfigError
from redrb.checks import require_package


def test_a_library_that_is_missing_is_named_with_its_extra() -> None:
    require_package("torch", extra="trl")
    with pytest.raises(ConfigError, match=r"no_such_library .* pip install 'redrb\[trl\]'"):
        require_package("no_such_library", extra="trl")
