"""The log of groups that cannot be stored and are dropped, one line for each kind of fault."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

from redrb.errors import RecordError
from redrb.experience.faults import Fault, fault_extra

_log = logging.getLogger("redrb")


def log_dropped(task: str, errors: Iterable[Exception]) -> None:
    """Log why groups are dropped; `errors` has the error of each."""
    kinds: defaultdict[tuple[str, str | None], list[Exception]] = defaultdict(list)
    for error in errors:
        field = error.field if isinstance(error, RecordError) else None
        kinds[type(error).__name__, field].append(error)
    for (name, field), found in kinds.items():
        count, error = len(found), found[0]
        # a message may advise to drop such groups, which is done already
        problem = error.problem if isinstance(error, RecordError) else str(error)
        fault = Fault("a group", f"cannot be stored: {problem}", f"{name} {field}")
        # makers count a reward that is no number themselves, with the line of the code
        extra = None if field == "reward" else fault_extra(fault, count)
        dropped = "a group is dropped" if count == 1 else f"{count} groups are dropped, the first"
        _log.error("task %r: %s: %s", task, dropped, problem, extra=extra)
