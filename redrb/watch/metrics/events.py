"""The events that makers and trainers report, such as a step: for TensorBoard, and for wandb."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from redrb.checks import require_package
from redrb.scopes import Entered

_FLUSH_S: Final = 10


class Write(Protocol):
    """Writes one event, such as to a file of JSON lines, or to TensorBoard."""

    def __call__(self, event: str, **values: object) -> None:
        """Write an event with its values."""


def write_to_all(writes: Sequence[Write]) -> Write:
    """Return a function that writes each event to several places, in this order."""

    def write(event: str, **values: object) -> None:
        for each in writes:
            each(event, **values)

    return write


def numbers_of(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield the values of an event that are finite numbers, also in tensors of one element."""
    for name, value in values.items():
        if value is None or isinstance(value, str | bytes | list | tuple | dict):
            continue
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):  # no number; a tensor of several elements
            continue
        if math.isfinite(number):
            yield name, number


class _Log(Entered):
    """A place for the numbers of events: those of an event `step` are named `step/NAME`."""

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(failed=error is not None)

    def write(self, event: str, **values: object) -> None:
        """Add the numbers of an event at its `step`; it is a `redrb.watch.metrics.events.Write`."""
        numbers = dict(numbers_of(values))
        step = int(numbers.pop("step", 0))
        if numbers:
            self._add({f"{event}/{name}": number for name, number in numbers.items()}, step)

    def close(self, *, failed: bool = False) -> None:
        """Write what is left, and end."""
        raise NotImplementedError

    def _add(self, numbers: Mapping[str, float], step: int) -> None:
        raise NotImplementedError


class TensorBoardLog(_Log):
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

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 (files say nothing of it)
        """Write what is left, and close the files."""
        self._writer.close()

    def _add(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)


class WandbLog(_Log):
    """A run of Weights & Biases; numbers of an event `step` are its metrics `step/NAME`.

    wandb's own variables choose its server, key and mode, such as WANDB_MODE=offline. Needs the
    package wandb (extra `wandb`), which is imported here.
    """

    def __init__(self, project: str, **options: Any) -> None:
        """Begin a run; options are those of `wandb.init`, such as `name`, `group` and `config`.

        Raises:
            ConfigError: wandb is not installed.
        """
        require_package("wandb", extra="wandb")
        import wandb

        self._run: Any = wandb.init(project=project, **options)
        self._run.define_metric("*", step_metric="trained_steps")

    def close(self, *, failed: bool = False) -> None:
        """End the run."""
        self._run.finish(exit_code=int(failed))

    def _add(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "trained_steps": step})
