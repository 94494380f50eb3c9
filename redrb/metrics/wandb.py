"""`WandbLog`: sends the numbers of events to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from redrb.checks import require_package
from redrb.metrics.events import numbers_of


class WandbLog:
    """A run of Weights & Biases; numbers of an event `step` are its metrics `step/NAME`.

    wandb's own variables choose its server, key and mode, such as WANDB_MODE=offline. Needs the
    package wandb (extra `wandb`), which is imported here.
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Begin a run.

        Args:
            project: The project.
            name: Name of the run, such as the worker's; None: wandb chooses one.
            group: Group of runs that belong together, such as the job's; None: none.
            config: Settings to show with the run.
            options: Further arguments of `wandb.init`.

        Raises:
            ConfigError: wandb is not installed.
        """
        require_package("wandb", extra="wandb")
        import wandb

        self._run: Any = wandb.init(
            project=project, name=name, group=group, config=dict(config or {}), **options
        )
        self._run.define_metric("*", step_metric="trained_steps")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)

    def write(self, event: str, **values: object) -> None:
        """Log the numbers of an event at its `step`; it is a `redrb.metrics.events.Write`."""
        numbers = dict(numbers_of(values))
        step = int(numbers.pop("step", 0))
        if numbers:
            logged = {f"{event}/{name}": number for name, number in numbers.items()}
            self._run.log({**logged, "trained_steps": step})

    def close(self, *, failed: bool = False) -> None:
        """End the run."""
        self._run.finish(exit_code=int(failed))
