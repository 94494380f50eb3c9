"""`DeclaredSettings`: settings of optimizers that a program has changed hold after a resume."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch.optim import Optimizer

Groups: TypeAlias = list[dict[str, Any]]
"""Settings of each parameter group of an optimizer, such as `lr`."""

_PARAMETERS = ("params", "param_names")


class DeclaredSettings:
    """The settings with which a program has made its optimizers, as a part of a checkpoint.

    The state of an optimizer in a checkpoint has its settings, and loading it brings them back.
    Settings that are declared otherwise than before, as with another `--learning-rate`, are set
    after that. The others keep the values of the checkpoint, which a schedule may have changed.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Note the settings of new optimizers."""
        self._optimizers = optimizers
        self._now = {
            name: [
                {key: copy.copy(group[key]) for key in group.keys() - set(_PARAMETERS)}
                for group in optimizer.param_groups
            ]
            for name, optimizer in optimizers.items()
        }

    def state_dict(self) -> dict[str, Groups]:
        """Return the settings as they were declared."""
        return self._now

    def load_state_dict(self, state: Mapping[str, Groups]) -> None:
        """Set the settings that differ from those in `state`; the optimizers are loaded before."""
        for name, optimizer in self._optimizers.items():
            for group, now, before in zip(
                optimizer.param_groups, self._now[name], state[name], strict=True
            ):
                group |= {key: value for key, value in now.items() if value != before.get(key)}
