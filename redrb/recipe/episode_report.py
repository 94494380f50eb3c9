"""What a maker of episodes reports: an event for each step's number of groups."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from redrb.experience import BufferItem
from redrb.metrics.events import Write

if TYPE_CHECKING:
    from redrb.recipe.episode_maker import EpisodeRecipeMaker


class EpisodeReport:
    """Writes an event `put` whenever as many groups as a step has prompts are made.

    `step_s` is the time since the event before; `admission_s` the part of it in which the maker had
    no group and waited for the right to begin one; `fetch_s` the wait for new weights;
    `backpressure_s` the time for which groups waited for room, which does not hold up the others.
    """

    def __init__(self, maker: EpisodeRecipeMaker, groups: int, write: Write) -> None:
        self._maker, self._each, self._write = maker, groups, write
        self._steps = self._groups = 0
        self._rewards: list[float] = []
        self._before = (0.0, 0.0, 0.0, 0.0)

    def add_group(self, items: list[BufferItem]) -> None:
        """Count a complete group; write the step if it is the last of one."""
        if not any(self._before):
            self._before = (time.perf_counter(), 0.0, 0.0, 0.0)
        self._groups += 1
        self._rewards += [float(item.reward) for item in items if item.reward is not None]
        if self._groups == self._each:
            self._write_step()

    def _write_step(self) -> None:
        maker, rewards = self._maker, self._rewards
        before = self._before
        now = (time.perf_counter(), maker.admission_s, maker.backpressure_s, maker.fetch_s)
        step_s, admission_s, backpressure_s, fetch_s = (
            new - old for new, old in zip(now, before, strict=True)
        )
        self._steps += 1
        self._write(
            "put",
            step=self._steps,
            step_s=step_s,
            admission_s=admission_s,
            fetch_s=fetch_s,
            groups=self._groups,
            samples=len(rewards),
            policy_version=maker.policy_version,
            reward=sum(rewards) / len(rewards),
            send_s=backpressure_s,
            backpressure_s=backpressure_s,
        )
        self._groups, self._rewards, self._before = 0, [], now
