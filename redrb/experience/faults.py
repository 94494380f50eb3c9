"""Why groups are filtered: faults of the user's functions, in the log and for reports of makers."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_log = logging.getLogger("redrb")

_PACKAGE = Path(__file__).parents[1]
_RECIPES = _PACKAGE / "recipe" / "examples"
_ASYNCIO = Path(traceback.__file__).parent / "asyncio"
_newest: Fault | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a group is filtered.

    Attributes:
        how: How, such as "raised ValueError: no verdict".
        kind: Equal for faults that one change of the code would mend.
        place: File and line of the user's code, such as "my_recipe.py, line 12"; "": not known.
    """

    what: str
    how: str
    kind: str
    place: str = ""

    @property
    def why(self) -> str:
        """How and where it failed."""
        return f"{self.how} ({self.place})" if self.place else self.how

    def __str__(self) -> str:
        return f"{self.what} {self.why}"


def raised(what: str, error: BaseException) -> Fault:
    """Return the fault of a function that raised an error, with the line of the user's code."""
    name, place = type(error).__name__, _place(error)
    message = " ".join(f"{error!s:.200}".split()).removesuffix(".")
    how = f"raised {name}: {message}" if message else f"raised {name}"
    return Fault(what, how, f"{what} {name} {place}", place)


def log_filtered(fault: Fault, message: str, *values: object, groups: int = 1) -> None:
    """Log that groups are filtered, for people and for `faults_reported`."""
    _log.warning(message, *values, extra=fault_extra(fault, groups))


def newest_fault() -> Fault | None:
    """Return the last fault that was logged in this process."""
    return _newest


def fault_extra(fault: Fault, groups: int = 1) -> Mapping[str, object]:
    """Return `extra` for a log call by which groups are counted in `faults_reported`."""
    global _newest
    _newest = fault
    return {"redrb_fault": fault, "redrb_groups": groups}


@contextmanager
def faults_reported(report: Callable[[Fault, int], Any]) -> Iterator[None]:
    """In this block, pass the faults that are logged to `report`, with their number of groups.

    A filter and no handler: with a handler, a process without logging set up would print nothing.
    """

    class Faults(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            fault = getattr(record, "redrb_fault", None)
            if isinstance(fault, Fault):
                report(fault, getattr(record, "redrb_groups", 1))
            return True

    faults = Faults()
    _log.addFilter(faults)
    try:
        yield
    finally:
        _log.removeFilter(faults)


def _place(error: BaseException) -> str:
    """Return file and line of the user's function in the trace of an error; "" without one."""
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        own = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_RECIPES)
        if not own and not path.is_relative_to(_ASYNCIO):
            frames.append(frame)
    if not frames:
        return ""
    file = frames[0].filename  # the function that redrb called; further files may be libraries
    line = [frame.lineno for frame in frames if frame.filename == file][-1]
    return f"{Path(file).name}, line {line}"
