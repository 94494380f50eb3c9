"""`TensorBoardLog`: writes the numbers of events for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from redrb.checks import require_package
from redrb.metrics.events import numbers_of

_FLUSH_S: Final = 10


class TensorBoardLog:
    """Appends event files to a folder; numbers of an event `step` are scalars `step/NAME`.

    Needs the package tensorboard (extra `tensorboard`), which is imported here.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open the folder; each process needs one of its own.

        Raises:
            ConfigError: tensorboard is not installed.
        """
        require_package("tensorboard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), flush_secs=_FLUSH_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, event: str, **values: object) -> None:
        """Add the numbers of an event at its `step`; it is a `redrb.metrics.events.Write`."""
        numbers = dict(numbers_of(values))
        step = int(numbers.pop("step", 0))
        for name, number in numbers.items():
            self._writer.add_scalar(f"{event}/{name}", number, step)

    def close(self) -> None:
        """Write what is left, and close the files."""
        self._writer.close()
