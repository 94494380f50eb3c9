"""Names of the groups that a maker makes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from redrb.recipe.job_settings import JobSettings


def group_names(recipe: JobSettings) -> Iterator[str]:
    """Yield a new name for each group that this process makes."""
    return (f"{recipe.worker}-{number}" for number in itertools.count(1))
