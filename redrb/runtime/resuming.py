"""Where a run goes on: the newest checkpoint is loaded once, then each `fit` finds its position."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from redrb.errors import ConfigError
from redrb.runtime.checkpoint import Checkpoints, Position, Stateful, Unacked
from redrb.runtime.world import newest_common_step


class Resumption:
    """The position at which a trainer goes on.

    Attributes:
        checkpoints: The trainer's checkpoints; None: it writes none.
        position: How far training has come; None until `load` was called.
    """

    def __init__(self, checkpoints: Checkpoints | None) -> None:
        self.checkpoints = checkpoints
        self.position: Position | None = None
        self._calls = 0

    def load(
        self,
        find_parts: Callable[[], Mapping[str, Stateful]],
        settle: Callable[[Unacked], None],
    ) -> Position:
        """Load the newest checkpoint that all ranks have, if any; all ranks must call it.

        Args:
            find_parts: Returns the parts that checkpoints hold.
            settle: Acknowledges the groups that the checkpoint holds as trained.

        Raises:
            DecodeError, ConfigError: The checkpoint cannot be used; nothing was loaded.
        """
        position = Position()
        if self.checkpoints is not None:
            parts = find_parts()
            if not parts:
                raise ConfigError(
                    "there is nothing for a checkpoint to hold: modules and optimizers are found "
                    "in the trainer's attributes, and in lists and dicts there; or override "
                    "checkpointed()."
                )
            step = newest_common_step(self.checkpoints.steps())
            if step is not None:
                position, unacked = self.checkpoints.load(step, parts)
                self.checkpoints.forget_after(step)
                settle(unacked)
        self.position = position
        return position

    def next_call(self) -> Position | None:
        """Return where the next call of `fit` begins; None if the run before has finished it."""
        call, self._calls = self._calls, self._calls + 1
        before = self.position or Position()
        if call < before.fit:
            return None
        if call > before.fit:
            self.position = Position(fit=call, step=before.step, taken=before.taken)
        return self.position
